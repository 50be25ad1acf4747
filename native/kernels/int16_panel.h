// One panel of int8 weights times some hundred rows of int16 activations, in the tiles that the variant has.
#pragma once

#include <utility>

#include "kernels/amx_stream.h"
#include "kernels/int16_rows.h"

namespace octavo {

#ifdef __AMX_INT8__

// As AmxPanelKernel: sixteen rows of two planes fill the tiles. Integer sums stay in the cache between chunks.
struct Int16Panel {
  static constexpr int64_t kRows = kAmxRows / Int16Tile::kPlanes;

  // tiles [block][plane][rows of the block][32] of each block in kAmxRows rows. Calls done(b) when those of block b are
  // complete.
  template <class Done>
  static void multiply(const Int16Packing& packing, const Matrix& weight, int64_t p, int32_t* tiles, const Done& done) {
    using Sums = AmxAccumulators;
    const RowBlocks& blocks = packing.blocks;
    const int64_t depth = weight.num_steps() / kBlockSteps;
    const bool one = blocks.num_blocks == 1;  // its sums stay in the tiles
    for (int64_t begin = 0; begin < depth; begin += kChunk) {
      const int64_t end = std::min(begin + kChunk, depth);
      const int8_t* weights = weight.panel<int8_t>(p) + begin * Sums::kBlockBytes;
      for (int64_t b = 0; b < blocks.num_blocks; ++b) {
        const int64_t rows = Int16Tile::kPlanes * blocks.height(b);
        int32_t* tile = tiles + b * kTileSize;
        if (begin == 0)
          Sums::zero();
        else if (!one)
          Sums::load(rows, tile);
        Sums::add(rows, packing.operands(b) + begin * rows * kBlockSteps, weights, end - begin,
                  plan_amx_prefetch(weights, end - begin, b, blocks.num_blocks, rows), one);
        if (!one || end == depth) Sums::store(rows, tile);
        if (end == depth && b > 0) done(b - 1);  // what was stored just now takes its time to become readable
      }
    }
    done(blocks.num_blocks - 1);
  }

  static constexpr int64_t kTileSize = kAmxRows * Matrix::kPanelColumns;

 private:
  static constexpr int64_t kChunk = 12;  // blocks of 16 steps, 24 KB of weights
};

#else

struct Int16Panel {
  static constexpr int64_t kRows = kTileRows / Int16Tile::kPlanes;
  static constexpr int64_t kTileSize = 2 * kRows * Matrix::kPanelColumns;

  template <class Done>
  static void multiply(const Int16Packing& packing, const Matrix& weight, int64_t p, int32_t* tiles, const Done& done) {
    const RowBlocks& blocks = packing.blocks;
    for (int64_t b = 0; b < blocks.num_blocks; ++b) {
      multiply_table(blocks.height(b), packing.operands(b), weight, p, plan_prefetch(weight, p, b, blocks.num_blocks),
                     tiles + b * kTileSize, std::make_index_sequence<kRows>());
      done(b);
    }
  }

 private:
  static constexpr int64_t kColumns = Matrix::kPanelColumns;

  // One block of rows: the stream, somewhat ahead; several: the next panel, spread over the blocks of this one.
  static Prefetch plan_prefetch(const Matrix& weight, int64_t p, int64_t b, int64_t num_blocks) {
    constexpr int64_t kStepBytes = kColumns * Int16Tile::kStep;
    const char* const bytes = weight.panel<char>(p);
    if (num_blocks == 1) return {bytes + kWeightsAhead, kStepBytes};
    return {bytes + weight.panel_bytes() * (num_blocks + b) / num_blocks, kStepBytes / num_blocks};
  }

  template <size_t... R>
  static void multiply_table(int64_t rows, const Int16Tile::Operand* operands, const Matrix& weight, int64_t p,
                             Prefetch prefetch, int32_t* out, std::index_sequence<R...>) {
    using Function = void (*)(const Int16Tile::Operand*, const Matrix&, int64_t, Prefetch, int32_t*);
    static constexpr Function table[] = {multiply_rows<R + 1>...};
    table[rows - 1](operands, weight, p, prefetch, out);
  }

  // out [2][R][32] = operands [block][plane][R][16] * panel p.
  template <int R>
  static void multiply_rows(const Int16Tile::Operand* operands, const Matrix& weight, int64_t p, Prefetch prefetch,
                            int32_t* out) {
    using Tile = Int16Tile;
    constexpr int kOperandRows = Tile::kPlanes * R;
    constexpr int64_t kStepBytes = kColumns * Tile::kStep;
    for (int first = 0; first < kColumns / 16; first += kTileVectors) {
      for (int64_t begin = 0; begin < weight.num_steps(); begin += Tile::kMaxSteps) {
        const int8_t* weights[kTileVectors];
        Tile::Sum acc[kOperandRows][kTileVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; ++v) {
          weights[v] = weight.panel<int8_t>(p) + begin * kStepBytes + (first + v) * 16 * Tile::kStep;
#pragma GCC unroll 16
          for (int r = 0; r < kOperandRows; ++r)
            acc[r][v] = Tile::start(weight.int8_columns(p).sums + (first + v) * 16);
        }
        multiply_add<Tile, kOperandRows, kTileVectors>(
            acc, operands + begin * kOperandRows, kOperandRows * kBlockSteps, weights, kStepBytes,
            std::min(weight.num_steps() - begin, Tile::kMaxSteps), begin == 0 ? prefetch : Prefetch{});
#pragma GCC unroll 16
        for (int r = 0; r < kOperandRows; ++r)
#pragma GCC unroll 2
          for (int v = 0; v < kTileVectors; ++v)
            Tile::store(acc[r][v], begin == 0, out + r * kColumns + (first + v) * 16, R * kColumns);
      }
    }
  }
};

#endif

}  // namespace octavo
