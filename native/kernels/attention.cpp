// Paged attention for any mix of chunk lengths. For each item of the plan and each 256-token split: scores (queries
// times keys), a softmax of the split, output (probabilities times values); then the splits are merged left to right.
#include "octavo/attention.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "octavo/memory.h"
#include "tiles/tile.h"

namespace octavo {

KVCache::KVCache(int64_t num_blocks, int64_t block_size, int64_t num_kv_heads, int64_t head_dim, DType dtype)
    : block_size_(block_size), num_kv_heads_(num_kv_heads), head_dim_(head_dim), dtype_(dtype) {
  const int64_t num_tiles = num_blocks * block_size / kTileTokens;
  const size_t element = dtype == DType::kBFloat16 ? sizeof(bf16) : sizeof(float);
  keys_ = Memory(static_cast<size_t>(num_tiles * num_kv_heads * key_tile()) * element);
  values_ = Memory(static_cast<size_t>(num_tiles * num_kv_heads * value_tile()) * element);
}

namespace {

constexpr int64_t kTileTokens = KVCache::kTileTokens;
constexpr int64_t kSplitTokens = AttentionPlan::kSplitTokens;
constexpr int64_t kMaxQueries = AttentionPlan::kMaxQueries;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

#ifdef __AVX512F__
constexpr int kQueries = 6, kVectors = 4;  // 24 accumulators
#else
constexpr int kQueries = 3, kVectors = 1;  // 6 of the 16 half-width registers
#endif

void round_to(float x, float* out) { *out = x; }
void round_to(float x, bf16* out) { *out = to_bf16(x); }

template <class T>
void write_rows(View k, View v, const int32_t* slots, const KVCache& cache, Worker worker) {
  const int64_t step = cache.step(), dim = cache.head_dim(), padded = cache.padded_head_dim();
  const auto rows = worker.share(k.rows);
  for (int64_t t = rows.begin; t < rows.end; ++t) {
    const int64_t tile = slots[t] / kTileTokens, token = slots[t] % kTileTokens;
    // A value shares its pair with the next token's. Where that one is not written in this step, it becomes zero: a
    // probability of zero times what an earlier owner of the block left there could be a NaN.
    const bool clear_next = step == 2 && token % 2 == 0 && (t + 1 == k.rows || slots[t + 1] != slots[t] + 1);
    for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
      T* keys = cache.keys<T>(tile, head) + token * step;
      T* values = cache.values<T>(tile, head) + token / step * padded * step + token % step;
      const float *key = k.row(t) + head * dim, *value = v.row(t) + head * dim;
      for (int64_t d = 0; d < dim; ++d) {
        round_to(key[d], keys + d / step * kTileTokens * step + d % step);
        round_to(value[d], values + d * step);
      }
      for (int64_t d = 0; clear_next && d < dim; ++d) round_to(0.0f, values + d * step + 1);
    }
  }
}

// The tiles of one split of one request.
struct SplitTiles {
  int64_t num_tokens;  // of the split, up to the item's last position
  int32_t tile[kSplitTokens / kTileTokens];
  int64_t count() const { return divide_up(num_tokens, kTileTokens); }
};

SplitTiles find_tiles(const Step& step, const KVCache& cache, int64_t request, int64_t first_token,
                      int64_t num_tokens) {
  const int32_t* table = step.block_tables + request * step.block_table_stride;
  const int64_t tiles_per_block = cache.block_size() / kTileTokens;
  SplitTiles tiles{num_tokens, {}};
  for (int64_t i = 0; i < tiles.count(); ++i) {
    const int64_t tile = first_token / kTileTokens + i;
    tiles.tile[i] = static_cast<int32_t>(table[tile / tiles_per_block] * tiles_per_block + tile % tiles_per_block);
  }
  return tiles;
}

// Everything that an item works on, in one thread's scratch. "Query" here: one head of one token row.
template <class Tile>
struct ItemState {
  using Operand = typename Tile::Operand;
  static constexpr int64_t kOperandsOfSplit = kSplitTokens / Tile::kStep;

  int64_t num_queries;
  Operand* queries;        // [block][query][16]: the packed query vectors
  float* scores;           // [query][kSplitTokens]
  Operand* probabilities;  // [block][query][16]
  float* part;             // [query][padded]: the output of one split
  float* output;           // [query][padded]: merged so far
  float part_max[kMaxQueries], part_sum[kMaxQueries], maximum[kMaxQueries], sum[kMaxQueries];

