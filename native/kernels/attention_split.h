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
inline constexpr int64_t kScoreQueries = 16;  // those of a split, and all probabilities, fit the L1
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
  Operand* probabilities;  // [block][query][16]
  Result result, part;     // merged so far; of one split

  ItemState(int64_t queries_, const KVCache& cache) : num_queries(queries_) {
    struct StateScratch;
    const int64_t query_operands = num_operands<Tile>(kMaxQueries, cache.head_dim()),
                  probability_operands = num_operands<Tile>(kMaxQueries, kSplitTokens), dims = cache.value_dims(),
                  score_floats = kScoreQueries * kSplitTokens, result_floats = Result::num_floats(kMaxQueries, dims);
    // Side by side, so that they do not compete for the same sets of the L1.
    auto* const bytes = scratch<StateScratch, char>((score_floats + 2 * result_floats) * sizeof(float) +
                                                    (query_operands + probability_operands) * sizeof(Operand));
    queries = reinterpret_cast<Operand*>(bytes);
    probabilities = queries + query_operands;
    scores = reinterpret_cast<float*>(probabilities + probability_operands);
    result = Result::at(scores + score_floats, kMaxQueries, dims);
    part = Result::at(result.output + result_floats, kMaxQueries, dims);
  }

  float* scores_of(int64_t q) const { return scores + q % kScoreQueries * kSplitTokens; }
  // Where the probabilities of sixteen tokens of query q from token t on stand.
  Operand* probability(int64_t q, int64_t t) const {
    const int64_t steps = t / Tile::kStep;
    return probabilities + steps / kBlockSteps * num_queries * kBlockSteps + q * kBlockSteps + steps % kBlockSteps;
  }
};

// Query q sees the first `visible` (at least one) tokens of the split. First its highest score (times `scale`) is
// found, of all queries of a group, so that none waits for its own. Scores get the scales of the keys on the way.
template <class Tile, class Scales>
[[gnu::always_inline]] inline void find_maximum(const ItemState<Tile>& state, int64_t q, int64_t visible, float scale,
                                                const Scales& scales, const Result& result) {
  float* const scores = state.scores_of(q);
  const int64_t whole = visible / 16 * 16;
  const int rest = static_cast<int>(visible - whole);
  // Of every other vector each: one maximum alone would wait for itself.
  Vec highest = Vec::set1(kMinusInfinity), highest_of_odd = highest;
  const auto take_score = [&](Vec& so_far, int64_t t, int n) {
    const Vec s = scales.scale_scores(Vec::load(scores + t), t);
    if constexpr (Scales::kAny) s.store(scores + t);
    so_far = max(so_far, n == 16 ? s : first(s, n, kMinusInfinity));
  };
  const int64_t pairs = whole / 32 * 32;
#pragma GCC unroll 2
  for (int64_t t = 0; t < pairs; t += 32) {
    take_score(highest, t, 16);
    take_score(highest_of_odd, t + 16, 16);
  }
  if (pairs < whole) take_score(highest, pairs, 16);
  if (rest) take_score(highest_of_odd, whole, rest);
  result.maximum[q] = largest(max(highest, highest_of_odd)) * scale;
}

// Then its probabilities and their sum: powers of two of (score - maximum) * scale, with the binary logarithm of e in
// `scale`. The sum takes them unrounded and without the scales of the values, sixteen lanes side by side.
template <class Tile, class Scales>
[[gnu::always_inline]] inline void softmax(const ItemState<Tile>& state, int64_t q, int64_t visible, int64_t num_tokens,
                                           float scale, const Scales& scales, const Result& result) {
  constexpr int64_t kBlockTokens = kBlockSteps * Tile::kStep;
  const float* const scores = state.scores_of(q);
  const Vec factor = Vec::set1(scale), offset = Vec::set1(-result.maximum[q]);
  Vec total = Vec::zero();
  auto* to = state.probability(q, 0);
  const int64_t stride = state.num_queries * kBlockSteps;
  const auto probabilities = [&](int64_t t, int n) __attribute__((always_inline)) {
    const Vec p = exp2(fma(Vec::load(scores + t), factor, offset)), scaled = scales.scale_probabilities(p, t);
    total = total + (n == 16 ? p : first(p, n, 0.0f));
    return n == 16 ? scaled : first(scaled, n, 0.0f);
  };
  int64_t t = 0;
#pragma GCC unroll 2
  for (; t + kBlockTokens <= visible; t += kBlockTokens, to += stride) {
    Vec block[Tile::kStep];
#pragma GCC unroll 2
    for (int v = 0; v < Tile::kStep; ++v) block[v] = probabilities(t + v * 16, 16);
    Tile::store_block(to, block);
  }
  for (; t < num_tokens; t += kBlockTokens, to += stride) {
    Vec block[Tile::kStep];
    for (int v = 0; v < Tile::kStep; ++v) {
      const int64_t left = visible - t - v * 16;
      block[v] = left > 0 ? probabilities(t + v * 16, static_cast<int>(std::min<int64_t>(left, 16))) : Vec::zero();
    }
    Tile::store_block(to, block);
  }
  result.sum[q] = sum(total);
}

}  // namespace octavo
