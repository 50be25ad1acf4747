// One panel of bfloat16 weights times some hundred rows in AMX tiles, for bfloat16 and for narrow matrices.
#pragma once

#include "kernels/amx_stream.h"
#include "tiles/narrow_tile.h"
#ifdef __AMX_BF16__

namespace octavo {

// In what the two differ. kChunk: blocks of 16 steps, 2 KB of weights each; kLongChunk where blocks of rows are few.
// Chunks that are unpacked share the L1 with what they are unpacked from: kFewUnpacked and kManyUnpacked blocks of
// steps with few and with many blocks of rows. kWorthMeeting: see pack_and_multiply. To meet takes 2 us with 8 rows and
// 7 with 32, and what the other core has packed comes from its cache line by line, while tiles wait for it.
template <class Tile>
struct AmxProducts;

template <>
struct AmxProducts<BFloat16Tile> : AmxAccumulators {
  static constexpr int kPlanes = 1;  // rows of operands for a row of activations
  static constexpr int64_t kChunk = 6, kLongChunk = 6, kFewUnpacked = 6, kManyUnpacked = 9, kWorthMeeting = 33;
};

template <>
struct AmxProducts<NarrowTile> : NarrowTile {
  // Few blocks of rows are soon done with a chunk, and the next is still on its way: longer ones hide more of it (64
  // rows: four fifths of the time).
  static constexpr int64_t kChunk = 6, kLongChunk = 12, kFewUnpacked = 4, kManyUnpacked = 5, kWorthMeeting = 17;
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
    const Product product{blocks, operands, weight.columns(), weight.num_steps() / kBlockSteps, tiles};
    if (!weight.needs_unpacking()) return multiply_plain(product, weight.panel<bf16>(p), done);
    if (blocks.num_blocks > 1) return multiply_unpacked(product, weight, p, done);
    with_unpacker(weight, p, 0, kBlocksAhead, [&](auto unpack) { multiply_one_unpacked(product, unpack); });
    done(0);
  }

 private:
  using Products = AmxProducts<Tile>;
  using Sums = AmxAccumulators;
  static constexpr int64_t kManyBlocks = 4;
  static constexpr int64_t kBlockSize = kBlockSteps * Matrix::kPanelColumns * 2;

  // All blocks of rows times a panel.
  struct Product {
    const RowBlocks& blocks;
    const PairOperand* operands;
    int64_t columns, depth;  // depth: blocks of steps
    float* tiles;

    const PairOperand* of_block(int64_t b, int64_t begin) const {
      return operands + num_operands<Tile>(blocks.begin(b), columns) +
             begin * Products::kPlanes * blocks.height(b) * kBlockSteps;
    }
  };

  template <class Done>
  static void multiply_plain(const Product& product, const bf16* panel, const Done& done) {
    const int64_t num_blocks = product.blocks.num_blocks;
    const int64_t chunk = num_blocks < kManyBlocks ? Products::kLongChunk : Products::kChunk;
    for (int64_t begin = 0; begin < product.depth; begin += chunk) {
      const int64_t end = std::min(begin + chunk, product.depth);
      const bf16* weights = panel + begin * kBlockSize;
      for (int64_t b = 0; b < num_blocks; ++b) {
        const int64_t height = product.blocks.height(b);
        multiply_block(product, b, begin, end, weights, plan_amx_prefetch(weights, end - begin, b, num_blocks, height),
                       done);
      }
    }
  }

  // Each chunk is unpacked for all blocks of rows. What the next is unpacked from comes into the L2 meanwhile.
  template <class Done>
  static void multiply_unpacked(const Product& product, const Matrix& weight, int64_t p, const Done& done) {
    const int64_t num_blocks = product.blocks.num_blocks, depth = product.depth;
    const int64_t longest = num_blocks < kManyBlocks ? Products::kFewUnpacked : Products::kManyUnpacked;
    const int64_t chunk = divide_up(depth, divide_up(depth, longest));
    alignas(64) bf16 unpacked[std::max(Products::kFewUnpacked, Products::kManyUnpacked) * kBlockSize];
    for (int64_t begin = 0; begin < depth; begin += chunk) {
      const int64_t end = std::min(begin + chunk, depth);
      unpack_groups(weight, p, begin, end, 0, unpacked);
      const auto packed = packed_groups(weight, p, begin, end);
      for (int64_t b = 0; b < num_blocks; ++b)
        multiply_block(product, b, begin, end, unpacked, plan_amx_prefetch(packed, end - begin, b, num_blocks), done);
    }
  }

  template <class Done>
  static void multiply_block(const Product& product, int64_t b, int64_t begin, int64_t end, const bf16* weights,
                             Prefetch prefetch, const Done& done) {
    const bool one = product.blocks.num_blocks == 1;  // its sums stay in the tiles
    const int64_t height = product.blocks.height(b);
    float* tile = product.tiles + b * kTileSize;
    if (begin == 0)
      Sums::zero();
    else if (!one)
      Sums::load(height, tile);
    Products::add(height, product.of_block(b, begin), weights, end - begin, prefetch, one);
    if (!one || end == product.depth) Sums::store(height, tile);
    if (end < product.depth) return;
    if (b > 0) done(b - 1);  // what was stored just now takes its time to become readable
    if (b == product.blocks.num_blocks - 1) done(b);
  }

  // One block of rows times a panel of groups, each unpacked while the tile unit is still at the ones before.
  template <class Unpacker>
  static void multiply_one_unpacked(const Product& product, Unpacker& unpack) {
    constexpr int64_t kLead = 2, kSlots = 4;  // in groups
    alignas(64) bf16 unpacked[kSlots * kBlockSize];
    const int64_t rows = product.blocks.rows, depth = product.depth;
    Sums::zero();
    const auto slot = [&](int64_t g) { return unpacked + g % kSlots * kBlockSize; };
    for (int64_t g = 0; g < std::min(kLead, depth); ++g) unpack(g, slot(g));
    for (int64_t g = 0; g < depth; ++g) {
      if (g + kLead < depth) unpack(g + kLead, slot(g + kLead));
      Products::add(rows, product.of_block(0, g), slot(g), 1, Prefetch{}, false);
    }
    Sums::store(rows, product.tiles);
  }
};

template <>
struct PanelKernel<BFloat16Tile> : AmxPanelKernel<BFloat16Tile> {};
template <>
struct PanelKernel<NarrowTile> : AmxPanelKernel<NarrowTile> {};

}  // namespace octavo

#endif
