#include "octavo/limits.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <vector>

#include "octavo/memory.h"
#include "tiles/tile.h"

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

template <class Tile>
double measure_tile(ThreadPool& pool) {
  constexpr int64_t kSteps = 512, kRepeats = 400;
  constexpr int R = kTileRows, V = kTileVectors;
  double seconds = 0;
  std::vector<float> sums(pool.size() * 16);
  seconds = seconds_of(pool, [&](int index) {
    struct Operands;
    struct Weights;
    auto* operands = scratch<Operands, typename Tile::Operand>(R * kSteps);
    auto* panel = scratch<Weights, typename Tile::Weight>(kSteps * 16 * V * Tile::kStep);
    const typename Tile::Weight* weights[V];
    for (int v = 0; v < V; ++v) weights[v] = panel + v * 16 * Tile::kStep;
    Vec acc[R][V] = {};
    for (int64_t i = 0; i < kRepeats; ++i)
      multiply_add<Tile, R, V>(acc, operands, R * kBlockSteps, weights, 16 * V * Tile::kStep, kSteps);
    Vec total = Vec::zero();
    for (auto& row : acc)
      for (const Vec& v : row) total = total + v;
    total.store(sums.data() + index * 16);
  });
  if (std::accumulate(sums.begin(), sums.end(), 0.0f) < 0) return 0;
  return 2.0 * R * V * 16 * Tile::kStep * kSteps * kRepeats * pool.size() / seconds;
}

}  // namespace

double measure_flops(ThreadPool& pool, DType dtype) {
  return dtype == DType::kBFloat16 ? measure_tile<BFloat16Tile>(pool) : measure_tile<Float32Tile>(pool);
}

}  // namespace octavo
