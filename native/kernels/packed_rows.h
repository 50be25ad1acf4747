// Activations in the form in which products with bfloat16 matrices read them, where whoever computes them leaves that
// instead of floats: the operands of all rows, block by block of rows, each [32 columns][row][16 pairs]. The blocks are
// those of the product.
#pragma once

#include "kernels/row_blocks.h"
#include "tiles/unpack.h"

namespace octavo {

class PackedRows {
 public:
#ifdef __AMX_BF16__
  static constexpr int64_t kMaxBlockRows = 32;
#else
  static constexpr int64_t kMaxBlockRows = kTileRows;
#endif

  // `rows`: packed.
  explicit PackedRows(View rows)
      : blocks_{0, rows.rows, block_height(rows.rows, kMaxBlockRows)},
        operands_of_row_(num_operands<BFloat16Tile>(1, rows.columns)),
        operands_(reinterpret_cast<PairOperand*>(rows.data)),
        factor_(rows.packed) {}

  // From the first row of a block on.
  const PairOperand* from(int64_t row) const { return operands_ + row * operands_of_row_; }
  // The operands of columns [32 * group, 32 * group + 32) of a row; of the next row of its block 16 further on.
  PairOperand* group(int64_t row, int64_t group) const {
    const int64_t b = row / blocks_.block_rows, begin = blocks_.begin(b);
    return operands_ + begin * operands_of_row_ + (group * blocks_.height(b) + row - begin) * kBlockSteps;
  }
  // Row `row` [columns].
  void pack(int64_t row, const float* x, int64_t columns) const {
    const int64_t height = blocks_.height(row / blocks_.block_rows);
    if (factor_ == 1)
      pack_row<BFloat16Tile>(x, columns, height, group(row, 0));
    else
      pack_row<BlockInputTile>(x, columns, height, group(row, 0));
  }

 private:
  RowBlocks blocks_;
  int64_t operands_of_row_;
  PairOperand* operands_;
  float factor_;
};

}  // namespace octavo