  ItemState(int64_t queries_, int64_t head_dim, int64_t padded) : num_queries(queries_) {
    struct QueryScratch;
    struct ScoreScratch;
    struct ProbabilityScratch;
    struct PartScratch;
    struct OutputScratch;
    queries = scratch<QueryScratch, Operand>(num_operands<Tile>(kMaxQueries, head_dim));
    scores = scratch<ScoreScratch, float>(kMaxQueries * kSplitTokens);
    probabilities = scratch<ProbabilityScratch, Operand>(kMaxQueries * kOperandsOfSplit);
    part = scratch<PartScratch, float>(kMaxQueries * padded);
    output = scratch<OutputScratch, float>(kMaxQueries * padded);
  }
};

// The two products of attention. Both give [queries][vectors of 16], from query `query` and vector `vector` on.

// Scores: queries times keys. A vector is a tile of tokens.
struct Scores {
  static int64_t num_vectors(const KVCache&, const SplitTiles& tiles) { return tiles.count(); }

  template <class Tile, int Q, int V>
  static void multiply(ItemState<Tile>& state, int64_t query, const KVCache& cache, int64_t kv_head,
                       const SplitTiles& tiles, int64_t vector) {
    const typename Tile::Weight* keys[V];
    Vec acc[Q][V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      keys[v] = cache.keys<typename Tile::Weight>(tiles.tile[vector + v], kv_head);
#pragma GCC unroll 6
      for (int q = 0; q < Q; ++q) acc[q][v] = Vec::zero();
    }
    multiply_add<Tile, Q, V>(acc, state.queries + query * kBlockSteps, state.num_queries * kBlockSteps, keys,
                             kTileTokens * Tile::kStep, divide_up(cache.head_dim(), Tile::kStep));
#pragma GCC unroll 6
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[q][v].store(state.scores + (query + q) * kSplitTokens + (vector + v) * 16);
  }
};

// The split's output: probabilities times values. A vector is sixteen dimensions.
struct WeighedValues {
  static int64_t num_vectors(const KVCache& cache, const SplitTiles&) { return cache.padded_head_dim() / 16; }

  template <class Tile, int Q, int V>
  static void multiply(ItemState<Tile>& state, int64_t query, const KVCache& cache, int64_t kv_head,
                       const SplitTiles& tiles, int64_t vector) {
    constexpr int64_t kStepsOfTile = kTileTokens / Tile::kStep;
    Vec acc[Q][V];
#pragma GCC unroll 6
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[q][v] = Vec::zero();
    for (int64_t i = 0; i < tiles.count(); ++i) {
      const typename Tile::Weight* values[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v)
        values[v] = cache.values<typename Tile::Weight>(tiles.tile[i], kv_head) + (vector + v) * 16 * Tile::kStep;
      const int64_t first_step = i * kStepsOfTile;
      const auto* operands = state.probabilities + first_step / kBlockSteps * state.num_queries * kBlockSteps +
                             query * kBlockSteps + first_step % kBlockSteps;
      // Only what has been written: what lies beyond the last token is an earlier owner's.
      const int64_t written = std::min(kTileTokens, tiles.num_tokens - i * kTileTokens);
      multiply_add<Tile, Q, V>(acc, operands, 0, values, cache.padded_head_dim() * Tile::kStep,
                               divide_up(written, Tile::kStep));
    }
#pragma GCC unroll 6
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v)
        acc[q][v].store(state.part + (query + q) * cache.padded_head_dim() + (vector + v) * 16);
  }
};

// Q queries from `query` on: vectors in strides of kVectors, then one by one.
template <class Product, class Tile, int Q>
void multiply_queries(ItemState<Tile>& state, int64_t query, const KVCache& cache, int64_t kv_head,
                      const SplitTiles& tiles) {
  const int64_t count = Product::num_vectors(cache, tiles);
  int64_t i = 0;
  for (; i + kVectors <= count; i += kVectors)
    Product::template multiply<Tile, Q, kVectors>(state, query, cache, kv_head, tiles, i);
  for (; i < count; ++i) Product::template multiply<Tile, Q, 1>(state, query, cache, kv_head, tiles, i);
}

// All queries of the item, kQueries at a time.
template <class Product, class Tile, size_t... Q>
void multiply_all(ItemState<Tile>& state, const KVCache& cache, int64_t kv_head, const SplitTiles& tiles,
                  std::index_sequence<Q...>) {
  using Function = void (*)(ItemState<Tile>&, int64_t, const KVCache&, int64_t, const SplitTiles&);
  static constexpr Function table[] = {multiply_queries<Product, Tile, Q + 1>...};
  for (int64_t q = 0; q < state.num_queries; q += kQueries)
    table[std::min<int64_t>(kQueries, state.num_queries - q) - 1](state, q, cache, kv_head, tiles);
}

