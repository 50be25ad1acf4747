#include "kernels/linear_int8.h"

#include <utility>

#include "kernels/int8_panel.h"
#include "octavo/memory.h"

namespace octavo {
namespace {

constexpr int64_t kColumns = Matrix::kPanelColumns;
constexpr int64_t kRowsAtOnce = 240;
constexpr int64_t kAhead = 4096;  // bytes by which a stream of weights is fetched early

// All rows of a packing, times one panel after another.
class PanelProducts {
 public:
  explicit PanelProducts(const Int8Packing& packing) : packing_(packing), starts_(packing), outliers_(packing) {
    struct OutlierWeights;
    outlier_weights_ = scratch<OutlierWeights, float>(outliers_.count() * kColumns);
  }

  // tiles [rows][32] = all rows times the panel.
  template <class Format>
  void multiply(const uint8_t* panel, float* tiles) {
    using Sum = GroupSum<Format::kBits, Format::kZero>;
    const RowBlocks& blocks = packing_.blocks;
    if constexpr (Sum::kStarts) starts_.make(Format::kZero, Format::kScales);
    // One block of rows: fetches the panel's stream, somewhat ahead. Several: the next panel, spread over the blocks.
    constexpr int64_t kGroupBytes = PanelGroup<Format>::kBytes;
    const int64_t panel_bytes = packing_.groups * kGroupBytes, share = panel_bytes / blocks.num_blocks;
    const int64_t ahead = blocks.num_blocks == 1 ? kAhead : panel_bytes;
    Prefetch prefetch{reinterpret_cast<const char*>(panel) + ahead, kGroupBytes / blocks.num_blocks};
    for (int64_t b = 0; b < blocks.num_blocks; ++b, prefetch.from += share)
      multiply_int8_rows<Format>(packing_.block(b), starts_.block(b), panel, packing_.groups, prefetch,
                                 tiles + blocks.begin(b) * kColumns, std::make_index_sequence<kInt8Rows>());
    for (int64_t slot = 0; slot < outliers_.count(); ++slot)
      unpack_channel<Format>(panel, outliers_.channel(slot), outlier_weights_ + slot * kColumns);
    for (int64_t b = 0; b < blocks.num_blocks; ++b)
      outliers_.add(packing_.block(b), blocks.begin(b), outlier_weights_, tiles + blocks.begin(b) * kColumns);
  }

 private:
  const Int8Packing& packing_;
  GroupStarts starts_;
  OutlierChannels outliers_;
  float* outlier_weights_;
};

// All rows of a packing times this worker's panels.
template <class Finish>
void multiply_panels(const Int8Packing& packing, const Matrix& weight, Worker::Range panels, int64_t panel_stride,
                     const Finish& finish) {
  struct Tiles;
  PanelProducts products(packing);
  const int64_t tiles_of_panel = packing.blocks.rows * kColumns;
  float* tiles = scratch<Tiles, float>(Finish::kPanels * tiles_of_panel);
  for (int64_t p = panels.begin; p < panels.end; ++p) {
    const float* finished[Finish::kPanels];
    for (int64_t i = 0; i < Finish::kPanels; ++i) {
      float* const tile = tiles + i * tiles_of_panel;
      const int64_t panel = p + i * panel_stride;
      with_block_format(weight.block_type(panel),
                        [&]<class Format>(Format) { products.multiply<Format>(weight.block_panel(panel), tile); });
      finished[i] = tile;
    }
    finish(finished, packing.blocks.first, packing.blocks.rows, p);
  }
}

}  // namespace

size_t int8_shared_bytes(int64_t rows, int64_t columns) {
  return std::min(rows, kRowsAtOnce) * Int8Rows::bytes_per_row(divide_up(columns, kGroup));
}

template <class Finish>
void linear_int8(View x, const Matrix& weight, Worker::Range panels, int64_t panel_stride, const Finish& finish,
                 const Team& team) {
  if (x.reader)
    return for_each_part(x.rows, kRowsAtOnce, kInt8Rows, [&](const RowBlocks& blocks) {
      multiply_panels(Int8Packing::of(x, blocks), weight, panels, panel_stride, finish);
    });
  const auto pack = [&](const RowBlocks& blocks, Worker worker, void* memory) {
    Int8Packing{blocks, weight.num_groups(), memory}.fill(x, worker);
  };
  const auto multiply = [&](const RowBlocks& blocks, void* memory) {
    multiply_panels(Int8Packing{blocks, weight.num_groups(), memory}, weight, panels, panel_stride, finish);
  };
  pack_and_multiply(x.rows, kRowsAtOnce, kInt8Rows, kRowsWorthMeeting, int8_shared_bytes(x.rows, x.columns), team, pack,
                    multiply);
}

template void linear_int8(View, const Matrix&, Worker::Range, int64_t, const StoreTile&, const Team&);
template void linear_int8(View, const Matrix&, Worker::Range, int64_t, const StoreLogits&, const Team&);
template void linear_int8(View, const Matrix&, Worker::Range, int64_t, const SiluMulTiles&, const Team&);

}  // namespace octavo
