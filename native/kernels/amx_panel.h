// One panel of bfloat16 weights times some hundred rows in AMX tiles, for bfloat16 and for narrow matrices.
#pragma once

#include "kernels/amx_stream.h"
#include "tiles/narrow_tile.h"
#ifdef __AMX_BF16__

namespace octavo {

// In what the two differ. kChunk: blocks of 16 steps, 2 KB of weights each; kLongChunk where blocks of rows are few.
// kWorthMeeting: see pack_and_multiply. To meet takes 2 us with 8 rows and 7 with 32, and what the other core has
// packed comes from its cache line by line, while tiles wait for it.
template <class Tile>
struct AmxProducts;

template <>
struct AmxProducts<BFloat16Tile> : AmxAccumulators {
  static constexpr int kPlanes = 1;  // rows of operands for a row of activations
  static constexpr int64_t kChunk = 6, kLongChunk = 6, kWorthMeeting = 33;
  static constexpr bool kUnpacks = true;  // the matrix may have blocks
};

template <>
struct AmxProducts<NarrowTile> : NarrowTile {
  // Few blocks of rows are soon done with a chunk, and the next is still on its way: longer ones hide more of it (64
  // rows: four fifths of the time).
  static constexpr int64_t kChunk = 6, kLongChunk = 12, kWorthMeeting = 17;
  static constexpr bool kUnpacks = false;
};

// A tile load that misses the L1 stalls the tile unit, and nothing runs ahead of it. So a panel is taken in chunks of
// K, each for all blocks of rows before the next.
template <class Tile>
struct AmxPanelKernel {
  static constexpr int64_t kRows = kAmxRows, kMaxRowsAtOnce = 256, kCacheBytes = 3 << 19;
  static constexpr int64_t kWorthMeeting = AmxProducts<Tile>::kWorthMeeting;
  static constexpr int64_t kTileSize = kRows * Matrix::kPanelColumns;

  template <class Done>
  static void multiply(const RowBlocks& blocks, const PairOperand* operands, const Matrix& weight, int64_t p,
                       float* tiles, const Done& done) {
    const bool one = blocks.num_blocks == 1;  // its sums stay in the tiles
    if constexpr (Products::kUnpacks) {
      if (one && weight.has_blocks()) {
        multiply_unpacked(blocks.rows, operands, weight, p, tiles);
        return done(0);
      }
    }
    alignas(64) bf16 unpacked[Products::kUnpacks ? kUnpackedChunk * kBlockSize : 1];
    const int64_t depth = weight.num_steps() / kBlockSteps;
    const int64_t chunk = weight.has_blocks()               ? kUnpackedChunk
                          : blocks.num_blocks < kManyBlocks ? Products::kLongChunk
                                                            : Products::kChunk;
    for (int64_t begin = 0; begin < depth; begin += chunk) {
      const int64_t end = std::min(begin + chunk, depth);
      const bf16* weights = find_chunk<Products::kUnpacks>(weight, p, begin, end, unpacked);
      for (int64_t b = 0; b < blocks.num_blocks; ++b) {
        const int64_t height = blocks.height(b);
        const PairOperand* block = operands + num_operands<Tile>(blocks.begin(b), weight.columns());
        float* tile = tiles + b * kTileSize;
        if (begin == 0)
          Sums::zero();
        else if (!one)
          Sums::load(height, tile);
        const Prefetch prefetch =
            weight.has_blocks() ? Prefetch{} : plan_amx_prefetch(weights, end - begin, b, blocks.num_blocks, height);
        Products::add(height, block + begin * Products::kPlanes * height * kBlockSteps, weights, end - begin, prefetch,
                      one);
        if (!one || end == depth) Sums::store(height, tile);
        if (end == depth && b > 0) done(b - 1);  // what was stored just now takes its time to become readable
      }
    }
    done(blocks.num_blocks - 1);
  }

 private:
  using Products = AmxProducts<Tile>;
  using Sums = AmxAccumulators;
  static constexpr int64_t kManyBlocks = 4, kUnpackedChunk = 9;
  static constexpr int64_t kBlockSize = kBlockSteps * Matrix::kPanelColumns * 2;

  // One block of rows times a panel of groups, each unpacked while the tile unit is still at the ones before.
  static void multiply_unpacked(int64_t rows, const PairOperand* operands, const Matrix& weight, int64_t p,
                                float* tile) {
    constexpr int64_t kLead = 2, kSlots = 4;  // in groups
    alignas(64) bf16 unpacked[kSlots * kBlockSize];
    const int64_t depth = weight.num_groups();
    Sums::zero();
    with_unpacker(weight, p, kBlocksAhead, [&](auto unpack) {
      const auto slot = [&](int64_t g) { return unpacked + g % kSlots * kBlockSize; };
      for (int64_t g = 0; g < std::min(kLead, depth); ++g) unpack(g, slot(g));
      for (int64_t g = 0; g < depth; ++g) {
        if (g + kLead < depth) unpack(g + kLead, slot(g + kLead));
        Products::add(rows, operands + g * rows * kBlockSteps, slot(g), 1, Prefetch{}, false);
      }
    });
    Sums::store(rows, tile);
  }
};

template <>
struct PanelKernel<BFloat16Tile> : AmxPanelKernel<BFloat16Tile> {};
template <>
struct PanelKernel<NarrowTile> : AmxPanelKernel<NarrowTile> {};

}  // namespace octavo

#endif
