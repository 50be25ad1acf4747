// The two products of attention in bfloat16 on AMX, for sixteen queries at a time. The tile unit works while the vector
// units do: the maxima of some scores are found while the next are made, and probabilities meet the values while the
// next are computed. A KV tile is what the tile unit reads as it is: 32 dimensions of its keys are one weight tile, its
// values for sixteen dimensions are half of one (eight pairs of tokens). Two halves are gathered for all queries of an
// item. A row of a product does not depend on the others, and both products go through tokens and dimensions in one
// order, whatever the queries.
#pragma once

#include <cstring>

#include "kernels/attention_products.h"
#include "tiles/amx.h"
#include "tiles/short_powers.h"
#include "tiles/unpack_int8.h"

namespace octavo {

// Without scales for the values, probabilities are made short, and their sum is of what the products take.
template <>
struct Softmax<BFloat16Tile, NoScales> {
  static constexpr int64_t kBlockTokens = 32;
  Vec factor;

  Softmax(float scale, const NoScales&) : factor(Vec::set1(scale * ShortPowers::kUnit)) {}

  [[gnu::always_inline]] void block(const float* scores, int64_t t, int64_t visible, float offset_, Vec& total,
                                    PairOperand* to) const {
    const Vec offset = Vec::set1(offset_);
    ShortPowers p =
        ShortPowers::of(fma(Vec::load(scores + t), factor, offset), fma(Vec::load(scores + t + 16), factor, offset));
    if (t + kBlockTokens > visible) p = p.first(std::max<int64_t>(visible - t, 0));
    total = total + p.pair_sums();
    p.store(to);
  }
  static float offset_of(float maximum) { return -maximum * ShortPowers::kUnit; }
  // A maximum that is not finite has left no trace in the powers.
  static float sum_of(Vec total, float maximum) { return sum(total) + (maximum - maximum); }
};

template <>
struct Products<BFloat16Tile> {
  using State = ItemState<BFloat16Tile>;

  // Tiles of as many rows as there are queries; of more than sixteen of them all tiles are whole. What a row beyond
  // them gives is thrown away.
  struct Session : AmxSession {
    explicit Session(int64_t num_queries) : AmxSession(shapes(num_queries)) {}
  };
  static constexpr bool kGathersValues = true;
  static constexpr int kRowBytes = 64, kColumns = 4;
  static constexpr int64_t kTileElements = kRowBytes / sizeof(bf16) * 16, kPairTokens = 2 * kTileTokens;

  // The values of a split, gathered when a first query needs them: [pair of tiles][sixteen dimensions]{ [16][16][2] }.
  // Where no later query will, two pairs are kept, and stay in the L1.
  template <class Find>
  struct Values {
    Values(Find find, const KVCache& cache, int64_t num_queries)
        : stored(find()),
          dims(cache.value_dims()),
          kept(num_queries > kScoreQueries || dims > kColumns * 16 ? kSplitTokens / kPairTokens : 2) {
      struct ValueScratch;
      gathered = scratch<ValueScratch, bf16>(kSplitTokens * dims);
    }
    bf16* pair(int64_t i) const { return gathered + i % kept * kPairTokens * dims; }
    // Pairs of tiles below `end`. An odd number of tiles is followed by one of zeros.
    void gather(int64_t end) {
      for (; num_pairs < end; ++num_pairs)
        for (int64_t half = 0; half < 2; ++half)
          gather_tile(2 * num_pairs + half, pair(num_pairs) + half * kTileTokens * 16);
    }

    decltype(std::declval<Find>()()) stored;
    int64_t dims, kept, num_pairs = 0;
    bf16* gathered;

