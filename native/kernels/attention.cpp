// Paged attention for any mix of chunk lengths. For each item of the plan and each 256-token split: scores (queries
// times keys), a softmax of the split, output (probabilities times values); then the splits are merged left to right.
#include "octavo/attention.h"

#include <cstring>

#include "kernels/attention_products.h"
#include "kernels/attention_split.h"
#include "tiles/unpack_int8.h"
#ifdef __AMX_BF16__
#include "kernels/attention_amx.h"
#endif

namespace octavo {
namespace {

constexpr float kLog2E = 1.44269504f;

// What the cache holds -> how it is multiplied.
template <class Stored>
struct StoredAs {
  using Tile = BFloat16Tile;
  using Scales = NoScales;
};
template <>
struct StoredAs<float> {
  using Tile = Float32Tile;
  using Scales = NoScales;
};
template <>
struct StoredAs<int8_t> {
  using Tile = BFloat16Tile;
  using Scales = SplitScales;
};

template <class Stored>
class ItemKernel {
  using Tile = typename StoredAs<Stored>::Tile;
  using Scales = typename StoredAs<Stored>::Scales;
  using Kernel = Products<Tile>;
  using Weight = typename Tile::Weight;

 public:
  // `scale` is positive.
  ItemKernel(View q, const KVCache& cache, const Step& step, const AttentionPlan& plan, float scale, View out)
      : q_(q),
        cache_(cache),
        step_(step),
        plan_(plan),
        scale_(scale * kLog2E),
        out_(out),
        group_(q.columns / cache.head_dim() / cache.num_kv_heads()) {}

  // `next`: the item that this worker runs after this one, if any.
  void run(const AttentionPlan::Item& item, const AttentionPlan::Item* next) {
    const typename Kernel::Session session(item.num_queries());
    ItemState<Tile> state(item.num_queries(), cache_);
    pack_queries(item, state);
    RowsAhead rows(*this, next, (item.last_split - item.first_split) * divide_up(state.num_queries, kScoreQueries));
    Split split = find_split(item, item.first_split);
    for (int64_t i = item.first_split; i < item.last_split; ++i) {
      const bool is_last = i + 1 == item.last_split;
      const AttentionPlan::Item* after = is_last ? next : &item;
      const Split next_split = after ? find_split(*after, is_last ? after->first_split : i + 1) : Split{};
      attend(item, i, split, after ? keys_ahead(next_split, *after) : TilesAhead{}, state, rows);
      split = next_split;
    }
    finish(item, state.result);
  }

  // Merges the partial results of one group of items, left to right.
  void merge_group(int64_t begin, int64_t end) {
    const auto& item = plan_.items()[begin];
    const Result first = partial(item);
    for (int64_t i = begin + 1; i < end; ++i)
      merge(first, partial(plan_.items()[i]), 0, item.num_queries(), cache_.value_dims());
    write_output(item, first);
  }

 private:
  // The rows of q and of the output that the next item will read and write, fetched in equal shares during this one.
  class RowsAhead {
   public:
    RowsAhead(const ItemKernel& kernel, const AttentionPlan::Item* next, int64_t num_shares) : kernel_(kernel) {
      if (!next) return;
      item_ = next;
      lines_ = divide_up(next->num_heads * kernel.cache_.head_dim(), 16);
      share_ = divide_up(next->num_rows * lines_, num_shares);
    }
    void fetch_share() {
      if (!item_) return;
      const int64_t end = std::min(done_ + share_, item_->num_rows * lines_), column = kernel_.first_column(*item_);
      for (; done_ < end; ++done_) {
        const int64_t row = item_->first_row + done_ / lines_, at = column + done_ % lines_ * 16;
        __builtin_prefetch(kernel_.q_.row(row) + at, 0, 2);
        __builtin_prefetch(kernel_.out_.row(row) + at, 1, 2);
      }
    }

   private:
    const ItemKernel& kernel_;
    const AttentionPlan::Item* item_ = nullptr;
    int64_t lines_ = 0, share_ = 0, done_ = 0;
  };

