// The two products of attention in bfloat16 on AMX, for up to thirty-two queries. A KV tile is what the tile unit reads
// as it is: 32 dimensions of its keys are one weight tile, its values for sixteen dimensions are half of one (eight
// pairs of tokens). Two halves, gathered on the way, are a whole one. A row of a product does not depend on the others,
// and both products go through tokens and dimensions in one order, whatever the queries.
#pragma once

#include <cstring>

#include "kernels/attention_products.h"
#include "tiles/amx.h"
#include "tiles/unpack_int8.h"

namespace octavo {

template <>
struct Products<BFloat16Tile> {
  using State = ItemState<BFloat16Tile>;

  // Tiles of as many rows as there are queries; of more than sixteen of them the second tile is whole, too. What a row
  // beyond them gives is thrown away.
  struct Session : AmxSession {
    explicit Session(int64_t num_queries) : AmxSession(shapes(num_queries)) {}
  };
  static constexpr bool kGathersValues = true;

  // Scores of the sixteen queries from `first` on. Four KV tiles at once; those beyond the last are the last again.
  static void multiply_keys(State& state, int64_t first, const SplitTiles<bf16>& keys, const KVCache& cache) {
    const int64_t num_blocks = cache.key_dims() / 32, last = keys.count - 1;
    const PairOperand* const queries = state.queries + first * kBlockSteps;
    order_memory();
    for (int64_t i = 0; i < keys.count; i += 4) {
      if (first == 0)
        for (int64_t ahead = i; ahead < i + 4; ++ahead) keys.ahead.fetch(ahead);
      const bf16* const tiles[] = {keys.tiles[i], keys.tiles[std::min(i + 1, last)], keys.tiles[std::min(i + 2, last)],
                                   keys.tiles[std::min(i + 3, last)]};
      zero();
      for (int64_t b = 0; b < num_blocks; ++b) {
        const int64_t at = b * kBlockSteps * kTileTokens * 2;
        _tile_loadd(4, queries + b * state.num_queries * kBlockSteps, kRowBytes);
        _tile_loadd(6, tiles[0] + at, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, tiles[1] + at, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, tiles[2] + at, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, tiles[3] + at, 64);
        _tile_dpbf16ps(3, 4, 7);
      }
      float* const scores = state.scores + i * kTileTokens;
      constexpr int kStride = kSplitTokens * sizeof(float);
      _tile_stored(0, scores, kStride);
      _tile_stored(1, scores + 16, kStride);
      _tile_stored(2, scores + 32, kStride);
      _tile_stored(3, scores + 48, kStride);
    }
  }

  template <class Stored>
  static void multiply_values(State& state, const SplitTiles<Stored>& values, const KVCache& cache, float* out) {
    if (state.num_queries > 16)
      multiply_values<true>(state, values, cache.value_dims(), out);
    else
      multiply_values<false>(state, values, cache.value_dims(), out);
  }

 private:
  static constexpr int kRowBytes = kBlockSteps * sizeof(PairOperand);
  static constexpr int64_t kGatheredDims = 32, kGatheredRow = kGatheredDims * 2,
                           kGatheredTile = kTileTokens / 2 * kGatheredRow;

  static AmxShapes shapes(int64_t num_queries) {
    AmxShapes shapes = AmxShapes::full();
    for (int tile = 0; tile < 6; ++tile) shapes.set(tile, static_cast<uint8_t>(std::min<int64_t>(num_queries, 16)), 64);
    return shapes;
  }

  static void zero() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  // Tile loads do not say that they read memory.
  static void order_memory() { asm volatile("" ::: "memory"); }

  // Thirty-two dimensions at once, or the sixteen that are left (twice). Pairs of tiles are gathered one ahead of the
  // product, since what has just been stored takes its time to become readable. kBoth: more than sixteen queries.
  template <bool kBoth, class Stored>
  static void multiply_values(const State& state, const SplitTiles<Stored>& values, int64_t dims, float* out) {
    alignas(64) bf16 gathered[2][2 * kGatheredTile];
    const int64_t num_pairs = divide_up(values.count, 2);
    const auto stride = static_cast<int>(dims * sizeof(float));
    for (int64_t d = 0; d < dims; d += kGatheredDims) {
      const int64_t right = dims - d > 16 ? 16 : 0;
      zero();
      gather_pair(values, 0, d, dims, gathered[0]);
      for (int64_t i = 0; i < num_pairs; ++i) {
        if (i + 1 < num_pairs) gather_pair(values, i + 1, d, dims, gathered[(i + 1) % 2]);
        order_memory();
        const PairOperand* probabilities = state.probability(0, i * 2 * kTileTokens);
        const bf16* weights = gathered[i % 2];
        _tile_loadd(6, weights, kGatheredRow * sizeof(bf16));
        _tile_loadd(4, probabilities, kRowBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + right * 2, kGatheredRow * sizeof(bf16));
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (kBoth) {
          _tile_loadd(5, probabilities + 16 * kBlockSteps, kRowBytes);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, out + d, stride);
      _tile_stored(1, out + d + right, stride);
      if constexpr (kBoth) {
        _tile_stored(2, out + 16 * dims + d, stride);
        _tile_stored(3, out + 16 * dims + d + right, stride);
      }
    }
  }

  // Pair `i` of tiles, dimensions [d, d + 32) of them: to [16 pairs of tokens][32 dimensions][2]. An odd number of
  // tiles is followed by one of zeros.
  template <class Stored>
  static void gather_pair(const SplitTiles<Stored>& values, int64_t i, int64_t d, int64_t dims, bf16* to) {
    for (int64_t tile = 2 * i; tile < 2 * i + 2; ++tile, to += kGatheredTile) {
      if (tile == values.count)
        std::memset(to, 0, kGatheredTile * sizeof(bf16));
      else if (dims - d > 16)
        gather<2>(values.tiles[tile] + d * 2, dims * 2, values.ahead, tile, d / 2, to);
      else
        gather<1>(values.tiles[tile] + d * 2, dims * 2, values.ahead, tile, d / 2, to);
    }
  }
  // kVectors vectors of sixteen pairs of each row of a tile; fetches as many lines of tile `tile` ahead, from `line`
  // on.
  template <int kVectors, class Stored>
  static void gather(const Stored* from, int64_t row, const TilesAhead& ahead, int64_t tile, int64_t line, bf16* to) {
    for (int64_t pair = 0; pair < kTileTokens / 2; ++pair, from += row, to += kGatheredRow)
      for (int v = 0; v < kVectors; ++v, ++line) {
        ahead.fetch_line(tile, line);
        take_pairs(from + v * 32, to + v * 32);
      }
  }
  static void take_pairs(const bf16* from, bf16* to) { std::memcpy(to, from, 32 * sizeof(bf16)); }
  static void take_pairs(const int8_t* from, bf16* to) { unpack_pairs(from, to); }
};

}  // namespace octavo
