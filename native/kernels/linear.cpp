// linear: the blocking around the multiply tiles. Threads share the panels (columns of the output), never K. Rows are
// taken some hundred at a time: all threads pack their inputs together, then each multiplies them by its panels.
#include "kernels/linear_finish.h"
#include "kernels/linear_int8.h"
#include "kernels/panel_kernel.h"
#include "octavo/kernels.h"
#include "octavo/memory.h"

namespace octavo {
namespace {

constexpr int64_t kColumns = Matrix::kPanelColumns;

// Packs this worker's share of the rows.
template <class Tile>
void pack(View x, const RowBlocks& blocks, Worker worker, typename Tile::Operand* operands) {
  const auto share = worker.share(blocks.rows);
  for (int64_t b = 0; b < blocks.num_blocks; ++b) {
    const int64_t begin = blocks.begin(b), height = blocks.height(b);
    const int64_t from = std::max(share.begin - begin, int64_t{0}), to = std::min(share.end - begin, height);
    for (int64_t r = from; r < to; ++r)
      pack_row<Tile>(x.row(blocks.first + begin + r), x.columns, height,
                     operands + num_operands<Tile>(begin, x.columns) + r * kBlockSteps);
  }
}

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
  using Kernel = PanelKernel<Tile>;
  using Operand = typename Tile::Operand;
  struct OwnOperands;
  const int64_t at_once = rows_at_once<Tile>(x.columns);
  for (int64_t first = 0; first < x.rows; first += at_once) {
    const int64_t rows = std::min(at_once, x.rows - first);
    const RowBlocks blocks{first, rows, divide_up(rows, Kernel::kRows)};
#ifdef __AMX_BF16__
    const AmxSession session(AmxShapes::accumulators(divide_up(rows, blocks.num_blocks)));
#endif
    // A few rows are packed sooner than all workers have met.
    const bool together = rows >= Team::kRowsWorthMeeting && team.worker.count > 1;
    const size_t size = operand_bytes<Tile>(rows, x.columns) / sizeof(Operand);
    Operand* operands = together ? static_cast<Operand*>(team.shared) : scratch<OwnOperands, Operand>(size);
    pack<Tile>(x, blocks, together ? team.worker : Worker{0, 1}, operands);
    if (together) team.pool.barrier();
    multiply_panels<Tile>(blocks, operands, weight, panels, panel_stride, finish);
    if (first + rows < x.rows && team.worker.count > 1) team.pool.barrier();  // the operands are still being read
  }
}

template <class Finish>
void linear_then(View x, const Matrix& weight, Worker::Range panels, int64_t panel_stride, const Finish& finish,
                 const Team& team) {
  switch (weight.dtype()) {
    case DType::kFloat32:
      return linear_float<Float32Tile>(x, weight, panels, panel_stride, finish, team);
    case DType::kBFloat16:
      return linear_float<BFloat16Tile>(x, weight, panels, panel_stride, finish, team);
    case DType::kInt8:
      return linear_int8(x, weight, panels, panel_stride, finish, team);
  }
}

}  // namespace

size_t linear_shared_bytes(const Matrix& weight, int64_t rows) {
  switch (weight.dtype()) {
    case DType::kFloat32:
      return operand_bytes<Float32Tile>(rows, weight.columns());
    case DType::kBFloat16:
      return operand_bytes<BFloat16Tile>(rows, weight.columns());
    default:
      return int8_shared_bytes(rows, weight.columns());
  }
}

void linear(View x, const Matrix& weight, const View* residual, View out, const Team& team) {
  linear_then(x, weight, team.worker.share(weight.num_panels()), 0, StoreTile{weight, residual, out}, team);
}

bool can_fuse_silu_mul(const Matrix& weight) { return weight.rows() % (2 * kColumns) == 0; }

void linear_silu_mul(View x, const Matrix& weight, View out, const Team& team) {
  const int64_t half = weight.num_panels() / 2;
  linear_then(x, weight, team.worker.share(half), half, SiluMulTiles{weight, out}, team);
}

}  // namespace octavo
