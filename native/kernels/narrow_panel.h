// One panel of a narrow matrix times some hundred rows, in the tiles that the variant has.
#pragma once

#include "kernels/panel_kernel.h"
#include "tiles/narrow_tile.h"

namespace octavo {

#ifdef __AMX_BF16__

// As PanelKernel<BFloat16Tile>; the next chunk is fetched into the L2 only.
template <>
struct PanelKernel<NarrowTile> {
  static constexpr int64_t kRows = kAmxRows, kMaxRowsAtOnce = 256, kCacheBytes = 3 << 19;
  static constexpr int64_t kTileSize = kRows * Matrix::kPanelColumns;

  template <class Done>
  static void multiply(const RowBlocks& blocks, const PairOperand* operands, const Matrix& weight, int64_t p,
                       float* tiles, const Done& done) {
    using Sums = AmxAccumulators;
    const int64_t depth = weight.num_steps() / kBlockSteps;
    const bool one = blocks.num_blocks == 1;  // its sums stay in the tiles
    const int64_t chunk = blocks.num_blocks < kManyBlocks ? kLongChunk : kChunk;
    for (int64_t begin = 0; begin < depth; begin += chunk) {
      const int64_t end = std::min(begin + chunk, depth);
      const bf16* weights = weight.panel<bf16>(p) + begin * kBlockSize;
      for (int64_t b = 0; b < blocks.num_blocks; ++b) {
        const int64_t height = blocks.height(b);
        const PairOperand* block = operands + num_operands<NarrowTile>(blocks.begin(b), weight.columns());
        float* tile = tiles + b * kTileSize;
        if (begin == 0)
          Sums::zero();
        else if (!one)
          Sums::load(height, tile);
        NarrowTile::add(height, block + begin * NarrowTile::kPlanes * height * kBlockSteps, weights, end - begin,
                        plan_prefetch(weights, end - begin, b, blocks.num_blocks));
        if (!one || end == depth) Sums::store(height, tile);
        if (end == depth && b > 0) done(b - 1);  // what was stored just now takes its time to become readable
      }
    }
    done(blocks.num_blocks - 1);
  }

 private:
  // Blocks of 16 steps, 12 KB of weights. Few blocks of rows are soon done with a chunk, and the next is still on its
  // way: longer ones hide more of it (64 rows: four fifths of the time).
  static constexpr int64_t kChunk = 6, kLongChunk = 12, kManyBlocks = 4;
  static constexpr int64_t kBlockSize = kBlockSteps * Matrix::kPanelColumns * 2;

  // What to fetch with every block of steps. One block of rows: the stream, somewhat ahead; several: the next chunk,
  // its lines spread evenly over the blocks.
  static Prefetch plan_prefetch(const bf16* chunk, int64_t depth, int64_t b, int64_t num_blocks) {
    constexpr int64_t kBytes = AmxAccumulators::kBlockBytes;
    const char* const bytes = reinterpret_cast<const char*>(chunk);
    if (num_blocks == 1) return {bytes + kWeightsAhead, kBytes};
    return {bytes + depth * kBytes * (num_blocks + b) / num_blocks, kBytes / num_blocks, true};
  }
};

#endif

}  // namespace octavo
