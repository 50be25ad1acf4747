// What becomes of finished tiles of a product: `tiles[i]` is [rows][32] floats of the i-th of kPanels panels, for rows
// [first_row, first_row + rows) of the output.
#pragma once

#include "kernels/packed_rows.h"
#include "octavo/matrix.h"
#include "tiles/vec.h"

namespace octavo {

// One panel, written to its place with bias and residual, and without the columns beyond N.
struct StoreTile {
  static constexpr int kPanels = 1;
  const Matrix& weight;
  const View* residual;
  View out;

  void operator()(const float* const (&tiles)[kPanels], int64_t first_row, int64_t rows, int64_t panel) const {
    const int64_t column = panel * Matrix::kPanelColumns;
    if (column + Matrix::kPanelColumns > weight.rows() || weight.bias())
      store_carefully(tiles[0], first_row, rows, column);
    else if (residual)
      store<true>(tiles[0], first_row, rows, column);
    else
      store<false>(tiles[0], first_row, rows, column);
  }

 private:
  template <bool kResidual>
  void store(const float* tile, int64_t first_row, int64_t rows, int64_t column) const {
    for (int64_t r = 0; r < rows; ++r, tile += Matrix::kPanelColumns) {
      float* to = out.row(first_row + r) + column;
      Vec first = Vec::load(tile), second = Vec::load(tile + 16);
      if constexpr (kResidual) {
        const float* added = residual->row(first_row + r) + column;
        first = Vec::load(added) + first;
        second = Vec::load(added + 16) + second;
      }
      first.store(to);
      second.store(to + 16);
    }
  }

  // With a bias, or columns beyond N.
  void store_carefully(const float* tile, int64_t first_row, int64_t rows, int64_t first_column) const {
    for (int64_t v = 0; v < Matrix::kPanelColumns; v += 16) {
      const int64_t column = first_column + v;
      const int n = static_cast<int>(std::min<int64_t>(16, weight.rows() - column));
      if (n <= 0) return;
      const Vec bias = weight.bias() ? Vec::load(weight.bias() + column, n) : Vec::zero();
      for (int64_t r = 0; r < rows; ++r) {
        Vec y = Vec::load(tile + r * Matrix::kPanelColumns + v);
        if (weight.bias()) y = y + bias;
        if (residual) y = Vec::load(residual->row(first_row + r) + column, n) + y;
        y.store(out.row(first_row + r) + column, n);
      }
    }
  }
};

// silu(gate) * up of two panels, those of the same columns of both halves of the matrix. Where `out` is packed the rows
// are those of one of its blocks.
struct SiluMulTiles {
  static constexpr int kPanels = 2;
  const Matrix& weight;
  View out;

  void operator()(const float* const (&tiles)[kPanels], int64_t first_row, int64_t rows, int64_t panel) const {
    const int64_t column = panel * Matrix::kPanelColumns;
    if (out.packed) {
      PairOperand* to = PackedRows(out).group(first_row, panel);
      for (int64_t r = 0; r < rows; ++r, to += kBlockSteps)
        store_pairs(to, finished(tiles, r, 0, column), finished(tiles, r, 16, column));
      return;
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t v = 0; v < Matrix::kPanelColumns; v += 16)
        finished(tiles, r, v, column).store(out.row(first_row + r) + column + v);
  }

 private:
  // Columns [v, v + 16) of row r of the tiles.
  Vec finished(const float* const (&tiles)[kPanels], int64_t r, int64_t v, int64_t column) const {
    Vec gate = Vec::load(tiles[0] + r * Matrix::kPanelColumns + v);
    Vec up = Vec::load(tiles[1] + r * Matrix::kPanelColumns + v);
    if (const float* bias = weight.bias()) {
      gate = gate + Vec::load(bias + column + v);
      up = up + Vec::load(bias + out.columns + column + v);
    }
    return silu(gate) * up;
  }
};

}  // namespace octavo
