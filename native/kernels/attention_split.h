// One split (256 tokens) of one request's cache: where its tiles lie, and the softmax over its scores.
#pragma once

#include <limits>

#include "octavo/attention.h"
#include "octavo/memory.h"
#include "tiles/tile.h"

namespace octavo {

inline constexpr int64_t kTileTokens = KVCache::kTileTokens;
inline constexpr int64_t kSplitTokens = AttentionPlan::kSplitTokens;
inline constexpr int64_t kSplitTiles = kSplitTokens / kTileTokens;
inline constexpr int64_t kMaxQueries = AttentionPlan::kMaxQueries;
// Queries whose scores are made, and turned into probabilities, before those of the next.
#ifdef __AMX_BF16__
inline constexpr int64_t kScoreQueries = 16;  // a tile high; their scores of a split fit the L1
#else
inline constexpr int64_t kScoreQueries = kMaxQueries;
#endif
inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct Split {
  int64_t num_tokens;  // up to the last position that an item needs
  int32_t tiles[kSplitTiles];
  int64_t num_tiles() const { return divide_up(num_tokens, kTileTokens); }
};

inline Split find_split(const Step& step, const KVCache& cache, int64_t request, int64_t first_token,
                        int64_t num_tokens) {
  const int64_t tiles_per_block = cache.block_size() / kTileTokens, first_tile = first_token / kTileTokens;
  const int32_t* block = step.block_tables + request * step.block_table_stride + first_tile / tiles_per_block;
  int64_t tile = first_tile % tiles_per_block;
  Split split{num_tokens, {}};
  for (int64_t i = 0; i < split.num_tiles(); ++i) {
    split.tiles[i] = static_cast<int32_t>(*block * tiles_per_block + tile);
    if (++tile == tiles_per_block) {
      tile = 0;
      ++block;
    }
  }
  return split;
}

// Tiles that will be read soon. A decoding request streams through its cache once: each of its tiles is fetched while
// an earlier one is multiplied, the values of a split during its keys, the keys of the next split during those values.
struct TilesAhead {
  const char* tiles[kSplitTiles];
  int64_t count = 0, bytes = 0;

  void fetch(int64_t i) const {
    if (i >= count) return;
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(tiles[i] + line, 0, 2);
  }
  // One line of it: where there is time between, fetches in a burst would only wait for each other.
  void fetch_line(int64_t i, int64_t line) const {
    // Not __builtin_prefetch: in loops of vectors gcc takes it for without effect, and deletes it.
    if (i < count && line * 64 < bytes) asm volatile("prefetcht1 %0" ::"m"(tiles[i][line * 64]));
  }
};

// The keys or the values of a split, and what is to be fetched while they are read.
template <class T>
struct SplitTiles {
  const T* tiles[kSplitTiles];
  int64_t count;
  TilesAhead ahead;
};

// An int8 cache's scales for the keys and values of a split, and what a cache without any has in their place.
struct SplitScales {
  static constexpr bool kAny = true;
  const float *keys[kSplitTiles], *values[kSplitTiles];

  SplitScales(const KVCache& cache, const Split& split, int64_t kv_head) {
    for (int64_t i = 0; i < split.num_tiles(); ++i) {
      keys[i] = cache.key_scales(split.tiles[i], kv_head);
      values[i] = cache.value_scales(split.tiles[i], kv_head);
    }
  }
  Vec scale_scores(Vec s, int64_t t) const { return s * Vec::load(keys[t / kTileTokens]); }
  Vec scale_probabilities(Vec p, int64_t t) const { return p * Vec::load(values[t / kTileTokens]); }
};

struct NoScales {
  static constexpr bool kAny = false;
  NoScales(const KVCache&, const Split&, int64_t) {}
  Vec scale_scores(Vec s, int64_t) const { return s; }
  Vec scale_probabilities(Vec p, int64_t) const { return p; }
};

// Of some queries: what attention over some tokens gave. The output is [query][value_dims]; the maximum of the scores
// (times `scale`, see softmax) and the sum of the probabilities have whole vectors of queries.
struct Result {
  float *output, *maximum, *sum;