   private:
    void gather_tile(int64_t tile, bf16* to) const {
      const int64_t num_columns = dims / 16;
      if (tile >= stored.count) {
        for (int64_t column = 0; column < num_columns; ++column)
          std::memset(to + column * kTileElements, 0, kTileElements);
        return;
      }
      if (num_columns == kColumns)
        take<kColumns>(tile, to);
      else
        for (int64_t column = 0; column < num_columns; ++column) take<1>(tile, to, column);
    }
    // kNumber columns of a tile, from `first` on; fetches as many lines of the tile ahead.
    template <int kNumber>
    void take(int64_t tile, bf16* to, int64_t first = 0) const {
      const auto* from = stored.tiles[tile] + first * 32;
      int64_t line = first * kTileTokens / 2;
      to += first * kTileElements;
      for (int64_t row = 0; row < kTileTokens / 2; ++row, from += dims * 2, to += 32)
        for (int column = 0; column < kNumber; ++column, ++line) {
          stored.ahead.fetch_line(tile, line);
          take_pairs(from + column * 32, to + column * kTileElements);
        }
      if (std::is_same_v<decltype(from), const int8_t*> && first == 0) stored.ahead.fetch_line(tile, dims / 4);
    }
  };

  // Of the queries of `sight`: scores, probabilities and what they give of the values.
  template <class Scales, class Find>
  static void attend(State& state, const Sight& sight, const SplitTiles<bf16>& keys, Values<Find>& values,
                     const Scales& scales, float scale, const KVCache& cache, const Result& to) {
    Rows rows(sight);
    find_scores(state, sight, rows, keys, scales, cache.key_dims() / 32);
    const Softmax<BFloat16Tile, Scales> softmax(scale, scales);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      to.maximum[row] = largest(rows.highest[row]) * scale;
      rows.offset[row] = softmax.offset_of(to.maximum[row]);
      rows.total[row] = Vec::zero();
    }
    const int64_t dims = cache.value_dims(), num_pairs = divide_up(sight.tokens(), kPairTokens);
    const int64_t num_columns = std::min<int64_t>(dims / 16, kColumns);
    zero();
    for (int64_t i = 0; i < num_pairs; ++i) {
      values.gather(i + 1);
      if (i > 0) multiply_pair(state, i - 1, values.pair(i - 1), num_columns);
      const float* const scores = state.scores;
      auto* const probabilities = state.probability(0, i * kPairTokens);
      for (int64_t row = rows.begin; row < rows.end; ++row)
        softmax.block(scores + row * kSplitTokens, i * kPairTokens, rows.visible[row], rows.offset[row],
                      rows.total[row], probabilities + row * kBlockSteps);
    }
    multiply_pair(state, num_pairs - 1, values.pair(num_pairs - 1), num_columns);
    store(to.output, dims, num_columns);
    for (int64_t row = rows.begin; row < rows.end; ++row)
      to.sum[row] = softmax.sum_of(rows.total[row], to.maximum[row]);
    // Of more than 64 dimensions the rest.
    for (int64_t d = kColumns * 16; d < dims; d += kColumns * 16) {
      const int64_t columns = std::min<int64_t>((dims - d) / 16, kColumns);
      zero();
      for (int64_t i = 0; i < num_pairs; ++i) multiply_pair(state, i, values.pair(i) + d / 16 * kTileElements, columns);
      store(to.output + d, dims, columns);
    }
  }

 private:
  // Of each query that sees anything.
  struct Rows {
    explicit Rows(const Sight& sight) : begin(sight.first() - sight.begin), end(sight.end - sight.begin) {
      int64_t seen = sight.visible(sight.begin + begin), head = (sight.begin + begin) % sight.num_heads;
      for (int64_t row = begin; row < end; ++row) {
        visible[row] = seen;
        if (++head < sight.num_heads) continue;
        head = 0;
        seen = std::min(seen + 1, sight.num_tokens);
      }
    }
    int64_t begin, end, visible[kScoreQueries];
    float offset[kScoreQueries];  // of what powers are taken of
    Vec highest[kScoreQueries], total[kScoreQueries];
  };