  // Split `i` of an item, and the keys of the next.
  void attend(const AttentionPlan::Item& item, int64_t i, const Split& split, const TilesAhead& ahead,
              ItemState<Tile>& state, RowsAhead& rows) const {
    const Scales scales(cache_, split, item.kv_head);
    const SplitTiles<Weight> keys = find_keys(split, item);
    typename Kernel::Values values([&] { return find_values(split, item, ahead); }, cache_, state.num_queries);
    const int64_t dims = cache_.value_dims();
    for (int64_t begin = 0; begin < state.num_queries; begin += kScoreQueries) {
      const Sight sight{begin, std::min(begin + kScoreQueries, state.num_queries), position(item) - i * kSplitTokens,
                        item.num_heads, split.num_tokens};
      rows.fetch_share();
      // Rows that come before the split see nothing of it.
      if (sight.first() >= sight.end) continue;
      const Result merged = state.result.from(begin, dims);
      if (i == item.first_split) {
        Kernel::attend(state, sight, keys, values, scales, scale_, cache_, merged);
      } else {
        Kernel::attend(state, sight, keys, values, scales, scale_, cache_, state.part);
        merge(merged, state.part, sight.first() - begin, sight.end - begin, dims);
      }
    }
  }

  // The position of the item's first row in its request.
  int64_t position(const AttentionPlan::Item& item) const {
    return step_.seq_lens[item.request] - (step_.query_start[item.request + 1] - item.first_row);
  }

  Split find_split(const AttentionPlan::Item& item, int64_t i) const {
    const int64_t begin = i * kSplitTokens;
    const int64_t num_tokens = std::min(kSplitTokens, position(item) + item.num_rows - begin);
    return octavo::find_split(step_, cache_, item.request, begin, num_tokens);
  }

  TilesAhead keys_ahead(const Split& split, const AttentionPlan::Item& item) const {
    return tiles_ahead(split, item, cache_.key_tile_bytes(),
                       [&](int64_t tile) { return cache_.keys<Stored>(tile, item.kv_head); });
  }
  TilesAhead values_ahead(const Split& split, const AttentionPlan::Item& item) const {
    return tiles_ahead(split, item, cache_.value_tile_bytes(),
                       [&](int64_t tile) { return cache_.values<Stored>(tile, item.kv_head); });
  }
  // Later rows of a chunk find everything in a cache.
  template <class At>
  TilesAhead tiles_ahead(const Split& split, const AttentionPlan::Item& item, int64_t tile_bytes, At at) const {
    TilesAhead ahead;
    if (item.num_rows > 1) return ahead;
    ahead.count = split.num_tiles();
    ahead.bytes = tile_bytes;
    for (int64_t i = 0; i < ahead.count; ++i) ahead.tiles[i] = reinterpret_cast<const char*>(at(split.tiles[i]));
    return ahead;
  }

  SplitTiles<Weight> find_keys(const Split& split, const AttentionPlan::Item& item) const {
    return unpack(find_tiles(split, values_ahead(split, item),
                             [&](int64_t tile) { return cache_.keys<Stored>(tile, item.kv_head); }),
                  cache_.key_dims());
  }
  auto find_values(const Split& split, const AttentionPlan::Item& item, const TilesAhead& ahead) const {
    const auto values =
        find_tiles(split, ahead, [&](int64_t tile) { return cache_.values<Stored>(tile, item.kv_head); });
    if constexpr (Kernel::kGathersValues)
      return values;
    else
      return unpack(values, cache_.value_dims());
  }

  template <class At>
  SplitTiles<Stored> find_tiles(const Split& split, const TilesAhead& ahead, At at) const {
    SplitTiles<Stored> tiles{{}, split.num_tiles(), ahead};
    for (int64_t i = 0; i < tiles.count; ++i) tiles.tiles[i] = at(split.tiles[i]);
    return tiles;
  }

  // Codes become what the products read, in scratch, which holds the keys of a split first and perhaps its values
  // later.
  static SplitTiles<Weight> unpack(const SplitTiles<Stored>& stored, int64_t dims) {
    if constexpr (std::is_same_v<Stored, Weight>) {
      return stored;
    } else {
      struct UnpackScratch;
      bf16* unpacked = scratch<UnpackScratch, bf16>(kSplitTokens * dims);
      SplitTiles<Weight> tiles{{}, stored.count, {}};
      for (int64_t i = 0; i < tiles.count; ++i) {
        const int8_t* codes = stored.tiles[i];
        tiles.tiles[i] = unpacked;
        for (int64_t line = 0; line < dims / 4; ++line, codes += 64, unpacked += 64) {
          stored.ahead.fetch_line(i, line);
          unpack_pairs(codes, unpacked);
          unpack_pairs(codes + 32, unpacked + 32);
        }
        stored.ahead.fetch_line(i, dims / 4);  // the scales
      }
      return tiles;
    }
  }

