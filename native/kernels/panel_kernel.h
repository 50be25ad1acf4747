// One panel of a float32 or bfloat16 matrix times some hundred rows, in the tiles that the variant has.
#pragma once

#include <utility>

#include "kernels/row_blocks.h"
#include "octavo/matrix.h"
#include "octavo/memory.h"
#include "tiles/tile.h"
#include "tiles/unpack.h"
#ifdef __AMX_BF16__
#include "tiles/amx.h"
#endif

namespace octavo {

// How far ahead of its use a stream of weights is fetched, in bytes. Zen 4: 1 to 8 KB alike, none up to 10 % slower;
// Sapphire Rapids: 0.5 to 2 KB best for vectors, by as much.
inline constexpr int64_t kWeightsAhead = 2048;
// The same for a stream that is unpacked, line for line as it is read (all at once they queue up: a third slower).
inline constexpr int64_t kBlocksAhead = 4096;

// How a tile type multiplies. kRows: of a block. Of the rows that are packed together, the operands fill kCacheBytes of
// the L2 at most.
template <class Tile>
struct PanelKernel {
  using Operand = typename Tile::Operand;
  using Weight = typename Tile::Weight;
  static constexpr int64_t kRows = kTileRows, kMaxRowsAtOnce = 96, kCacheBytes = 1 << 19;
  static_assert(kMaxRowsAtOnce % kRows == 0);
  static constexpr int64_t kTileSize = kRows * Matrix::kPanelColumns;

  // tiles [block][kRows][32] = all blocks times panel p. Calls done(b) when the tile of block b is complete.
  template <class Done>
  static void multiply(const RowBlocks& blocks, const Operand* operands, const Matrix& weight, int64_t p, float* tiles,
                       const Done& done) {
    const Weight* panel = find_panel(weight, p);
    const int64_t steps = weight.num_steps();
    for (int64_t b = 0; b < blocks.num_blocks; ++b) {
      const Prefetch prefetch = weight.has_blocks() ? Prefetch{} : plan_prefetch(panel, steps, b, blocks);
      multiply_table(blocks.height(b), operands + num_operands<Tile>(blocks.begin(b), weight.columns()), panel, steps,
                     prefetch, tiles + b * kTileSize, std::make_index_sequence<kTileRows>());
      done(b);
    }
  }

 private:
  static constexpr int64_t kColumns = Matrix::kPanelColumns;

  // The weights as the tiles read them: in place, or unpacked into this thread's scratch.
  static const Weight* find_panel(const Matrix& weight, int64_t p) {
    if constexpr (std::is_same_v<Tile, BFloat16Tile>) {
      if (weight.has_blocks()) {
        struct Unpacked;
        bf16* panel = scratch<Unpacked, bf16>(weight.num_steps() * kColumns * 2);
        unpack_groups(weight, p, 0, weight.num_groups(), kBlocksAhead, panel);
        return panel;
      }
    }
    return weight.panel<Weight>(p);
  }

  // What to fetch during block `block` of a plain panel. One block: the panel itself, somewhat ahead, if it is used
  // faster than memory brings it. Several: the next panel, its lines spread evenly over the blocks of this one.
  // (Measured: the other way round, or all at once, costs 15 to 25 %.)
  static Prefetch plan_prefetch(const Weight* panel, int64_t steps, int64_t block, const RowBlocks& blocks) {
    constexpr int64_t kStreamRows = 4, kStepBytes = kColumns * Tile::kStep * sizeof(Weight);
    const int64_t num_blocks = blocks.num_blocks;
    const char* const bytes = reinterpret_cast<const char*>(panel);
    if (num_blocks > 1)
      return {bytes + steps * kStepBytes * (num_blocks + block) / num_blocks, kStepBytes / num_blocks};
    return blocks.rows <= kStreamRows ? Prefetch{bytes + kWeightsAhead, kStepBytes} : Prefetch{};
  }

  template <size_t... R>
  static void multiply_table(int64_t rows, const Operand* operands, const Weight* panel, int64_t steps,
                             Prefetch prefetch, float* out, std::index_sequence<R...>) {
    using Function = void (*)(const Operand*, const Weight*, int64_t, Prefetch, float*);
    static constexpr Function table[] = {multiply_rows<R + 1>...};
    table[rows - 1](operands, panel, steps, prefetch, out);
  }

  // out [R][32] = operands [block][R][16] * panel.
  template <int R>
  static void multiply_rows(const Operand* operands, const Weight* panel, int64_t steps, Prefetch prefetch,
                            float* out) {
    for (int first = 0; first < kColumns / 16; first += kTileVectors) {
      const Weight* weights[kTileVectors];
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
// A tile load that misses the L1 stalls the tile unit, and nothing runs ahead of it. So a panel is taken in chunks of
// K, 12 KB of weights, each for all blocks of rows before the next.
template <>
struct PanelKernel<BFloat16Tile> {
  static constexpr int64_t kRows = kAmxRows, kMaxRowsAtOnce = 256, kCacheBytes = 3 << 19;
  static constexpr int64_t kTileSize = kRows * Matrix::kPanelColumns;

  template <class Done>
  static void multiply(const RowBlocks& blocks, const PairOperand* operands, const Matrix& weight, int64_t p,
                       float* tiles, const Done& done) {
    using Sums = AmxAccumulators;
    alignas(64) bf16 unpacked[kChunk * kBlockSize];
    const int64_t depth = weight.num_steps() / kBlockSteps;
    const bool one = blocks.num_blocks == 1;  // its sums stay in the tiles
    for (int64_t begin = 0; begin < depth; begin += kChunk) {
      const int64_t end = std::min(begin + kChunk, depth);
      const bf16* weights = unpacked;
      if (weight.has_blocks())
        unpack_groups(weight, p, begin, end, kBlocksAhead, unpacked);
      else
        weights = weight.panel<bf16>(p) + begin * kBlockSize;
      for (int64_t b = 0; b < blocks.num_blocks; ++b) {
        const int64_t height = blocks.height(b);
        const PairOperand* block = operands + num_operands<BFloat16Tile>(blocks.begin(b), weight.columns());
        float* tile = tiles + b * kTileSize;
        if (begin == 0)
          Sums::zero();
        else if (!one)
          Sums::load(height, tile);
        Sums::add(height, block + begin * height * kBlockSteps, weights, end - begin,
                  weight.has_blocks() ? Prefetch{} : plan_prefetch(weights, b, blocks.num_blocks));
        if (!one || end == depth) Sums::store(height, tile);
        if (end == depth && b > 0) done(b - 1);  // what was stored just now takes its time to become readable
      }
    }
    done(blocks.num_blocks - 1);
  }

 private:
  static constexpr int64_t kChunk = 6;  // blocks of 16 steps
  static constexpr int64_t kBlockSize = kBlockSteps * Matrix::kPanelColumns * 2;

  // What to fetch with every block of steps. One block of rows: the stream, somewhat ahead; several: the next chunk,
  // its lines spread evenly over the blocks.
  static Prefetch plan_prefetch(const bf16* chunk, int64_t b, int64_t num_blocks) {
    constexpr int64_t kBytes = AmxAccumulators::kBlockBytes;
    const char* const bytes = reinterpret_cast<const char*>(chunk);
    if (num_blocks == 1) return {bytes + kWeightsAhead, kBytes};
    return {bytes + kChunk * kBytes * (num_blocks + b) / num_blocks, kBytes / num_blocks};
  }
};
#endif

}  // namespace octavo
