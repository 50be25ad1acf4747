#include "octavo/limits.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <vector>

#include "octavo/memory.h"
#include "tiles/byte_products.h"
#include "tiles/narrow_tile.h"
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

// Values that are nothing special: products of zeros take less power, and may be faster than those of numbers.
float some_value(uint32_t i) { return static_cast<float>(i * 2654435761u >> 8) * 0x1p-23f - 1.0f; }

void set(float* to, float x) { *to = x; }
void set(bf16* to, float x) { *to = to_bf16(x); }

constexpr int64_t kSteps = 96;  // operands and panel lie in the first cache together

// Operations per second of `multiply(operands, panel, out)`, which computes [rows][32] over kSteps steps, long enough
// for the clock to settle.
template <class Tile, class Multiply>
double measure_panel(ThreadPool& pool, int64_t rows, Multiply multiply) {
  constexpr int64_t kRepeats = 100000, kColumns = Matrix::kPanelColumns, kDepth = kSteps * Tile::kStep;
  const double seconds = seconds_of(pool, [&](int) {
    struct Values;
    struct Operands;
    struct Panel;
    struct Out;
    float* values = scratch<Values, float>(rows * kDepth);
    auto* operands = scratch<Operands, typename Tile::Operand>(rows * kSteps);
    auto* panel = scratch<Panel, typename Tile::Weight>(kDepth * kColumns);
    float* out = scratch<Out, float>(rows * kColumns);
    for (int64_t i = 0; i < rows * kDepth; ++i) values[i] = some_value(static_cast<uint32_t>(i));
    for (int64_t r = 0; r < rows; ++r) pack_row<Tile>(values + r * kDepth, kDepth, rows, operands + r * kBlockSteps);
    for (int64_t i = 0; i < kDepth * kColumns; ++i) set(panel + i, some_value(static_cast<uint32_t>(7 * i + 1)));
    for (int64_t i = 0; i < kRepeats; ++i) multiply(operands, panel, out);
  });
  return 2.0 * static_cast<double>(rows * kColumns * kDepth * kRepeats * pool.size()) / seconds;
}

template <class Tile>
double measure_vectors(ThreadPool& pool) {
  constexpr int R = kTileRows, V = kTileVectors;
  return measure_panel<Tile>(pool, R, [](const auto* operands, const auto* panel, float* out) {
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
  return measure_panel<BFloat16Tile>(pool, kAmxRows, [](const auto* operands, const auto* panel, float* out) {
    const AmxSession session;
    AmxAccumulators::zero();
    AmxAccumulators::add(kAmxRows, operands, panel, kSteps / kBlockSteps, {}, false);
    AmxAccumulators::store(kAmxRows, out);
  });
#else
  return measure_vectors<BFloat16Tile>(pool);
#endif
}

double measure_int8(ThreadPool& pool) {
  constexpr int64_t kPasses = 2000000;
  std::vector<int64_t> products(pool.size());
  const double seconds = seconds_of(pool, [&](int index) {
    struct Rows;
    struct Columns;
    struct Sums;
    uint8_t *rows = scratch<Rows, uint8_t>(kByteOperands), *columns = scratch<Columns, uint8_t>(kByteOperands);
    for (int64_t i = 0; i < kByteOperands; ++i) {
      rows[i] = static_cast<uint8_t>(128 + 127 * some_value(static_cast<uint32_t>(i)));
      columns[i] = static_cast<uint8_t>(128 + 127 * some_value(static_cast<uint32_t>(7 * i + 1)));
    }
    products[index] = multiply_bytes(rows, columns, kPasses, scratch<Sums, uint8_t>(kByteSums));
  });
  return 2.0 * static_cast<double>(products[0] * pool.size()) / seconds;
}

}  // namespace

double measure_work(ThreadPool& pool) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kTry = std::chrono::microseconds(500);
  constexpr int kTries = 8, kChains = 8, kLength = 256;  // eight sums keep the vector units of a core busy
  std::vector<int64_t> rounds(pool.size());
  int64_t most = 0;
  for (int i = 0; i < kTries; ++i) {
    pool.run([&](int index) {
      Vec acc[kChains];
      for (int c = 0; c < kChains; ++c) acc[c] = Vec::set1(some_value(static_cast<uint32_t>(c)));
      const Vec factor = Vec::set1(0.999f), more = Vec::set1(0.001f);
      const auto end = Clock::now() + kTry;
      int64_t done = 0;
      while (Clock::now() < end) {
        for (int k = 0; k < kLength; ++k)
          for (Vec& chain : acc) chain = fma(chain, factor, more);
        ++done;
      }
      Vec total = Vec::zero();
      for (const Vec& chain : acc) total = total + chain;
      rounds[index] = sum(total) == 0.0f ? 0 : done;  // so that nothing is optimised away
    });
    most = std::max(most, std::accumulate(rounds.begin(), rounds.end(), int64_t{0}));
  }
  return static_cast<double>(most);
}

double measure_flops(ThreadPool& pool, DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return measure_bfloat16(pool);
    case DType::kInt8:
      return measure_int8(pool);
    case DType::kInt16:
      return measure_int8(pool) / 2;  // its products are two of bytes
    default:
#ifdef __AMX_BF16__
      // Where weights allow it, products are some of bfloat16.
      return std::max(measure_vectors<Float32Tile>(pool), measure_bfloat16(pool) / NarrowTile::kPlanes);
#else
      return measure_vectors<Float32Tile>(pool);
#endif
  }
}

}  // namespace octavo
