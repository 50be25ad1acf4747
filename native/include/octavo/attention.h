// The paged KV cache of one layer, and attention over it. A tile is sixteen tokens: one vector of scores.
//
//   [tile][kv_head]{
//     keys    [key_dims / kStep][16][kStep]    key_dims: head_dim in whole blocks of 16 steps
//     values  [16 / kStep][value_dims][kStep]  value_dims: head_dim in whole vectors of 16
//   }
//
// Side by side, since a stream over scattered pieces is the faster the longer they are. kStep is 2 in bfloat16 (a pair
// product takes two dimensions, or two tokens, at once) and 1 in float32. A block of block_size tokens is block_size /
// 16 tiles side by side, so that slot / 16 is the tile of a slot. In int8, vectors of 16 codes stand where the products
// will read pairs of them:
//
//   keys    { [key_dims][16], 16 scales }
//   values  { [8][value_dims / 16][2][16], 16 scales }
//
// Whoever owns a block writes its tokens in ascending order. Writing a tile's first token makes zeros of all values of
// the tile that are not written in the same step, so that a probability of zero never meets an earlier owner's NaN.
#pragma once

#include <atomic>
#include <vector>

#include "octavo/memory.h"
#include "octavo/thread_pool.h"
#include "octavo/types.h"

namespace octavo {

class KVCache {
 public:
  static constexpr int64_t kTileTokens = 16;

  KVCache(int64_t num_blocks, int64_t block_size, int64_t num_kv_heads, int64_t head_dim, DType dtype);

  DType dtype() const { return dtype_; }
  int64_t num_blocks() const { return num_blocks_; }
  int64_t num_kv_heads() const { return num_kv_heads_; }
  int64_t head_dim() const { return head_dim_; }
  int64_t block_size() const { return block_size_; }
  int64_t key_dims() const { return round_up(head_dim_, dtype_ == DType::kFloat32 ? 16 : 32); }
  int64_t value_dims() const { return round_up(head_dim_, 16); }
  // Of one tile of one head, with its scales.
  int64_t key_tile_bytes() const { return key_bytes_; }
  int64_t value_tile_bytes() const { return value_bytes_; }
  int64_t tile_bytes() const { return key_bytes_ + value_bytes_; }
  int64_t block_bytes() const { return tiles_of_block() * num_kv_heads_ * tile_bytes(); }

  // The first num_tokens tokens of a block into another one, or into the same; values behind them become zero.
  void copy_block(int64_t from, int64_t to, int64_t num_tokens) const;
  // A whole block to or from block_bytes() bytes elsewhere.
  void save_block(int64_t block, uint8_t* out) const;
  void load_block(int64_t block, const uint8_t* bytes) const;

  // T: float, bf16 or int8_t, as dtype() says.
  template <class T>
  T* keys(int64_t tile, int64_t head) const {
    return reinterpret_cast<T*>(tiles_.as<char>() + (tile * num_kv_heads_ + head) * tile_bytes());
  }
  template <class T>
  T* values(int64_t tile, int64_t head) const {
    return reinterpret_cast<T*>(keys<char>(tile, head) + key_bytes_);
  }
  // In int8: a code times the scale of its token is the value. [16]
  float* key_scales(int64_t tile, int64_t head) const {
    return reinterpret_cast<float*>(keys<int8_t>(tile, head) + key_dims() * kTileTokens);
  }
  float* value_scales(int64_t tile, int64_t head) const {
    return reinterpret_cast<float*>(values<int8_t>(tile, head) + value_dims() * kTileTokens);
  }

 private:
  int64_t tiles_of_block() const { return block_size_ / kTileTokens; }

  int64_t num_blocks_, block_size_, num_kv_heads_, head_dim_;
  DType dtype_;
  int64_t key_bytes_, value_bytes_;  // of a tile
  Memory tiles_;
};

// The integers of one step (see Batch in ops/api.py).
struct Step {
  int64_t num_tokens, num_requests, num_logits;
  const int32_t *token_ids, *positions, *slot_mapping;
  const int32_t *query_start, *seq_lens;
  const int32_t* block_tables;  // [num_requests][block_table_stride]
  int64_t block_table_stride;
  const int32_t* logit_rows;
};

// The parts of the attention of a step; the same for all layers. An item is a few query rows of one request, the query
// heads of one kv head, and a range of 256-token splits. Long contexts of a few decoding requests are cut into items of
// one split each, whose partial results are merged afterwards; all else merges as it goes. Both ways merge the same
// splits in the same order, left to right.
//
// Workers claim items as they get done with others, so that all finish together whatever a row costs on this machine.
// Who computes an item leaves no trace in it.
class AttentionPlan {
 public:
  static constexpr int64_t kSplitTokens = 256;
  // Query vectors of an item.
#ifdef __AMX_BF16__
  static constexpr int64_t kMaxQueries = 32;  // two tiles high
#else
  static constexpr int64_t kMaxQueries = 12;  // their scores of a split fit L1
#endif

  struct Item {
    int32_t request, kv_head;
    int32_t first_row, num_rows;    // token rows
    int32_t first_head, num_heads;  // query heads, within the group of kv_head
    int32_t first_split, last_split;
    int32_t partial;  // where this item's (one split's) partial results go; -1: it covers all splits

    int64_t num_queries() const { return int64_t{num_rows} * num_heads; }
  };

  void build(const Step& step, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int num_workers);

  const std::vector<Item>& items() const { return items_; }
  // Items that `worker` is to run next; an empty range when all are taken. Each worker calls this until it gets that,
  // and the workers meet before one of them claims again (for the next layer).
  Worker::Range claim(int worker);
  int64_t num_partials() const { return num_partials_; }
  // Items with partials, grouped: group g is items [merge_groups[g], merge_groups[g + 1]), one for each split.
  const std::vector<int64_t>& merge_groups() const { return merge_groups_; }
  // The result of an item with a partial: outputs, maxima and sums (Result in kernels/attention_split.h).
  float* partial(const Item& item) const { return partials_.as<float>() + item.partial * partial_size_; }

 private:
  // How a request is computed: rows of a chunk together; one row as a whole; one row cut into its splits.
  enum class Way { kChunk, kRow, kCut };

  // Hands out the numbers 0, 1, 2 … once in each round.
  class Tickets {
   public:
    void start(int num_workers);
    int64_t take(int worker, int64_t count);  // below `count`; -1: none are left in this round

   private:
    struct alignas(64) Round {
      int64_t first = 0;  // where this worker's round began
    };
    alignas(64) std::atomic<int64_t> next_{0};
    std::vector<Round> rounds_;
  };

  static int64_t num_rows(const Step& step, int64_t request) {
    return step.query_start[request + 1] - step.query_start[request];
  }
  void add_request(const Step& step, int64_t request, int64_t group, int64_t num_kv_heads, Way way);

  std::vector<Item> items_;
  std::vector<int64_t> claims_;  // claim c is items [claims_[c], claims_[c + 1])
  std::vector<int64_t> merge_groups_;
  Tickets tickets_;
  int64_t num_partials_ = 0, partial_size_ = 0;
  Memory partials_;
};

void write_kv(View k, View v, const int32_t* slot_mapping, const KVCache& cache, Worker worker);

// All workers of `pool` must call it together (it may hold a barrier).
void attention(View q, const KVCache& cache, const Step& step, AttentionPlan& plan, float scale, View out,
               ThreadPool& pool, Worker worker);

}  // namespace octavo