// Query q sees the first `visible` tokens of the split: its probabilities, their maximum score and their sum. The sum
// takes the unrounded probabilities, sixteen lanes side by side.
template <class Tile>
void softmax(ItemState<Tile>& state, int64_t q, int64_t visible, int64_t num_tokens, float scale) {
  float* scores = state.scores + q * kSplitTokens;
  Vec highest = Vec::set1(kMinusInfinity);
  for (int64_t t = 0; t < visible; t += 16) {
    const int n = static_cast<int>(std::min<int64_t>(16, visible - t));
    const Vec s = first(Vec::load(scores + t) * Vec::set1(scale), n, kMinusInfinity);
    s.store(scores + t);
    highest = max(highest, s);
  }
  const float maximum = largest(highest);
  Vec total = Vec::zero();
  for (int64_t t = 0; t < num_tokens; t += 16) {
    const int n = static_cast<int>(std::clamp<int64_t>(visible - t, 0, 16));
    const Vec p = n ? first(exp(Vec::load(scores + t) - Vec::set1(maximum)), n, 0.0f) : Vec::zero();
    total = total + p;
    const int64_t steps = t / Tile::kStep;
    Tile::store_operands(state.probabilities + steps / kBlockSteps * state.num_queries * kBlockSteps + q * kBlockSteps +
                             steps % kBlockSteps,
                         p);
  }
  state.part_max[q] = maximum;
  state.part_sum[q] = sum(total);
}

// Adds a later split's result to the running one: both are scaled to the larger maximum.
void merge(float* output, float* maximum, float* total, const float* part, float part_max, float part_sum,
           int64_t width) {
  const float highest = *maximum > part_max ? *maximum : part_max;
  const Vec keep = exp(Vec::set1(*maximum - highest)), take = exp(Vec::set1(part_max - highest));
  for (int64_t d = 0; d < width; d += 16)
    fma(Vec::load(part + d), take, Vec::load(output + d) * keep).store(output + d);
  float factor[2][16];
  keep.store(factor[0]);
  take.store(factor[1]);
  *total = *total * factor[0][0] + part_sum * factor[1][0];
  *maximum = highest;
}

void write_output(const float* output, float total, int64_t head_dim, float* out) {
  const Vec scale = Vec::set1(1.0f / total);
  for (int64_t d = 0; d < head_dim; d += 16)
    (Vec::load(output + d) * scale).store(out + d, static_cast<int>(std::min<int64_t>(16, head_dim - d)));
}

template <class Tile>
class ItemKernel {
 public:
  ItemKernel(View q, const KVCache& cache, const Step& step, const AttentionPlan& plan, float scale, View out)
      : q_(q),
        cache_(cache),
        step_(step),
        plan_(plan),
        scale_(scale),
        out_(out),
        group_(q.columns / cache.head_dim() / cache.num_kv_heads()) {}

  void run(const AttentionPlan::Item& item) {
    const int64_t padded = cache_.padded_head_dim(), dim = cache_.head_dim();
    ItemState<Tile> state(item.num_rows * item.num_heads, dim, padded);
    pack_queries(item, state);
    const int64_t row_in_request = item.first_row - step_.query_start[item.request];
    const int64_t first_position = step_.seq_lens[item.request] -
                                   (step_.query_start[item.request + 1] - step_.query_start[item.request]) +
                                   row_in_request;
    for (int64_t split = item.first_split; split < item.last_split; ++split) {
      const int64_t begin = split * kSplitTokens;
      const int64_t num_tokens = std::min(kSplitTokens, first_position + item.num_rows - begin);
      const SplitTiles tiles = find_tiles(step_, cache_, item.request, begin, num_tokens);
      constexpr auto heights = std::make_index_sequence<kQueries>();
      multiply_all<Scores>(state, cache_, item.kv_head, tiles, heights);
      for (int64_t query = 0; query < state.num_queries; ++query) {
        const int64_t visible = first_position + query / item.num_heads + 1 - begin;
        softmax(state, query, std::clamp<int64_t>(visible, 0, num_tokens), num_tokens, scale_);
      }
      multiply_all<WeighedValues>(state, cache_, item.kv_head, tiles, heights);
      for (int64_t query = 0; query < state.num_queries; ++query)
        if (first_position + query / item.num_heads >= begin) take_split(state, query, split == item.first_split);
    }
    finish(item, state);
  }

