// The multiply tiles: R rows of activations times vectors of 16 outputs, each output summed over k in ascending order
// by one accumulator, whatever R is. linear and attention are both made of them.
//
// A tile type brings Weight and Operand (what the two sides are made of), kStep (k per step), load, multiply_add,
// store_operands (of a vector) and store_block (of a row's part of a block). Operands lie in blocks of 16 steps,
// [block][row][16], so that one address register and constant offsets reach all rows, and packing them is a straight
// conversion.
#pragma once

#include "octavo/matrix.h"
#include "tiles/vec.h"

namespace octavo {

#ifdef __AVX512F__
// 32 registers: 12 rows x 2 vectors of accumulators, 2 of weights, and room for a broadcast.
inline constexpr int kTileRows = 12, kTileVectors = 2;
#else
// 16 registers of half the width: 3 rows x 1 vector (of two registers), weights and broadcasts.
inline constexpr int kTileRows = 3, kTileVectors = 1;
#endif
inline constexpr int64_t kBlockSteps = Matrix::kBlockSteps;

struct Float32Tile {
  using Weight = float;
  using Operand = float;
  using Weights = Vec;
  using Sum = Vec;
  static constexpr int kStep = 1;

  static Weights load(const Weight* w) { return Vec::load(w); }
  static Vec multiply_add(Vec acc, Weights w, const Operand* a) { return fma(w, Vec::set1(*a), acc); }
  static void store_operands(Operand* out, Vec x) { x.store(out); }
  static void store_block(Operand* out, const Vec (&x)[kStep]) { x[0].store(out); }
};

struct BFloat16Tile {
  using Weight = bf16;
  using Operand = PairOperand;
  using Weights = Pairs;
  using Sum = Vec;
  static constexpr int kStep = 2;

  static Weights load(const Weight* w) { return Pairs::load(w); }
  static Vec multiply_add(Vec acc, Weights w, const Operand* a) { return dot(acc, w, a); }
  static void store_operands(Operand* out, Vec x) { store_pairs(out, x); }
  static void store_block(Operand* out, const Vec (&x)[kStep]) { store_pairs(out, x[0], x[1]); }
};

// Operands in `rows` rows of `columns` floats, with their blocks padded to the full 16 steps.
template <class Tile>
int64_t num_operands(int64_t rows, int64_t columns) {
  return rows * round_up(divide_up(columns, Tile::kStep), kBlockSteps);
}

// One row of x [columns] -> its operands in a packing of `rows` rows, [block][rows][16], zeros beyond `columns`.
template <class Tile>
void pack_row(const float* x, int64_t columns, int64_t rows, typename Tile::Operand* out) {
  for (int64_t k = 0; k < columns; k += kBlockSteps * Tile::kStep, out += rows * kBlockSteps) {
    for (int64_t v = 0; v < Tile::kStep; ++v) {
      const int n = static_cast<int>(std::clamp<int64_t>(columns - k - v * 16, 0, 16));
      Tile::store_operands(out + v * 16 / Tile::kStep, Vec::load(x + (n ? k + v * 16 : 0), n));
    }
  }
}

// What to fetch into the caches while a panel is multiplied: `bytes_per_step` from `from` on in each step.
struct Prefetch {
  const char* from = nullptr;
  int64_t bytes_per_step = 0;
  bool into_l2 = false;  // and no nearer: what is used soon keeps the L1 and the buffers that fill it

  void step(int64_t s) const { fetch(s, 0, bytes_per_step); }
  // The same in four parts, so that they can stand between other loads: all at once they would queue up. What is wanted
  // in the L1 is wanted soon, and comes with the first.
  void quarter(int64_t s, int i) const {
    if (into_l2)
      fetch(s, bytes_per_step * i / 4, bytes_per_step * (i + 1) / 4);
    else if (i == 0)
      step(s);
  }

 private:
  void fetch(int64_t s, int64_t begin, int64_t end) const {
    const char* line = from + s * bytes_per_step;
    // Not __builtin_prefetch: in loops of vectors gcc takes it for without effect, and deletes it.
    if (into_l2)
      for (int64_t b = begin; b < end; b += 64) asm volatile("prefetcht1 %0" ::"m"(line[b]));
    else
      for (int64_t b = begin; b < end; b += 64) asm volatile("prefetcht0 %0" ::"m"(line[b]));
  }
};

// acc[r][v] += operands of row r * weights of vector v, over steps [0, steps). Vector v of step s stands at
// weights[v] + s * weight_stride, the operand of row r at operands[s / 16 * block_stride + r * 16 + s % 16].
template <class Tile, int R, int V, class Fetch = Prefetch>
[[gnu::always_inline]] inline void multiply_add(typename Tile::Sum (&acc)[R][V], const typename Tile::Operand* operands,
                                                int64_t block_stride, const typename Tile::Weight* const (&weights)[V],
                                                int64_t weight_stride, int64_t steps, Fetch fetch = {}) {
  for (int64_t begin = 0; begin < steps; begin += kBlockSteps, operands += block_stride) {
    const int64_t end = std::min<int64_t>(begin + kBlockSteps, steps);
    const typename Tile::Operand* a = operands;
    for (int64_t s = begin; s < end; ++s, ++a) {
      fetch.step(s);
      typename Tile::Weights w[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) w[v] = Tile::load(weights[v] + s * weight_stride);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[r][v] = Tile::multiply_add(acc[r][v], w[v], a + r * kBlockSteps);
    }
  }
}

}  // namespace octavo