  static int64_t num_floats(int64_t num_queries, int64_t dims) {
    return num_queries * dims + 2 * round_up(num_queries, 16);
  }
  static Result at(float* floats, int64_t num_queries, int64_t dims) {
    float* const maximum = floats + num_queries * dims;
    return {floats, maximum, maximum + round_up(num_queries, 16)};
  }
  // That of the queries from `query` on.
  Result from(int64_t query, int64_t dims) const { return {output + query * dims, maximum + query, sum + query}; }
};

// Adds the result of later tokens: both are scaled to the larger maximum. Queries before `first_query` stay as they
// are.
inline void merge(const Result& into, const Result& part, int64_t first_query, int64_t num_queries, int64_t dims) {
  for (int64_t q = 0; q < first_query; ++q) {
    part.maximum[q] = kMinusInfinity;
    part.sum[q] = 0;
  }
  for (int64_t begin = first_query / 16 * 16; begin < num_queries; begin += 16) {
    const Vec max_so_far = Vec::load(into.maximum + begin), part_max = Vec::load(part.maximum + begin);
    const Vec highest = max(max_so_far, part_max);
    const Vec keep = exp2(max_so_far - highest), take = exp2(part_max - highest);
    highest.store(into.maximum + begin);
    fma(Vec::load(into.sum + begin), keep, Vec::load(part.sum + begin) * take).store(into.sum + begin);
    float keeps[16], takes[16];
    keep.store(keeps);
    take.store(takes);
    for (int64_t q = std::max(begin, first_query); q < std::min(begin + 16, num_queries); ++q) {
      float *to = into.output + q * dims, *from = part.output + q * dims;
      const Vec k = Vec::set1(keeps[q - begin]), t = Vec::set1(takes[q - begin]);
      for (int64_t d = 0; d < dims; d += 16) fma(Vec::load(from + d), t, Vec::load(to + d) * k).store(to + d);
    }
  }
}

// Everything that an item works on, in one thread's scratch. "Query" here: one head of one token row.
template <class Tile>
struct ItemState {
  using Operand = typename Tile::Operand;

  int64_t num_queries;
  Operand* queries;        // [block][query][16]: the packed query vectors
  float* scores;           // [kScoreQueries][kSplitTokens]
  Operand* probabilities;  // [block][query of the group][16]
  Result result, part;     // merged so far; of one split and one group of kScoreQueries

  ItemState(int64_t queries_, const KVCache& cache) : num_queries(queries_) {
    struct StateScratch;
    const int64_t query_operands = num_operands<Tile>(kMaxQueries, cache.head_dim()),
                  probability_operands = num_operands<Tile>(kScoreQueries, kSplitTokens), dims = cache.value_dims(),
                  score_floats = kScoreQueries * kSplitTokens, part_floats = Result::num_floats(kScoreQueries, dims),
                  result_floats = Result::num_floats(kMaxQueries, dims);
    // Side by side, so that they do not compete for the same sets of the L1.
    auto* const bytes = scratch<StateScratch, char>((score_floats + part_floats + result_floats) * sizeof(float) +
                                                    (query_operands + probability_operands) * sizeof(Operand));
    queries = reinterpret_cast<Operand*>(bytes);
    probabilities = queries + query_operands;
    scores = reinterpret_cast<float*>(probabilities + probability_operands);
    part = Result::at(scores + score_floats, kScoreQueries, dims);
    result = Result::at(part.output + part_floats, kMaxQueries, dims);
  }

