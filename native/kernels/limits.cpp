#include "octavo/limits.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <vector>

#include "octavo/memory.h"
#include "tiles/byte_products.h"
#include "tiles/tile.h"
#ifdef __AMX_BF16__
#include "tiles/amx.h"
#endif

namespace octavo {
namespace {

double seconds_of(ThreadPool& pool, auto&& work) {
  double best = 1e9;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const auto began = std::chrono::steady_clock::now();
    pool.run(work);
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
  return best;
}

}  // namespace

double measure_bandwidth(ThreadPool& pool, size_t bytes) {
  const Memory memory(bytes);
  const int64_t vectors = static_cast<int64_t>(bytes / 64);
  std::vector<float> sums(pool.size() * 16);
  // Touch every page first: untouched ones all alias the kernel's one zero page.
  pool.run([&](int index) {
    const auto range = Worker{index, pool.size()}.share(vectors);
    for (int64_t i = range.begin; i < range.end; ++i) Vec::set1(1.0f).store(memory.as<float>() + i * 16);
  });
  const double seconds = seconds_of(pool, [&](int index) {
    const auto range = Worker{index, pool.size()}.share(vectors);
    Vec acc[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
    for (int64_t i = range.begin; i + 4 <= range.end; i += 4) {
      for (int v = 0; v < 4; ++v) acc[v] = acc[v] + Vec::load(memory.as<float>() + (i + v) * 16);
      __builtin_prefetch(memory.as<char>() + i * 64 + 4096);
    }
    (acc[0] + acc[1] + acc[2] + acc[3]).store(sums.data() + index * 16);
  });
  // Use the sums, so that the reads are not optimised away.
  return std::accumulate(sums.begin(), sums.end(), 0.0f) < 0 ? 0 : static_cast<double>(bytes) / seconds;
}

namespace {

// Operations per second of `multiply(operands, panel, out)`, which computes [rows][32] over `steps` steps, all in
// cache.
template <class Tile, class Multiply>
double measure_panel(ThreadPool& pool, int64_t rows, int64_t steps, Multiply multiply) {
  constexpr int64_t kRepeats = 400, kColumns = Matrix::kPanelColumns;
  const double seconds = seconds_of(pool, [&](int) {
    struct Operands;
    struct Panel;
    struct Out;
    const auto* operands = scratch<Operands, typename Tile::Operand>(rows * steps);
    const auto* panel = scratch<Panel, typename Tile::Weight>(steps * kColumns * Tile::kStep);
    float* out = scratch<Out, float>(rows * kColumns);
    for (int64_t i = 0; i < kRepeats; ++i) multiply(operands, panel, out);
  });
  return 2.0 * static_cast<double>(rows * kColumns * Tile::kStep * steps * kRepeats * pool.size()) / seconds;
}

constexpr int64_t kSteps = 512;

template <class Tile>
double measure_vectors(ThreadPool& pool) {
  constexpr int R = kTileRows, V = kTileVectors;
  return measure_panel<Tile>(pool, R, kSteps, [](const auto* operands, const auto* panel, float* out) {
    for (int64_t first = 0; first < Matrix::kPanelColumns / 16; first += V) {
      Vec acc[R][V];
      const typename Tile::Weight* weights[V];
      for (int v = 0; v < V; ++v) weights[v] = panel + (first + v) * 16 * Tile::kStep;
      for (auto& row : acc)
        for (Vec& v : row) v = Vec::zero();
      multiply_add<Tile, R, V>(acc, operands, R * kBlockSteps, weights, Matrix::kPanelColumns * Tile::kStep, kSteps);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) acc[r][v].store(out + r * Matrix::kPanelColumns + (first + v) * 16);
    }
  });
}

double measure_bfloat16(ThreadPool& pool) {
#ifdef __AMX_BF16__
  return measure_panel<BFloat16Tile>(pool, kAmxRows, kSteps, [](const auto* operands, const auto* panel, float* out) {
    const AmxSession session;
    AmxAccumulators::zero();
    AmxAccumulators::add(kAmxRows, operands, panel, kSteps / kBlockSteps, {});
    AmxAccumulators::store(kAmxRows, out);
  });
#else
  return measure_vectors<BFloat16Tile>(pool);
#endif
}

double measure_int8(ThreadPool& pool) {
  constexpr int64_t kPasses = 200000;
  std::vector<int64_t> products(pool.size());
  const double seconds = seconds_of(pool, [&](int index) {
    struct Rows;
    struct Columns;
    struct Sums;
    products[index] = multiply_bytes(scratch<Rows, uint8_t>(kByteOperands), scratch<Columns, uint8_t>(kByteOperands),
                                     kPasses, scratch<Sums, uint8_t>(kByteSums));
  });
  return 2.0 * static_cast<double>(products[0] * pool.size()) / seconds;
}

}  // namespace

double measure_flops(ThreadPool& pool, DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return measure_bfloat16(pool);
    case DType::kInt8:
      return measure_int8(pool);
    default:
      return measure_vectors<Float32Tile>(pool);
  }
}

}  // namespace octavo