  static AmxShapes shapes(int64_t num_queries) {
    AmxShapes shapes = AmxShapes::full();
    for (int tile = 0; tile < 5; ++tile) shapes.set(tile, static_cast<uint8_t>(std::min<int64_t>(num_queries, 16)), 64);
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

  // The scores of all that the queries see, and the highest, still side by side.
  template <class Scales>
  static void find_scores(State& state, const Sight& sight, Rows& rows, const SplitTiles<bf16>& keys,
                          const Scales& scales, int64_t num_blocks) {
    constexpr int64_t kUnit = 4 * kTileTokens;
    for (int64_t row = rows.begin; row < rows.end; ++row) rows.highest[row] = Vec::set1(kMinusInfinity);
    const auto find_highest = [&](int64_t t) {
      float* scores = state.scores + rows.begin * kSplitTokens;
      const bool whole = rows.visible[rows.begin] >= t + kUnit;  // the first row sees least
      for (int64_t row = rows.begin; row < rows.end; ++row, scores += kSplitTokens) {
        const int64_t visible = whole ? t + kUnit : rows.visible[row];
        rows.highest[row] = max(rows.highest[row], highest_score(scores, t, t + kUnit, visible, scales));
      }
    };
    const int64_t tokens = sight.tokens();
    for (int64_t t = 0; t < tokens; t += kUnit) {
      multiply_keys(state, sight.begin, keys, t / kTileTokens, num_blocks);
      if (t > 0) find_highest(t - kUnit);
    }
    find_highest((tokens - 1) / kUnit * kUnit);
  }

  // Scores of four KV tiles from tile `i` on; those beyond the last are the last again.
  static void multiply_keys(State& state, int64_t first, const SplitTiles<bf16>& keys, int64_t i, int64_t num_blocks) {
    const int64_t last = keys.count - 1;
    if (first == 0)
      for (int64_t ahead = i; ahead < i + 4; ++ahead) keys.ahead.fetch(ahead);
    const bf16* const tiles[] = {keys.tiles[i], keys.tiles[std::min(i + 1, last)], keys.tiles[std::min(i + 2, last)],
                                 keys.tiles[std::min(i + 3, last)]};
    const PairOperand* queries = state.queries + first * kBlockSteps;
    order_memory();
    zero();
    for (int64_t b = 0; b < num_blocks; ++b, queries += state.num_queries * kBlockSteps) {
      const int64_t at = b * kTileElements;
      _tile_loadd(4, queries, kRowBytes);
      _tile_stream_loadd(5, tiles[0] + at, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_stream_loadd(6, tiles[1] + at, 64);
      _tile_dpbf16ps(1, 4, 6);
      _tile_stream_loadd(7, tiles[2] + at, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_stream_loadd(5, tiles[3] + at, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    store(state.scores + i * kTileTokens, kSplitTokens, 4);
  }

  // += the probabilities of a pair of tiles times its values, of sixteen dimensions for each of the accumulators.
  static void multiply_pair(const State& state, int64_t i, const bf16* values, int64_t num_columns) {
    order_memory();
    _tile_loadd(4, state.probabilities + i * state.probability_stride(), kRowBytes);
    _tile_stream_loadd(5, values, 64);
    _tile_dpbf16ps(0, 4, 5);
    if (num_columns < 2) return;
    _tile_stream_loadd(6, values + kTileElements, 64);
    _tile_dpbf16ps(1, 4, 6);
    if (num_columns < 3) return;
    _tile_stream_loadd(7, values + 2 * kTileElements, 64);
    _tile_dpbf16ps(2, 4, 7);
    if (num_columns < 4) return;
    _tile_stream_loadd(5, values + 3 * kTileElements, 64);
    _tile_dpbf16ps(3, 4, 5);
  }

  // The first `num_columns` accumulators, side by side in rows of `columns` floats.
  static void store(float* out, int64_t columns, int64_t num_columns) {
    const auto stride = static_cast<int>(columns * sizeof(float));
    _tile_stored(0, out, stride);
    if (num_columns > 1) _tile_stored(1, out + 16, stride);
    if (num_columns > 2) _tile_stored(2, out + 32, stride);
    if (num_columns > 3) _tile_stored(3, out + 48, stride);
  }

  static void take_pairs(const bf16* from, bf16* to) { std::memcpy(to, from, 32 * sizeof(bf16)); }
  static void take_pairs(const int8_t* from, bf16* to) { unpack_pairs(from, to); }
};

}  // namespace octavo
