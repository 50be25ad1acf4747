// One panel of a float32 or bfloat16 matrix times some hundred rows, in the tiles that the variant has.
#pragma once

#include <utility>

#include "kernels/compact_panel.h"
#include "kernels/row_blocks.h"
#include "octavo/matrix.h"
#include "octavo/memory.h"
#include "tiles/tile.h"
#include "tiles/unpack.h"

namespace octavo {

// How far ahead of its use a stream of weights is fetched, in bytes. Zen 4: 1 to 8 KB alike, none up to 10 % slower;
// Sapphire Rapids: 0.5 to 2 KB best for vectors, by as much.
inline constexpr int64_t kWeightsAhead = 2048;
// The same for a stream that is unpacked, line for line as it is read (all at once they queue up: a third slower).
inline constexpr int64_t kBlocksAhead = 4096;

// Blocks of steps [begin, end) of panel p as the tiles read them: in place, or unpacked.
template <bool kUnpacks, class Weight>
const Weight* find_chunk(const Matrix& weight, int64_t p, int64_t begin, int64_t end, Weight* unpacked) {
  if constexpr (kUnpacks) {
    if (weight.has_blocks()) {
      unpack_groups(weight, p, begin, end, kBlocksAhead, unpacked);
      return unpacked;
    }
  }
  constexpr int64_t kStep = std::is_same_v<Weight, bf16> ? 2 : 1;  // values of a column in a step
  return weight.panel<Weight>(p) + begin * kBlockSteps * Matrix::kPanelColumns * kStep;
}

// How a tile type multiplies. kRows: of a block. Of the rows that are packed together, the operands fill kCacheBytes of
// the L2 at most.
//
// A panel is taken in chunks of K that stay in the L1, each for all blocks of rows before the next, while the next
// comes from memory. Sums go on in the same accumulators, so that chunks leave no trace in them.
template <class Tile>
struct PanelKernel {
  using Operand = typename Tile::Operand;
  using Weight = typename Tile::Weight;
  static constexpr int64_t kRows = kTileRows, kMaxRowsAtOnce = 132, kCacheBytes = 3 << 18;
  static constexpr int64_t kWorthMeeting = kRowsWorthMeeting;
  static_assert(kMaxRowsAtOnce % kRows == 0);
  static constexpr int64_t kTileSize = kRows * Matrix::kPanelColumns;

  // tiles [block][kRows][32] = all blocks times panel p. Calls done(b) when the tile of block b is complete.
  template <class Done>
  static void multiply(const RowBlocks& blocks, const Operand* operands, const Matrix& weight, int64_t p, float* tiles,
                       const Done& done) {
    const int64_t depth = weight.num_steps() / kBlockSteps;
#ifdef __AVX512BF16__
    if constexpr (kUnpacks)
      if (weight.is_compact()) return multiply_compact(blocks, operands, weight, p, tiles, done);
#endif
    alignas(64) Weight unpacked[kUnpackedSize];
    for (int64_t begin = 0; begin < depth; begin += kChunk) {
      const int64_t end = std::min(begin + kChunk, depth);
      const Weight* weights = find_chunk<kUnpacks>(weight, p, begin, end, unpacked);
      for (int64_t b = 0; b < blocks.num_blocks; ++b) {
        const int64_t height = blocks.height(b);
        const Operand* block = operands + num_operands<Tile>(blocks.begin(b), weight.columns());
        const Chunk chunk{block + begin * height * kBlockSteps, weights, (end - begin) * kBlockSteps, begin == 0,
                          weight.has_blocks() ? Prefetch{} : plan_prefetch(weights, b, blocks.num_blocks)};
        multiply_table(height, chunk, tiles + b * kTileSize, std::make_index_sequence<kTileRows>());
        if (end == depth) done(b);
      }
    }
  }

 private:
  static constexpr int64_t kColumns = Matrix::kPanelColumns;
  static constexpr int64_t kChunk = 8;  // blocks of 16 steps: 16 KB of weights
  static constexpr int64_t kBlockSize = kBlockSteps * kColumns * Tile::kStep;
  static constexpr bool kUnpacks = std::is_same_v<Tile, BFloat16Tile>;
  static constexpr int64_t kUnpackedSize = kUnpacks ? kChunk * kBlockSize : 1;

