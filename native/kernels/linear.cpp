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
  // A single row block of up to this many rows uses a panel faster than memory brings it: fetch it ahead.
  static constexpr int64_t kStreamRows = 4;

  // out [rows][32] = operands [block][rows][16] * panel.
  static void multiply(int64_t rows, const typename Tile::Operand* operands, const typename Tile::Weight* panel,
                       int64_t steps, Prefetch prefetch, float* out) {
    multiply_table(rows, operands, panel, steps, prefetch, out, std::make_index_sequence<kTileRows>());
  }

 private:
  template <size_t... R>
  static void multiply_table(int64_t rows, const typename Tile::Operand* operands, const typename Tile::Weight* panel,
                             int64_t steps, Prefetch prefetch, float* out, std::index_sequence<R...>) {
    using Function = void (*)(const typename Tile::Operand*, const typename Tile::Weight*, int64_t, Prefetch, float*);
    static constexpr Function table[] = {multiply_rows<R + 1>...};
    table[rows - 1](operands, panel, steps, prefetch, out);
  }

  template <int R>
  static void multiply_rows(const typename Tile::Operand* operands, const typename Tile::Weight* panel, int64_t steps,
                            Prefetch prefetch, float* out) {
    for (int first = 0; first < kColumns / 16; first += kTileVectors) {
      const typename Tile::Weight* weights[kTileVectors];
      Vec acc[R][kTileVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kTileVectors; ++v) {
        weights[v] = panel + (first + v) * 16 * Tile::kStep;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) acc[r][v] = Vec::zero();
      }
      multiply_add<Tile, R, kTileVectors>(acc, operands, R * kBlockSteps, weights, kColumns * Tile::kStep, steps,
                                          prefetch);
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
  // The tile unit is ten times as fast as the vectors, so that a panel must serve more rows for each trip to memory.
  static constexpr int64_t kRows = kAmxRows, kRowsAtOnce = 256, kStreamRows = kAmxRows;

  static void multiply(int64_t rows, const PairOperand* operands, const bf16* panel, int64_t steps, Prefetch prefetch,
                       float* out) {
    amx_multiply(rows, operands, panel, steps / kBlockSteps, prefetch, out);
  }
};
#endif

// What to fetch during block `block` of `num_blocks` of a panel. One block: the panel itself, somewhat ahead. Several:
// the next panel, its lines spread evenly over the blocks of this one. (Measured: the other way round, or all at once,
// costs 15 to 25 %.)
template <class Tile>
Prefetch plan_prefetch(const typename Tile::Weight* panel, int64_t steps, int64_t block, int64_t num_blocks,
                       int64_t rows) {
  // Zen 4: 1 to 8 KB alike, none up to 10 % slower; Sapphire Rapids: 0.5 to 2 KB best for vectors, by as much.
  constexpr int64_t kAhead = 2048, kStepBytes = kColumns * Tile::kStep * sizeof(typename Tile::Weight);
  const char* const bytes = reinterpret_cast<const char*>(panel);
  if (num_blocks > 1) return {bytes + steps * kStepBytes * (num_blocks + block) / num_blocks, kStepBytes / num_blocks};
  return rows <= PanelKernel<Tile>::kStreamRows ? Prefetch{bytes + kAhead, kStepBytes} : Prefetch{};
}

// What becomes of a finished tile [rows][32]: it is written to its place, with bias and residual, and without the
// columns beyond N.
struct StoreTile {
  static constexpr int kPanels = 1;
  const Matrix& weight;
  const View* residual;
  View out;

  void operator()(const float* tile, int64_t first_row, int64_t rows, int64_t panel) const {
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
};

// silu(gate) * up of two finished tiles, those of the same columns of both halves of the matrix.
struct SiluMulTiles {
  static constexpr int kPanels = 2;
  const Matrix& weight;
  View out;

