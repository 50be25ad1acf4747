#include "kernels/linear_int16.h"

#include "kernels/int16_panel.h"

namespace octavo {
namespace {

constexpr int64_t kColumns = Matrix::kPanelColumns;
constexpr int64_t kCacheBytes = 3 << 19;  // of the L2 that operands take at most

// Sums [2][rows][32] of a block and a panel become values [rows][32], in the same place.
void scale_sums(int32_t* sums, int64_t rows, const float* row_scales, const float* column_scales) {
  const Vec first = Vec::load(column_scales), second = Vec::load(column_scales + 16);
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t *high = sums + r * kColumns, *low = high + rows * kColumns;
    const Vec scale = Vec::set1(row_scales[r]);
    const Vec a = joined(high, low) * (scale * first), b = joined(high + 16, low + 16) * (scale * second);
    float* out = reinterpret_cast<float*>(sums) + r * kColumns;
    a.store(out);
    b.store(out + 16);
  }
}

// All row blocks times this worker's panels.
template <class Finish>
void multiply_panels(const RowBlocks& blocks, const Int16Rows& packed, const Matrix& weight, Worker::Range panels,
                     int64_t panel_stride, const Finish& finish) {
  struct Tiles;
  const int64_t tiles_of_panel = blocks.num_blocks * Int16Panel::kTileSize;
  int32_t* tiles = scratch<Tiles, int32_t>(Finish::kPanels * tiles_of_panel);
  for (int64_t p = panels.begin; p < panels.end; ++p) {
    for (int64_t i = 0; i < Finish::kPanels; ++i) {
      const int64_t panel = p + i * panel_stride;
      int32_t* const tiles_of_this = tiles + i * tiles_of_panel;
      Int16Panel::multiply(blocks, packed, weight, panel, tiles_of_this, [&](int64_t b) {
        scale_sums(tiles_of_this + b * Int16Panel::kTileSize, blocks.height(b),
                   packed.scales(blocks.first + blocks.begin(b)), weight.int8_columns(panel).scales);
        if (i + 1 < Finish::kPanels) return;
        const float* finished[Finish::kPanels];
        for (int64_t j = 0; j < Finish::kPanels; ++j)
          finished[j] = reinterpret_cast<const float*>(tiles + j * tiles_of_panel + b * Int16Panel::kTileSize);
        finish(finished, blocks.first + blocks.begin(b), blocks.height(b), p);
      });
    }
  }
}

int64_t rows_at_once(int64_t columns) {
  constexpr int64_t kRows = Int16Panel::kRows;
  const int64_t blocks = kCacheBytes / static_cast<int64_t>(Int16Rows::bytes(1, columns)) / kRows;
  return std::clamp(blocks * kRows, 2 * kRows, Int16Panel::kMaxRowsAtOnce);
}

}  // namespace

// One row block more than is filled: an AMX tile always reads all of its rows.
size_t int16_shared_bytes(int64_t rows, int64_t columns) {
  return Int16Rows::bytes(std::min(rows, rows_at_once(columns)) + Int16Panel::kRows, columns);
}

template <class Finish>
void linear_int16(View x, const Matrix& weight, Worker::Range panels, int64_t panel_stride, const Finish& finish,
                  const Team& team) {
  constexpr int64_t kRows = Int16Panel::kRows;
  const int64_t at_once = rows_at_once(x.columns);
  const auto multiply = [&](const RowBlocks& blocks, const Int16Rows& packed) {
#ifdef __AMX_INT8__
    const AmxSession session(AmxShapes::accumulators(Int16Tile::kPlanes * blocks.height(0)));
#endif
    multiply_panels(blocks, packed, weight, panels, panel_stride, finish);
  };
  if (x.reader)
    return for_each_part(x.rows, at_once, kRows, [&](const RowBlocks& blocks) {
      if (blocks.num_blocks == 1 && team.worker.count > 1)
        Prefetch{reinterpret_cast<const char*>(Int16Rows(x).operands(blocks.first)),
                 blocks.rows * Int16Rows::operands_of_row(x.columns) * static_cast<int64_t>(sizeof(Int16Tile::Operand))}
            .step(0);
      multiply(blocks, Int16Rows(x));
    });
  const auto rows_in = [&](const RowBlocks& blocks, void* memory) {
    return Int16Rows(weight, blocks.first, blocks.rows, blocks.block_rows, memory);
  };
  const auto pack = [&](const RowBlocks& blocks, Worker worker, void* memory) {
    const Worker::Range mine = worker.share(blocks.rows);
    for (int64_t row = blocks.first + mine.begin; row < blocks.first + mine.end; ++row) {
      fetch_ahead(x, row, team.worker);
      rows_in(blocks, memory).pack(row, x.row(row));
    }
  };
  pack_and_multiply(x.rows, at_once, kRows, kRowsWorthMeeting, int16_shared_bytes(x.rows, x.columns), team, pack,
                    [&](const RowBlocks& blocks, void* memory) { multiply(blocks, rows_in(blocks, memory)); });
}

template void linear_int16(View, const Matrix&, Worker::Range, int64_t, const StoreTile&, const Team&);
template void linear_int16(View, const Matrix&, Worker::Range, int64_t, const StoreLogits&, const Team&);
template void linear_int16(View, const Matrix&, Worker::Range, int64_t, const SiluMulTiles&, const Team&);

}  // namespace octavo
