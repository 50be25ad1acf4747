// The two products of attention, in vector tiles: scores = queries times keys, output of a split = probabilities times
// values. One accumulator for each result, over dimensions or tokens in ascending order, whatever the number of
// queries.
#pragma once

#include <array>
#include <utility>

#include "kernels/attention_split.h"

namespace octavo {

#ifdef __AVX512F__
inline constexpr int kQueryRows = 6, kQueryVectors = 4;  // 24 accumulators
#else
inline constexpr int kQueryRows = 3, kQueryVectors = 1;  // 6 of the 16 half-width registers
#endif

template <class Tile>
struct Products {
  using Weight = typename Tile::Weight;
  using State = ItemState<Tile>;

  // Nothing is to be set up for an item.
  struct Session {
    explicit Session(int64_t) {}
  };
  static constexpr bool kGathersValues = false;
  // The values of a split as the products read them, for all queries of an item: `find` is called after the product
  // with the keys.
  template <class Find>
  struct Values {
    Find find;
    Values(Find find_, const KVCache&, int64_t) : find(find_) {}
  };

  // Of the queries of `sight`: scores, probabilities and what they give of the values.
  template <class Scales, class Find>
  static void attend(State& state, const Sight& sight, const SplitTiles<Weight>& keys, Values<Find>& values,
                     const Scales& scales, float scale, const KVCache& cache, const Result& to) {
    multiply_all<Scores>(state, sight, keys, keys.count, cache.head_dim(), state.scores);
    for (int64_t q = sight.first(); q < sight.end; ++q)
      to.maximum[q - sight.begin] =
          largest(highest_score(state.scores_of(q), 0, kSplitTokens, sight.visible(q), scales)) * scale;
    const Softmax<Tile, Scales> softmax(scale, scales);
    for (int64_t q = sight.first(); q < sight.end; ++q) {
      const int64_t visible = sight.visible(q);
      const float maximum = to.maximum[q - sight.begin], offset = softmax.offset_of(maximum);
      Vec total = Vec::zero();
      for (int64_t t = 0; t < sight.num_tokens; t += softmax.kBlockTokens)
        softmax.block(state.scores_of(q), t, visible, offset, total, state.probability(q, t));
      to.sum[q - sight.begin] = softmax.sum_of(total, maximum);
    }
    multiply_all<WeighedValues>(state, sight, values.find(), cache.value_dims() / 16, cache.value_dims(), to.output);
  }

 private:
  // Spreads the fetching of N tiles ahead, from `first` on, over the steps of a product.
  template <int N>
  struct Fetches {
    const TilesAhead& ahead;
    int64_t first, lines_per_step;

    Fetches(const TilesAhead& tiles, bool any, int64_t first_tile, int64_t steps)
        : ahead(tiles),
          first(first_tile),
          lines_per_step(any && first < tiles.count ? divide_up(tiles.bytes, 64 * steps) : 0) {}
    void step(int64_t s) const {
      for (int64_t line = s * lines_per_step; line < (s + 1) * lines_per_step; ++line)
        for (int i = 0; i < N; ++i) ahead.fetch_line(first + i, line);
    }
  };

  // Two loops: what a prompt computes with is in a cache, and its loop has no register to spare.
  template <int Q, int V, class F>
  [[gnu::always_inline]] static void multiply_fetching(Vec (&acc)[Q][V], const typename Tile::Operand* operands,
                                                       int64_t block_stride, const Weight* const (&weights)[V],
                                                       int64_t weight_stride, int64_t steps, F fetches) {
    if (fetches.lines_per_step > 0)
      multiply_add<Tile, Q, V>(acc, operands, block_stride, weights, weight_stride, steps, fetches);
    else
      multiply_add<Tile, Q, V>(acc, operands, block_stride, weights, weight_stride, steps);
  }

  // Both give [queries][vectors of 16], from query `query` and vector `vector` on.

  // A vector is a tile of tokens. `dims`: head_dim.
  struct Scores {
    template <int Q, int V>
    static void multiply(const State& state, int64_t query, const SplitTiles<Weight>& keys, int64_t vector,
                         int64_t dims, float* out) {
      const int64_t steps = divide_up(dims, Tile::kStep);
      const Weight* weights[V];
      Vec acc[Q][V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        weights[v] = keys.tiles[vector + v];
#pragma GCC unroll 6
        for (int q = 0; q < Q; ++q) acc[q][v] = Vec::zero();
      }
      multiply_fetching<Q, V>(acc, state.queries + query * kBlockSteps, state.num_queries * kBlockSteps, weights,
                              kTileTokens * Tile::kStep, steps, Fetches<V>(keys.ahead, query == 0, vector, steps));
      store<Q, V>(acc, out + query % kScoreQueries * kSplitTokens + vector * 16, kSplitTokens);
    }
  };

  // A vector is sixteen dimensions. `dims`: value_dims.
  struct WeighedValues {
    template <int Q, int V>
    static void multiply(const State& state, int64_t query, const SplitTiles<Weight>& values, int64_t vector,
                         int64_t dims, float* out) {
      Vec acc[Q][V];
#pragma GCC unroll 6
      for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[q][v] = Vec::zero();
      for (int64_t i = 0; i < values.count; ++i) {
        const Weight* weights[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) weights[v] = values.tiles[i] + (vector + v) * 16 * Tile::kStep;
        constexpr int64_t kSteps = kTileTokens / Tile::kStep;
        multiply_fetching<Q, V>(acc, state.probability(query, i * kTileTokens), 0, weights, dims * Tile::kStep, kSteps,
                                Fetches<1>(values.ahead, query == 0 && vector == 0, i, kSteps));
      }
      store<Q, V>(acc, out + query % kScoreQueries * dims + vector * 16, dims);
    }
  };

  template <int Q, int V>
  [[gnu::always_inline]] static void store(const Vec (&acc)[Q][V], float* out, int64_t stride) {
#pragma GCC unroll 6
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[q][v].store(out + q * stride + v * 16);
  }

  // Q queries from `query` on: vectors in strides of kQueryVectors, then one by one.
  template <class Product, int Q>
  static void multiply_queries(const State& state, int64_t query, const SplitTiles<Weight>& tiles, int64_t num_vectors,
                               int64_t dims, float* out) {
    int64_t i = 0;
    for (; i + kQueryVectors <= num_vectors; i += kQueryVectors)
      Product::template multiply<Q, kQueryVectors>(state, query, tiles, i, dims, out);
    for (; i < num_vectors; ++i) Product::template multiply<Q, 1>(state, query, tiles, i, dims, out);
  }

  template <class Product, size_t... Q>
  static constexpr auto make_table(std::index_sequence<Q...>) {
    using Function = void (*)(const State&, int64_t, const SplitTiles<Weight>&, int64_t, int64_t, float*);
    return std::array<Function, sizeof...(Q)>{multiply_queries<Product, Q + 1>...};
  }

  // The queries of `sight`, kQueryRows at a time.
  template <class Product>
  static void multiply_all(const State& state, const Sight& sight, const SplitTiles<Weight>& tiles, int64_t num_vectors,
                           int64_t dims, float* out) {
    static constexpr auto kTable = make_table<Product>(std::make_index_sequence<kQueryRows>());
    for (int64_t q = sight.begin; q < sight.end; q += kQueryRows)
      kTable[std::min<int64_t>(kQueryRows, sight.end - q) - 1](state, q, tiles, num_vectors, dims, out);
  }
};

}  // namespace octavo
