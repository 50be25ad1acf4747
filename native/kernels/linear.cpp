// linear: the blocking around the multiply tiles. Threads share the panels (columns of the output), never K.
#include "kernels/amx_panel.h"
#include "kernels/int16_rows.h"
#include "kernels/linear_finish.h"
#include "kernels/linear_int16.h"
#include "kernels/linear_int8.h"
#include "kernels/packed_rows.h"
#include "kernels/panel_kernel.h"
#include "octavo/kernels.h"
#include "octavo/memory.h"

namespace octavo {
namespace {

constexpr int64_t kColumns = Matrix::kPanelColumns;

// All row blocks times this worker's panels. Finish::kPanels panels, `panel_stride` apart, make one call of `finish`.
template <class Tile, class Finish>
void multiply_panels(const RowBlocks& blocks, const typename Tile::Operand* operands, const Matrix& weight,
                     Worker::Range panels, int64_t panel_stride, const Finish& finish) {
  using Kernel = PanelKernel<Tile>;
  struct Tiles;
  const int64_t tiles_of_panel = blocks.num_blocks * Kernel::kTileSize;
  float* tiles = scratch<Tiles, float>(Finish::kPanels * tiles_of_panel);
  for (int64_t p = panels.begin; p < panels.end; ++p) {
    const auto finish_block = [&](int64_t b) {
      const float* finished[Finish::kPanels];
      for (int64_t i = 0; i < Finish::kPanels; ++i) finished[i] = tiles + i * tiles_of_panel + b * Kernel::kTileSize;
      finish(finished, blocks.first + blocks.begin(b), blocks.height(b), p);
    };
    for (int64_t i = 0; i + 1 < Finish::kPanels; ++i)
      Kernel::multiply(blocks, operands, weight, p + i * panel_stride, tiles + i * tiles_of_panel, [](int64_t) {});
    constexpr int64_t kLast = Finish::kPanels - 1;
    Kernel::multiply(blocks, operands, weight, p + kLast * panel_stride, tiles + kLast * tiles_of_panel, finish_block);
  }
}

// Rows that are packed together.
template <class Tile>
int64_t rows_at_once(int64_t columns) {
  using Kernel = PanelKernel<Tile>;
  const int64_t bytes_per_row = num_operands<Tile>(1, columns) * sizeof(typename Tile::Operand);
  const int64_t blocks = Kernel::kCacheBytes / bytes_per_row / Kernel::kRows;
  return std::clamp(blocks * Kernel::kRows, 2 * Kernel::kRows, Kernel::kMaxRowsAtOnce);
}

// One row block more than is filled: an AMX tile always reads all of its rows.
template <class Tile>
size_t operand_bytes(int64_t rows, int64_t columns) {
  return num_operands<Tile>(std::min(rows, rows_at_once<Tile>(columns)) + PanelKernel<Tile>::kRows, columns) *
         sizeof(typename Tile::Operand);
}

template <class Tile, class Finish>
void linear_float(View x, const Matrix& weight, Worker::Range panels, int64_t panel_stride, const Finish& finish,
                  const Team& team) {
  using Operand = typename Tile::Operand;
  const auto pack = [&](const RowBlocks& blocks, Worker worker, void* memory) {
    auto* operands = static_cast<Operand*>(memory);
    blocks.share_out(worker, [&](int64_t b, int64_t r) {
      const int64_t begin = blocks.begin(b);
      const float* row = x.row(blocks.first + begin + r);
      fetch_ahead(x, blocks.first + begin + r, team.worker);
      Operand* out = operands + num_operands<Tile>(begin, x.columns) + r * kBlockSteps;
      if constexpr (std::is_base_of_v<Tile, BlockInputTile>)
        if (weight.has_blocks()) return pack_row<BlockInputTile>(row, x.columns, blocks.height(b), out);
      pack_row<Tile>(row, x.columns, blocks.height(b), out);
    });
  };
  const auto multiply = [&](const RowBlocks& blocks, const void* operands) {
#ifdef __AMX_BF16__
    const AmxSession session(AmxShapes::accumulators(blocks.height(0)));
#endif
    multiply_panels<Tile>(blocks, static_cast<const Operand*>(operands), weight, panels, panel_stride, finish);
  };
  constexpr int64_t kRows = PanelKernel<Tile>::kRows;
  const int64_t at_once = rows_at_once<Tile>(x.columns);
  if constexpr (std::is_same_v<Tile, BFloat16Tile>) {
    static_assert(kRows == PackedRows::kMaxBlockRows);
    if (x.reader)
      return for_each_part(x.rows, at_once, kRows, [&](const RowBlocks& blocks) {
        const Operand* operands = PackedRows(x).from(blocks.first);
        // Other workers have written them: a few rows are fetched sooner at once than tile by tile.
        if (blocks.num_blocks == 1 && team.worker.count > 1)
          Prefetch{reinterpret_cast<const char*>(operands),
                   num_operands<Tile>(blocks.rows, x.columns) * static_cast<int64_t>(sizeof(Operand))}
              .step(0);
        multiply(blocks, operands);
      });
  }
  pack_and_multiply(x.rows, at_once, kRows, PanelKernel<Tile>::kWorthMeeting, operand_bytes<Tile>(x.rows, x.columns),
                    team, pack, multiply);
}

template <class Finish>
void linear_then(View x, const Matrix& weight, Worker::Range panels, int64_t panel_stride, const Finish& finish,
                 const Team& team) {
  switch (weight.dtype()) {
    case DType::kFloat32:
      return weight.is_narrow() ? linear_float<NarrowTile>(x, weight, panels, panel_stride, finish, team)
                                : linear_float<Float32Tile>(x, weight, panels, panel_stride, finish, team);
    case DType::kBFloat16:
      return linear_float<BFloat16Tile>(x, weight, panels, panel_stride, finish, team);
    case DType::kInt8:
      return linear_int8(x, weight, panels, panel_stride, finish, team);
    case DType::kInt16:
      return linear_int16(x, weight, panels, panel_stride, finish, team);
  }
}

}  // namespace

size_t linear_shared_bytes(const Matrix& weight, int64_t rows) {
  switch (weight.dtype()) {
    case DType::kFloat32:
      return weight.is_narrow() ? operand_bytes<NarrowTile>(rows, weight.columns())
                                : operand_bytes<Float32Tile>(rows, weight.columns());
    case DType::kBFloat16:
      return operand_bytes<BFloat16Tile>(rows, weight.columns());
    case DType::kInt16:
      return int16_shared_bytes(rows, weight.columns());
    default:
      return int8_shared_bytes(rows, weight.columns());
  }
}

bool reads_rows_of(const Matrix& weight, const Matrix& other) {
  if (weight.dtype() != other.dtype()) return false;
  if (weight.dtype() == DType::kInt8) return true;
  if (weight.dtype() == DType::kInt16) return &weight == &other && Int16Rows::fit(weight.columns());
  return weight.dtype() == DType::kBFloat16 && weight.input_factor() == other.input_factor();
}

int64_t rows_worth_sharing(const Matrix& weight) { return weight.is_narrow() ? 96 : 160; }

void linear(View x, const Matrix& weight, const View* residual, View out, const Team& team) {
  linear_then(x, weight, team.worker.share(weight.num_panels()), 0, StoreTile{weight, residual, out}, team);
}

void linear_logits(View x, const Matrix& weight, View out, View maxima, const Team& team) {
  const StoreLogits finish{{weight, nullptr, out}, maxima};
  linear_then(x, weight, team.worker.share(weight.num_panels()), 0, finish, team);
  StoreLogits::flush();
}

bool leaves_packed_silu_mul(const Matrix& weight, const Matrix& reader) {
  return weight.dtype() == DType::kBFloat16 && reader.dtype() == DType::kBFloat16;
}

bool can_fuse_silu_mul(const Matrix& weight) { return weight.rows() % (2 * kColumns) == 0; }

void linear_silu_mul(View x, const Matrix& weight, View out, const Team& team) {
  const int64_t half = weight.num_panels() / 2;
  linear_then(x, weight, team.worker.share(half), half, SiluMulTiles{weight, out}, team);
}

}  // namespace octavo