  // A block of rows times a chunk of a panel. `first`: sums begin with zero.
  struct Chunk {
    const Operand* operands;
    const Weight* weights;
    int64_t steps;
    bool first;
    Prefetch prefetch;
  };

  // What to fetch with every step. One block of rows: the stream, somewhat ahead; several: the next chunk, its lines
  // spread evenly over the blocks. (In bursts of sixteen steps' lines a block of 8 rows takes a fifth longer.)
  static Prefetch plan_prefetch(const Weight* chunk, int64_t b, int64_t num_blocks) {
    constexpr int64_t kStepBytes = kBlockSize * sizeof(Weight) / kBlockSteps;
    const char* const bytes = reinterpret_cast<const char*>(chunk);
    if (num_blocks == 1) return {bytes + kWeightsAhead, kStepBytes};
    return {bytes + kChunk * kBlockSteps * kStepBytes * (num_blocks + b) / num_blocks, kStepBytes / num_blocks};
  }

#ifdef __AVX512BF16__
  // The first block of rows makes the values of a chunk, and the others find them. With one block of rows the stream is
  // fetched somewhat ahead; with several a chunk ahead, its lines spread over the blocks.
  template <class Done>
  static void multiply_compact(const RowBlocks& blocks, const Operand* operands, const Matrix& weight, int64_t p,
                               float* tiles, const Done& done) {
    constexpr auto kAllRows = std::make_index_sequence<kTileRows>();
    const int64_t depth = weight.num_steps() / kBlockSteps, height = blocks.height(0), num_blocks = blocks.num_blocks;
    if (num_blocks == 1) {
      multiply_compact_rows<false>(
          {CompactUnpacker(weight, p, 0, kBlocksAhead), 0, depth, operands, nullptr, tiles, {}}, height, kAllRows);
      return done(0);
    }
    alignas(64) bf16 values[kUnpackedSize];
    for (int64_t begin = 0; begin < depth; begin += kChunk) {
      const int64_t end = std::min(begin + kChunk, depth), share = (end - begin) * CompactBlock::kBytes / num_blocks;
      Prefetch prefetch{weight.panel<char>(p) + (begin + kChunk) * CompactBlock::kBytes,
                        CompactBlock::kBytes / (kBlockSteps * num_blocks), true};
      multiply_compact_rows<true>({CompactUnpacker(weight, p, begin, 0), begin, end,
                                   operands + begin * height * kBlockSteps, values, tiles, prefetch},
                                  height, kAllRows);
      if (end == depth) done(0);
      for (int64_t b = 1; b < num_blocks; ++b) {
        prefetch.from += share;
        const Operand* block = operands + num_operands<Tile>(blocks.begin(b), weight.columns());
        multiply_table(blocks.height(b),
                       Chunk{block + begin * blocks.height(b) * kBlockSteps, values, (end - begin) * kBlockSteps,
                             begin == 0, prefetch},
                       tiles + b * kTileSize, kAllRows);
        if (end == depth) done(b);
      }
    }
  }
#endif

  template <size_t... R>
  static void multiply_table(int64_t rows, const Chunk& chunk, float* out, std::index_sequence<R...>) {
    using Function = void (*)(const Chunk&, float*);
    static constexpr Function table[] = {multiply_rows<R + 1>...};
    table[rows - 1](chunk, out);
  }

  // out [R][32] += operands [block][R][16] * weights.
  template <int R>
  static void multiply_rows(const Chunk& chunk, float* out) {
    for (int first = 0; first < kColumns / 16; first += kTileVectors) {
      const Weight* weights[kTileVectors];
      Vec acc[R][kTileVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kTileVectors; ++v) {
        weights[v] = chunk.weights + (first + v) * 16 * Tile::kStep;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
          acc[r][v] = chunk.first ? Vec::zero() : Vec::load(out + r * kColumns + (first + v) * 16);
      }
      multiply_add<Tile, R, kTileVectors>(acc, chunk.operands, R * kBlockSteps, weights, kColumns * Tile::kStep,
                                          chunk.steps, first == 0 ? chunk.prefetch : Prefetch{});
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; ++v) acc[r][v].store(out + r * kColumns + (first + v) * 16);
    }
  }
};

}  // namespace octavo
