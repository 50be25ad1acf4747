// linear: the blocking around the multiply tile. Threads share the panels (columns of the output), never K.
#include <utility>

#include "octavo/kernels.h"
#include "octavo/memory.h"
#include "tiles/tile.h"
#ifdef __AMX_BF16__
#include "tiles/amx.h"
#endif

namespace octavo {
namespace {

constexpr int64_t kColumns = Matrix::kPanelColumns;

struct LinearScratch;

// How a weight type multiplies up to kRows rows by one panel. kRowsAtOnce rows are packed at a time: their operands
// (K = 1536: 300 KB in bf16) stay in a 1 MB L2 beside the panel.
template <class Tile>
struct PanelKernel {
  static constexpr int64_t kRows = kTileRows, kRowsAtOnce = 96;
  static_assert(kRowsAtOnce % kRows == 0);
  // Up to here a panel is read faster than it is used, so that it pays to fetch it ahead.
  static constexpr int kStreamRows = 4;

  // out [rows][32] = operands [block][rows][16] * panel. `stream`: the panel is used this once.
  static void multiply(int64_t rows, const typename Tile::Operand* operands, const typename Tile::Weight* panel,
                       int64_t steps, bool stream, float* out) {
    multiply_table(rows, operands, panel, steps, stream, out, std::make_index_sequence<kTileRows>());
  }

 private:
  template <size_t... R>
  static void multiply_table(int64_t rows, const typename Tile::Operand* operands, const typename Tile::Weight* panel,
                             int64_t steps, bool stream, float* out, std::index_sequence<R...>) {
    using Function = void (*)(const typename Tile::Operand*, const typename Tile::Weight*, int64_t, bool, float*);
    static constexpr Function table[] = {multiply_rows<R + 1>...};
    table[rows - 1](operands, panel, steps, stream, out);
  }

  template <int R>
  static void multiply_rows(const typename Tile::Operand* operands, const typename Tile::Weight* panel, int64_t steps,
                            bool stream, float* out) {
    constexpr int64_t kStride = kColumns * Tile::kStep;
    for (int first = 0; first < kColumns / 16; first += kTileVectors) {
      const typename Tile::Weight* weights[kTileVectors];
      Vec acc[R][kTileVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kTileVectors; ++v) {
        weights[v] = panel + (first + v) * 16 * Tile::kStep;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) acc[r][v] = Vec::zero();
      }
      if (R <= kStreamRows && stream)
        multiply_add<Tile, R, kTileVectors, true>(acc, operands, R * kBlockSteps, weights, kStride, steps);
      else
        multiply_add<Tile, R, kTileVectors, false>(acc, operands, R * kBlockSteps, weights, kStride, steps);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; ++v) acc[r][v].store(out + r * kColumns + (first + v) * 16);
    }
  }
};

#ifdef __AMX_BF16__
template <>
struct PanelKernel<BFloat16Tile> {
  // The tile unit is ten times as fast as the vectors, so that panels must be used by more rows for each trip to L2.
  static constexpr int64_t kRows = kAmxRows, kRowsAtOnce = 256;

  static void multiply(int64_t rows, const PairOperand* operands, const bf16* panel, int64_t steps, bool stream,
                       float* out) {
    amx_multiply(rows, operands, panel, steps / kBlockSteps, stream, out);
  }
};
#endif

// Writes one tile [rows][32] to its place, with bias and residual, and without the columns beyond N.
void finish_tile(const float* tile, int64_t first_row, int64_t rows, int64_t panel, const Matrix& weight,
                 const View* residual, View out) {
  for (int64_t v = 0; v < kColumns / 16; ++v) {
    const int64_t column = panel * kColumns + v * 16;
    const int n = static_cast<int>(std::min<int64_t>(16, weight.rows() - column));
    if (n <= 0) return;
    const Vec bias = weight.bias() ? Vec::load(weight.bias() + column, n) : Vec::zero();
    for (int64_t r = 0; r < rows; ++r) {
      Vec y = Vec::load(tile + r * kColumns + v * 16);
      if (weight.bias()) y = y + bias;
      if (residual) y = Vec::load(residual->row(first_row + r) + column, n) + y;
      y.store(out.row(first_row + r) + column, n);
    }
  }
}

// Rows [first, first + rows) of x, in blocks of nearly equal height.
template <class Tile>
void linear_rows(View x, int64_t first, int64_t rows, const Matrix& weight, const View* residual, View out,
                 Worker::Range panels) {
  using Kernel = PanelKernel<Tile>;
  const int64_t columns = weight.columns(), num_blocks = divide_up(rows, Kernel::kRows);
  const auto block_begin = [&](int64_t b) { return rows * b / num_blocks; };
  // One row block more than is filled: an AMX tile always reads all of its rows.
  const int64_t capacity = num_operands<Tile>(Kernel::kRowsAtOnce + Kernel::kRows, columns);
  auto* operands = scratch<LinearScratch, typename Tile::Operand>(capacity);
  for (int64_t b = 0; b < num_blocks; ++b) {
    const int64_t begin = block_begin(b);
    pack_rows<Tile>(x.row(first + begin), x.stride, block_begin(b + 1) - begin, columns,
                    operands + num_operands<Tile>(begin, columns));
  }
  alignas(64) float tile[Kernel::kRows * kColumns];
  for (int64_t p = panels.begin; p < panels.end; ++p) {
    const auto* panel = weight.panel<typename Tile::Weight>(p);
    for (int64_t b = 0; b < num_blocks; ++b) {
      const int64_t begin = block_begin(b), height = block_begin(b + 1) - begin;
      Kernel::multiply(height, operands + num_operands<Tile>(begin, columns), panel, weight.num_steps(),
                       num_blocks == 1, tile);
      finish_tile(tile, first + begin, height, p, weight, residual, out);
    }
  }
}

template <class Tile>
void linear_with(View x, const Matrix& weight, const View* residual, View out, Worker worker) {
  constexpr int64_t kRowsAtOnce = PanelKernel<Tile>::kRowsAtOnce;
  const auto panels = worker.share(weight.num_panels());
  for (int64_t row = 0; row < x.rows; row += kRowsAtOnce)
    linear_rows<Tile>(x, row, std::min(kRowsAtOnce, x.rows - row), weight, residual, out, panels);
}

}  // namespace

void linear(View x, const Matrix& weight, const View* residual, View out, Worker worker) {
#ifdef __AMX_BF16__
  const AmxSession session;
#endif
  if (weight.dtype() == DType::kBFloat16)
    linear_with<BFloat16Tile>(x, weight, residual, out, worker);
  else
    linear_with<Float32Tile>(x, weight, residual, out, worker);
}

}  // namespace octavo