 private:
  void pack_queries(const AttentionPlan::Item& item, ItemState<Tile>& state) {
    struct RowsScratch;
    const int64_t dim = cache_.head_dim();
    float* rows = scratch<RowsScratch, float>(kMaxQueries * dim);
    for (int64_t query = 0; query < state.num_queries; ++query)
      std::memcpy(rows + query * dim, q_.row(item.first_row + query / item.num_heads) + column(item, query),
                  dim * sizeof(float));
    pack_rows<Tile>(rows, dim, state.num_queries, dim, state.queries);
  }

  // Where in a row of q (and of the output) the head of a query stands.
  int64_t column(const AttentionPlan::Item& item, int64_t query) const {
    return (item.kv_head * group_ + item.first_head + query % item.num_heads) * cache_.head_dim();
  }

  void take_split(ItemState<Tile>& state, int64_t query, bool is_first) {
    const int64_t padded = cache_.padded_head_dim();
    float *output = state.output + query * padded, *part = state.part + query * padded;
    if (is_first) {
      std::memcpy(output, part, padded * sizeof(float));
      state.maximum[query] = state.part_max[query];
      state.sum[query] = state.part_sum[query];
    } else {
      merge(output, &state.maximum[query], &state.sum[query], part, state.part_max[query], state.part_sum[query],
            padded);
    }
  }

  void finish(const AttentionPlan::Item& item, ItemState<Tile>& state) {
    const int64_t padded = cache_.padded_head_dim();
    for (int64_t query = 0; query < state.num_queries; ++query) {
      const float* output = state.output + query * padded;
      if (item.partial < 0) {
        write_output(output, state.sum[query], cache_.head_dim(),
                     out_.row(item.first_row + query / item.num_heads) + column(item, query));
      } else {
        float* to = plan_.partials() + (item.partial * kMaxQueries + query) * plan_.partial_width();
        std::memcpy(to, output, padded * sizeof(float));
        to[padded] = state.maximum[query];
        to[padded + 1] = state.sum[query];
      }
    }
  }

 public:
  // Merges the partial results of one group of items, left to right.
  void merge_group(int64_t begin, int64_t end) {
    const auto& item = plan_.items()[begin];
    const int64_t padded = cache_.padded_head_dim(), width = plan_.partial_width();
    for (int64_t query = 0; query < item.num_rows * item.num_heads; ++query) {
      const auto partial = [&](int64_t i) {
        return plan_.partials() + (plan_.items()[i].partial * kMaxQueries + query) * width;
      };
      float* first = partial(begin);
      for (int64_t i = begin + 1; i < end; ++i)
        merge(first, first + padded, first + padded + 1, partial(i), partial(i)[padded], partial(i)[padded + 1],
              padded);
      write_output(first, first[padded + 1], cache_.head_dim(),
                   out_.row(item.first_row + query / item.num_heads) + column(item, query));
    }
  }

 private:
  View q_;
  const KVCache& cache_;
  const Step& step_;
  const AttentionPlan& plan_;
  float scale_;
  View out_;
  int64_t group_;
};

template <class Tile>
void attend(View q, const KVCache& cache, const Step& step, const AttentionPlan& plan, float scale, View out,
            ThreadPool& pool, Worker worker) {
  ItemKernel<Tile> kernel(q, cache, step, plan, scale, out);
  const auto mine = plan.items_of(worker.index);
  for (int64_t i = mine.begin; i < mine.end; ++i) kernel.run(plan.items()[i]);
  if (plan.num_partials() == 0) return;
  pool.barrier();
  const auto& groups = plan.merge_groups();
  const auto my_groups = worker.share(static_cast<int64_t>(groups.size()) - 1);
  for (int64_t g = my_groups.begin; g < my_groups.end; ++g) kernel.merge_group(groups[g], groups[g + 1]);
}

}  // namespace

void write_kv(View k, View v, const int32_t* slot_mapping, const KVCache& cache, Worker worker) {
  if (cache.dtype() == DType::kBFloat16)
    write_rows<bf16>(k, v, slot_mapping, cache, worker);
  else
    write_rows<float>(k, v, slot_mapping, cache, worker);
}

void attention(View q, const KVCache& cache, const Step& step, const AttentionPlan& plan, float scale, View out,
               ThreadPool& pool, Worker worker) {
  if (cache.dtype() == DType::kBFloat16)
    attend<BFloat16Tile>(q, cache, step, plan, scale, out, pool, worker);
  else
    attend<Float32Tile>(q, cache, step, plan, scale, out, pool, worker);
}

}  // namespace octavo