  void pack_queries(const AttentionPlan::Item& item, ItemState<Tile>& state) {
    auto* to = state.queries;
    for_each_query(item, [&](int64_t row, int64_t column) {
      pack_row<Tile>(q_.row(row) + column, cache_.head_dim(), state.num_queries, to);
      to += kBlockSteps;
    });
  }

  // Where in a row of q (and of the output) the first head of an item stands.
  int64_t first_column(const AttentionPlan::Item& item) const {
    return (item.kv_head * group_ + item.first_head) * cache_.head_dim();
  }
  // f(row, column) of q and of the output.
  template <class F>
  void for_each_query(const AttentionPlan::Item& item, F f) const {
    const int64_t begin = first_column(item), dim = cache_.head_dim();
    for (int64_t row = item.first_row; row < item.first_row + item.num_rows; ++row)
      for (int64_t head = 0; head < item.num_heads; ++head) f(row, begin + head * dim);
  }

  Result partial(const AttentionPlan::Item& item) const {
    return Result::at(plan_.partial(item), item.num_queries(), cache_.value_dims());
  }

  void finish(const AttentionPlan::Item& item, const Result& result) {
    if (item.partial < 0) return write_output(item, result);
    const int64_t num_queries = item.num_queries();
    const Result to = partial(item);
    std::memcpy(to.output, result.output, num_queries * cache_.value_dims() * sizeof(float));
    std::memcpy(to.maximum, result.maximum, num_queries * sizeof(float));
    std::memcpy(to.sum, result.sum, num_queries * sizeof(float));
  }

  void write_output(const AttentionPlan::Item& item, const Result& result) {
    const int64_t dim = cache_.head_dim();
    const float *from = result.output, *sum = result.sum;
    for_each_query(item, [&](int64_t row, int64_t column) {
      float* to = out_.row(row) + column;
      const Vec factor = Vec::set1(1.0f / *sum++);
      const int64_t whole = dim / 16 * 16;
      for (int64_t d = 0; d < whole; d += 16) (Vec::load(from + d) * factor).store(to + d);
      if (whole < dim) (Vec::load(from + whole) * factor).store(to + whole, static_cast<int>(dim - whole));
      from += cache_.value_dims();
    });
  }

  View q_;
  const KVCache& cache_;
  const Step& step_;
  const AttentionPlan& plan_;
  float scale_;
  View out_;
  int64_t group_;
};

template <class Stored>
void attend(View q, const KVCache& cache, const Step& step, AttentionPlan& plan, float scale, View out,
            ThreadPool& pool, Worker worker) {
  ItemKernel<Stored> kernel(q, cache, step, plan, scale, out);
  for (const AttentionPlan::Item* item = plan.claim(worker.index); item;) {
    const AttentionPlan::Item* next = plan.claim(worker.index);
    kernel.run(*item, next);
    item = next;
  }
  if (plan.num_partials() == 0) return;
  pool.barrier();
  const auto& groups = plan.merge_groups();
  const auto my_groups = worker.share(static_cast<int64_t>(groups.size()) - 1);
  for (int64_t g = my_groups.begin; g < my_groups.end; ++g) kernel.merge_group(groups[g], groups[g + 1]);
}

}  // namespace

void attention(View q, const KVCache& cache, const Step& step, AttentionPlan& plan, float scale, View out,
               ThreadPool& pool, Worker worker) {
  switch (cache.dtype()) {
    case DType::kFloat32:
      return attend<float>(q, cache, step, plan, scale, out, pool, worker);
    case DType::kBFloat16:
      return attend<bf16>(q, cache, step, plan, scale, out, pool, worker);
    case DType::kInt8:
      return attend<int8_t>(q, cache, step, plan, scale, out, pool, worker);
    case DType::kInt16:
      return;  // KVCache refuses it
  }
}

}  // namespace octavo
