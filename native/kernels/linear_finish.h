// What becomes of finished tiles of a product: `tiles[i]` is [rows][32] sums of the i-th of kPanels panels, which the
// matrix's column scales turn into rows [first_row, first_row + rows) of the output.
#pragma once

#include "kernels/logit_row.h"
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
      store_carefully(tiles[0], first_row, rows, panel);
    else if (residual)
      store<true>(tiles[0], first_row, rows, panel);
    else
      store<false>(tiles[0], first_row, rows, panel);
  }

 private:
  template <bool kResidual>
  void store(const float* tile, int64_t first_row, int64_t rows, int64_t panel) const {
    const int64_t column = panel * Matrix::kPanelColumns;
    const float* scales = weight.column_scales(panel);
    const Vec first_scale = Vec::load(scales), second_scale = Vec::load(scales + 16);
    for (int64_t r = 0; r < rows; ++r, tile += Matrix::kPanelColumns) {
      float* to = out.row(first_row + r) + column;
      Vec first = Vec::load(tile) * first_scale, second = Vec::load(tile + 16) * second_scale;
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
  void store_carefully(const float* tile, int64_t first_row, int64_t rows, int64_t panel) const {
    for (int64_t v = 0; v < Matrix::kPanelColumns; v += 16) {
      const int64_t column = panel * Matrix::kPanelColumns + v;
      const int n = static_cast<int>(std::min<int64_t>(16, weight.rows() - column));
      if (n <= 0) return;
      const Vec scale = Vec::load(weight.column_scales(panel) + v);
      const Vec bias = weight.bias() ? Vec::load(weight.bias() + column, n) : Vec::zero();
      for (int64_t r = 0; r < rows; ++r) {
        Vec y = Vec::load(tile + r * Matrix::kPanelColumns + v) * scale;
        if (weight.bias()) y = y + bias;
        if (residual) y = Vec::load(residual->row(first_row + r) + column, n) + y;
        y.store(out.row(first_row + r) + column, n);
      }
    }
  }
};

// As StoreTile, and maxima [rows][panels]: the largest of each row of the tile, for the sampler (`maximum`).
//
// Many rows of logits are more than the caches hold: they go to memory past them (`streams`), which would otherwise be
// read before it is written. `flush` when all are written.
struct StoreLogits {
  static constexpr int kPanels = 1;
  static constexpr int64_t kRowsWorthStreaming = 16;
  StoreTile store;
  View maxima;
  bool streams = store.out.rows >= kRowsWorthStreaming && reinterpret_cast<uintptr_t>(store.out.data) % 64 == 0 &&
                 store.out.stride % 16 == 0;

  void operator()(const float* const (&tiles)[kPanels], int64_t first_row, int64_t rows, int64_t panel) const {
    const int64_t column = panel * Matrix::kPanelColumns, count = store.weight.rows() - column;
    if (count < Matrix::kPanelColumns || store.weight.bias()) {
      store(tiles, first_row, rows, panel);
      for (int64_t row = first_row; row < first_row + rows; ++row)
        maxima.row(row)[panel] =
            maximum(store.out.row(row) + column, static_cast<int32_t>(std::min(Matrix::kPanelColumns, count)));
      return;
    }
    const Vec first_scale = Vec::load(store.weight.column_scales(panel)),
              second_scale = Vec::load(store.weight.column_scales(panel) + 16);
    for (int64_t r = 0; r < rows; ++r) {
      const float* tile = tiles[0] + r * Matrix::kPanelColumns;
      const Vec first = Vec::load(tile) * first_scale, second = Vec::load(tile + 16) * second_scale;
      float* to = store.out.row(first_row + r) + column;
      if (streams) {
        first.stream(to);
        second.stream(to + 16);
      } else {
        first.store(to);
        second.store(to + 16);
      }
      maxima.row(first_row + r)[panel] = maximum(first, second);
    }
  }

  static void flush() { _mm_sfence(); }
};

// silu(gate) * up of two panels, those of the same columns of both halves of the matrix. Where `out` is packed the rows
// are those of one of its blocks.
struct SiluMulTiles {
  static constexpr int kPanels = 2;
  const Matrix& weight;
  View out;

  void operator()(const float* const (&tiles)[kPanels], int64_t first_row, int64_t rows, int64_t panel) const {
    const int64_t column = panel * Matrix::kPanelColumns;
    const float* const scales[] = {weight.column_scales(panel), weight.column_scales(panel + weight.num_panels() / 2)};
    const auto finished = [&](int64_t r, int64_t v) { return finish(tiles, scales, r, v, column); };
    if (out.reader) {
      const PackedRows packed(out);
      PairOperand* to = packed.group(first_row, panel);
      const Vec factor = Vec::set1(packed.factor());
      for (int64_t r = 0; r < rows; ++r, to += kBlockSteps)
        store_pairs(to, finished(r, 0) * factor, finished(r, 16) * factor);
      return;
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t v = 0; v < Matrix::kPanelColumns; v += 16) finished(r, v).store(out.row(first_row + r) + column + v);
  }

 private:
  // Columns [v, v + 16) of row r of the tiles, which are columns [column + v …) of the output.
  Vec finish(const float* const (&tiles)[kPanels], const float* const (&scales)[kPanels], int64_t r, int64_t v,
             int64_t column) const {
    Vec gate = Vec::load(tiles[0] + r * Matrix::kPanelColumns + v) * Vec::load(scales[0] + v);
    Vec up = Vec::load(tiles[1] + r * Matrix::kPanelColumns + v) * Vec::load(scales[1] + v);
    if (const float* bias = weight.bias()) {
      gate = gate + Vec::load(bias + column + v);
      up = up + Vec::load(bias + out.columns + column + v);
    }
    return silu(gate) * up;
  }
};

}  // namespace octavo