  float* scores_of(int64_t q) const { return scores + q % kScoreQueries * kSplitTokens; }
  // From one block of a query's probabilities to the next.
  int64_t probability_stride() const { return std::min(num_queries, kScoreQueries) * kBlockSteps; }
  // Where the probabilities of sixteen tokens of query q from token t on stand.
  Operand* probability(int64_t q, int64_t t) const {
    const int64_t steps = t / Tile::kStep;
    return probabilities + steps / kBlockSteps * probability_stride() + q % kScoreQueries * kBlockSteps +
           steps % kBlockSteps;
  }
};

// One split as queries [begin, end) of an item, at most kScoreQueries, see it.
struct Sight {
  int64_t begin, end;
  int64_t position;  // of the item's first row, counted from the split's first token; may be negative
  int64_t num_heads, num_tokens;

  // How many tokens of the split query q sees.
  int64_t visible(int64_t q) const { return std::clamp<int64_t>(position + q / num_heads + 1, 0, num_tokens); }
  // The first query that sees any, and what the last one sees.
  int64_t first() const { return std::max(begin, -position * num_heads); }
  int64_t tokens() const { return visible(end - 1); }
};

// The highest of scores [begin, end) of a query that sees the first `visible` tokens. They get the scales of the keys
// on the way.
template <class Scales>
[[gnu::always_inline]] inline Vec highest_score(float* scores, int64_t begin, int64_t end, int64_t visible,
                                                const Scales& scales) {
  // Of every other vector each: one maximum alone would wait for itself.
  Vec highest = Vec::set1(kMinusInfinity), highest_of_odd = highest;
  const auto take_score = [&](Vec& so_far, int64_t t, int n) __attribute__((always_inline)) {
    const Vec s = scales.scale_scores(Vec::load(scores + t), t);
    if constexpr (Scales::kAny) s.store(scores + t);
    so_far = max(so_far, n == 16 ? s : first(s, n, kMinusInfinity));
  };
  end = std::min(end, visible);
  int64_t t = begin;
#pragma GCC unroll 2
  for (; t + 32 <= end; t += 32) {
    take_score(highest, t, 16);
    take_score(highest_of_odd, t + 16, 16);
  }
  for (; t < end; t += 16) take_score(highest, t, static_cast<int>(std::min<int64_t>(end - t, 16)));
  return max(highest, highest_of_odd);
}

// Probabilities of a query: powers of two of (score - maximum) * scale, with the binary logarithm of e in `scale`; the
// maximum comes with its scale. Their sum takes them unrounded and without the scales of the values, sixteen lanes side
// by side.
template <class Tile, class Scales>
struct Softmax {
  static constexpr int64_t kBlockTokens = kBlockSteps * Tile::kStep;

  const Scales& scales;
  Vec factor;

  Softmax(float scale, const Scales& scales_) : scales(scales_), factor(Vec::set1(scale)) {}

  // A block of tokens, from t on, of which the query sees those before `visible`.
  [[gnu::always_inline]] void block(const float* scores, int64_t t, int64_t visible, float offset_, Vec& total,
                                    typename Tile::Operand* to) const {
    const Vec offset = Vec::set1(offset_);
    Vec scaled[Tile::kStep];
    if (t + kBlockTokens <= visible) {
#pragma GCC unroll 2
      for (int v = 0; v < Tile::kStep; ++v) {
        const Vec p = probability(scores, t + v * 16, offset);
        total = total + p;
        scaled[v] = scales.scale_probabilities(p, t + v * 16);
      }
    } else {
      for (int v = 0; v < Tile::kStep; ++v) {
        const int n = static_cast<int>(std::clamp<int64_t>(visible - t - v * 16, 0, 16));
        scaled[v] = Vec::zero();
        if (n == 0) continue;
        const Vec p = probability(scores, t + v * 16, offset);
        total = total + first(p, n, 0.0f);
        scaled[v] = first(scales.scale_probabilities(p, t + v * 16), n, 0.0f);
      }
    }
    Tile::store_block(to, scaled);
  }
  static float offset_of(float maximum) { return -maximum; }
  static float sum_of(Vec total, float) { return sum(total); }

 private:
  [[gnu::always_inline]] Vec probability(const float* scores, int64_t t, Vec offset) const {
    return exp2(fma(Vec::load(scores + t), factor, offset));
  }
};

}  // namespace octavo