  void operator()(const float* tiles, int64_t first_row, int64_t rows, int64_t panel) const {
    const float* bias = weight.bias();
    for (int64_t v = 0; v < kColumns / 16; ++v) {
      const int64_t column = panel * kColumns + v * 16;
      for (int64_t r = 0; r < rows; ++r) {
        Vec gate = Vec::load(tiles + r * kColumns + v * 16);
        Vec up = Vec::load(tiles + (rows + r) * kColumns + v * 16);
        if (bias) {
          gate = gate + Vec::load(bias + column);
          up = up + Vec::load(bias + out.columns + column);
        }
        (silu(gate) * up).store(out.row(first_row + r) + column);
      }
    }
  }
};

// Rows [first, first + rows) of x, in blocks of nearly equal height. Finish::kPanels panels, `panel_stride` apart, make
// one call of `finish`, for each of `panels`.
template <class Tile, class Finish>
void linear_rows(View x, int64_t first, int64_t rows, const Matrix& weight, Worker::Range panels, int64_t panel_stride,
                 const Finish& finish) {
  using Kernel = PanelKernel<Tile>;
  const int64_t columns = weight.columns(), steps = weight.num_steps(), num_blocks = divide_up(rows, Kernel::kRows);
  const auto block_begin = [&](int64_t b) { return rows * b / num_blocks; };
  // One row block more than is filled: an AMX tile always reads all of its rows.
  const int64_t capacity = num_operands<Tile>(Kernel::kRowsAtOnce + Kernel::kRows, columns);
  auto* operands = scratch<LinearScratch, typename Tile::Operand>(capacity);
  for (int64_t b = 0; b < num_blocks; ++b) {
    const int64_t begin = block_begin(b);
    pack_rows<Tile>(x.row(first + begin), x.stride, block_begin(b + 1) - begin, columns,
                    operands + num_operands<Tile>(begin, columns));
  }
  alignas(64) float tiles[(Finish::kPanels + 1) * Kernel::kRows * kColumns];
  for (int64_t p = panels.begin; p < panels.end; ++p) {
    for (int64_t b = 0; b < num_blocks; ++b) {
      const int64_t begin = block_begin(b), height = block_begin(b + 1) - begin;
      for (int64_t i = 0; i < Finish::kPanels; ++i) {
        const auto* panel = weight.panel<typename Tile::Weight>(p + i * panel_stride);
        Kernel::multiply(height, operands + num_operands<Tile>(begin, columns), panel, steps,
                         plan_prefetch<Tile>(panel, steps, b, num_blocks, rows), tiles + i * height * kColumns);
      }
      finish(tiles, first + begin, height, p);
    }
  }
}

template <class Finish>
void linear_then(View x, const Matrix& weight, Worker::Range panels, int64_t panel_stride, const Finish& finish) {
#ifdef __AMX_BF16__
  const AmxSession session;
#endif
  const auto run = [&]<class Tile>(Tile) {
    constexpr int64_t kRowsAtOnce = PanelKernel<Tile>::kRowsAtOnce;
    for (int64_t row = 0; row < x.rows; row += kRowsAtOnce)
      linear_rows<Tile>(x, row, std::min(kRowsAtOnce, x.rows - row), weight, panels, panel_stride, finish);
  };
  if (weight.dtype() == DType::kBFloat16)
    run(BFloat16Tile());
  else
    run(Float32Tile());
}

}  // namespace

void linear(View x, const Matrix& weight, const View* residual, View out, Worker worker) {
  linear_then(x, weight, worker.share(weight.num_panels()), 0, StoreTile{weight, residual, out});
}

bool can_fuse_silu_mul(const Matrix& weight) { return weight.rows() % (2 * kColumns) == 0; }

void linear_silu_mul(View x, const Matrix& weight, View out, Worker worker) {
  const int64_t half = weight.num_panels() / 2;
  linear_then(x, weight, worker.share(half), half, SiluMulTiles{weight, out});
}

}  // namespace octavo
