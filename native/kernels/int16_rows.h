// Activations quantised to int16, a scale for each row: the operands of linear_int16.
#pragma once

#include <limits>

#include "kernels/row_blocks.h"
#include "tiles/int16_tile.h"

namespace octavo {

// The largest |x| of a row becomes this code: its upper byte, rounded, still is one.
inline constexpr float kHighestInt16 = 32639.0f;
// Rows of nothing larger are zeros: the reciprocal of their scale may not be a number.
inline constexpr float kLeastActivation = 1e-30f;

// The operands of some rows, [block][16 steps][plane][row][16], and the scale of each row before them.
class Int16Rows {
 public:
#ifdef __AMX_INT8__
  static constexpr int64_t kMaxBlockRows = 16;  // of two planes each
#else
  static constexpr int64_t kMaxBlockRows = kTileRows / Int16Tile::kPlanes;
#endif

  // Of rows [first, first + rows) of the inputs of products with `weight`, in `memory`.
  Int16Rows(const Matrix& weight, int64_t first, int64_t rows, int64_t block_rows, void* memory)
      : weight_(weight),
        blocks_{first, rows, block_rows},
        scales_(static_cast<float*>(memory)),
        operands_(reinterpret_cast<Int16Tile::Operand*>(static_cast<char*>(memory) + scale_bytes(rows))) {}
  // `rows`: packed.
  explicit Int16Rows(View rows)
      : Int16Rows(*rows.reader, 0, rows.rows, block_height(rows.rows, kMaxBlockRows), rows.data) {}

  static int64_t operands_of_row(int64_t columns) {
    return Int16Tile::kPlanes * round_up(divide_up(columns, Int16Tile::kStep), kBlockSteps);
  }
  static size_t bytes(int64_t rows, int64_t columns) {
    return scale_bytes(rows) + static_cast<size_t>(rows * operands_of_row(columns)) * sizeof(Int16Tile::Operand);
  }

  // They take no more than the floats in whose place they are.
  static bool fit(int64_t columns) { return columns > 16; }

  const float* scales(int64_t row) const { return scales_ + row - blocks_.first; }
  // From the first row of a block on.
  Int16Tile::Operand* operands(int64_t row) const {
    return operands_ + (row - blocks_.first) * operands_of_row(weight_.columns());
  }
  void pack(int64_t row, const float* x) const {
    const int64_t b = (row - blocks_.first) / blocks_.block_rows, begin = blocks_.first + blocks_.begin(b);
    pack(x, blocks_.height(b), operands(begin) + (row - begin) * kBlockSteps, scales_[row - blocks_.first]);
  }

 private:
  static size_t scale_bytes(int64_t rows) { return static_cast<size_t>(round_up(rows, 16)) * sizeof(float); }

  // One row of a block of `rows`.
  void pack(const float* x, int64_t rows, Int16Tile::Operand* out, float& scale) const {
    const int64_t columns = weight_.columns();
    // As integers, the bits of |x| are in its order, and what is not finite is beyond all numbers.
    Integers highest = Integers::zero();
    const int64_t whole = columns / 16 * 16;
    for (int64_t k = 0; k < whole; k += 16) highest = max(highest, Integers::bits_of(abs(load(x, k))));
    if (whole < columns) highest = max(highest, Integers::bits_of(abs(load(x, whole, columns))));
    const float top = std::bit_cast<float>(largest(highest));
    const bool finite = top <= std::numeric_limits<float>::max();
    scale = finite ? top / kHighestInt16 : std::numeric_limits<float>::quiet_NaN();
    const bool zeros = !finite || !(top > kLeastActivation);
    const Vec inverse = Vec::set1(zeros ? 0.0f : kHighestInt16 / top);
    constexpr int64_t kBlock = kBlockSteps * Int16Tile::kStep;
    const auto store = [&](int64_t k, auto load_at) __attribute__((always_inline)) {
      Integers codes[Int16Tile::kStep];
#pragma GCC unroll 4
      for (int v = 0; v < Int16Tile::kStep; ++v) codes[v] = Integers::rounded(load_at(k + v * 16) * inverse);
      Int16Tile::store_block(out, rows * kBlockSteps, codes);
      out += Int16Tile::kPlanes * rows * kBlockSteps;
    };
    const int64_t end = zeros ? 0 : columns;
    int64_t k = 0;
    for (; k + kBlock <= end; k += kBlock) store(k, [&](int64_t at) { return load(x, at); });
    for (; k < columns; k += kBlock) store(k, [&](int64_t at) { return load(x, at, end); });
  }

  Vec load(const float* x, int64_t k) const { return Vec::load(x + k) * Vec::load(weight_.channel_scales() + k); }
  // x[k, k + 16) times the scales of the channels, with zeros from `end` on.
  Vec load(const float* x, int64_t k, int64_t end) const {
    const int n = static_cast<int>(std::clamp<int64_t>(end - k, 0, 16));
    return Vec::load(x + (n ? k : 0), n) * Vec::load(weight_.channel_scales() + k);
  }

  const Matrix& weight_;
  RowBlocks blocks_;
  float* scales_;
  Int16Tile::Operand* operands_;
};

}  // namespace octavo
