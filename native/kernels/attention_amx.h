// The two products of attention in bfloat16 on AMX: up to thirty-two queries at once, in four accumulator tiles of as
// many rows as there are queries. A KV tile is what the tile unit reads as it is: 32 dimensions of its keys are one
// weight tile, its values for sixteen dimensions are half of one (eight pairs of tokens). A row of a product does not
// depend on the others, and both products go through tokens and dimensions in one order, whatever the queries.
#pragma once

#include "kernels/attention_products.h"
#include "tiles/amx.h"

namespace octavo {

template <>
struct Products<BFloat16Tile> {
  using State = ItemState<BFloat16Tile>;
  using Tiles = SplitTiles<BFloat16Tile>;

  static void multiply_keys(State& state, const Tiles& keys, const KVCache& cache) {
    const AmxSession session(AmxShapes::accumulators(state.num_queries));
    if (state.num_queries > 16)
      multiply_keys<true>(state, keys, cache.key_dims() / 32);
    else
      multiply_keys<false>(state, keys, cache.key_dims() / 32);
  }
  static void multiply_values(State& state, const Tiles& values, const KVCache& cache, float* out) {
    const AmxSession session(value_shapes(state.num_queries));
    if (state.num_queries > 16)
      multiply_values<true>(state, values, cache.value_dims(), out);
    else
      multiply_values<false>(state, values, cache.value_dims(), out);
  }

 private:
  static constexpr int kRowBytes = kBlockSteps * sizeof(PairOperand);

  // Tiles 0 to 3 accumulate, 4 and 5 hold the probabilities of sixteen tokens, 6 and 7 their values.
  static AmxShapes value_shapes(int64_t num_queries) {
    constexpr int kPairs = kTileTokens / 2;
    AmxShapes shapes = AmxShapes::accumulators(num_queries);
    for (const int tile : {4, 5}) shapes.set(tile, shapes.rows[tile], kPairs * sizeof(PairOperand));
    for (const int tile : {6, 7}) shapes.set(tile, kPairs, 64);
    return shapes;
  }

  // Two KV tiles at once; with an odd number of them the last one twice.
  template <bool kBoth>
  static void multiply_keys(const State& state, const Tiles& keys, int64_t num_blocks) {
    constexpr int64_t kBlockWeights = kBlockSteps * kTileTokens * 2;
    constexpr int kStride = kSplitTokens * sizeof(float);
    for (int64_t i = 0; i < keys.count; i += 2) {
      const bf16 *left = keys.tiles[i], *right = keys.tiles[std::min(i + 1, keys.count - 1)];
      const PairOperand* queries = state.queries;
      keys.ahead.fetch(i);
      keys.ahead.fetch(i + 1);
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t b = 0; b < num_blocks; ++b, queries += state.num_queries * kBlockSteps) {
        _tile_loadd(6, left + b * kBlockWeights, 64);
        _tile_loadd(4, queries, kRowBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + b * kBlockWeights, 64);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (kBoth) {
          _tile_loadd(5, queries + 16 * kBlockSteps, kRowBytes);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      float* const out = state.scores + i * kTileTokens;
      _tile_stored(0, out, kStride);
      _tile_stored(1, out + 16, kStride);
      if constexpr (kBoth) {
        _tile_stored(2, out + 16 * kSplitTokens, kStride);
        _tile_stored(3, out + 16 * kSplitTokens + 16, kStride);
      }
    }
  }

  // Two vectors of dimensions at once; with an odd number of them the last one twice.
  template <bool kBoth>
  static void multiply_values(const State& state, const Tiles& values, int64_t dims, float* out) {
    const auto weight_stride = static_cast<int>(dims * 2 * sizeof(bf16)),
               stride = static_cast<int>(dims * sizeof(float));
    for (int64_t d = 0; d < dims; d += 32) {
      const int64_t next = std::min(d + 16, dims - 16);
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t i = 0; i < values.count; ++i) {
        const PairOperand* probabilities = state.probability(0, i * kTileTokens);
        if (d == 0) values.ahead.fetch(i);
        _tile_loadd(6, values.tiles[i] + d * 2, weight_stride);
        _tile_loadd(4, probabilities, kRowBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, values.tiles[i] + next * 2, weight_stride);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (kBoth) {
          _tile_loadd(5, probabilities + 16 * kBlockSteps, kRowBytes);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, out + d, stride);
      _tile_stored(1, out + next, stride);
      if constexpr (kBoth) {
        _tile_stored(2, out + 16 * dims + d, stride);
        _tile_stored(3, out + 16 * dims + next, stride);
      }
    }
  }
};

}  // namespace octavo
