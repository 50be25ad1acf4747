// Attention over the paged KV cache, and the writing of its rows.
#pragma once

#include <atomic>
#include <vector>

#include "octavo/kv_cache.h"
#include "octavo/memory.h"
#include "octavo/thread_pool.h"
#include "octavo/types.h"

namespace octavo {

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
// A decoding row is first offered to the worker that has just written its keys and values, in whose caches a part of
// what it attends to lies. Who computes an item leaves no trace in it.
class AttentionPlan {
 public:
  static constexpr int64_t kSplitTokens = 256;
  // Query vectors of an item.
#ifdef __AMX_BF16__
  static constexpr int64_t kMaxQueries = 192;  // twelve tiles high
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
  // The item that `worker` is to run next; null when all are taken. Each worker calls this until it gets that, and the
  // workers meet before one of them claims again (for the next layer).
  const Item* claim(int worker);
  int64_t num_partials() const { return num_partials_; }
  // Items with partials, grouped: group g is items [merge_groups[g], merge_groups[g + 1]), one for each split.
  const std::vector<int64_t>& merge_groups() const { return merge_groups_; }
  // The result of an item with a partial: outputs, maxima and sums (Result in kernels/attention_split.h).
  float* partial(const Item& item) const { return partials_.as<float>() + item.partial * partial_size_; }

 private:
  // How a request is computed: rows of a chunk together; one row as a whole; one row cut into its splits.
  enum class Way { kChunk, kRow, kCut };

  // Items [begin, end), each taken once in each round. A queue's round begins with the first that is taken in it.
  struct alignas(64) Queue {
    std::atomic<uint64_t> taken{0};  // the round, and in the lower half how many items are taken in it
    int64_t begin = 0, end = 0;

    int64_t take(uint32_t round);  // -1: none are left
  };
  struct alignas(64) Round {
    uint32_t number = 1;
  };

  static int64_t num_rows(const Step& step, int64_t request) {
    return step.query_start[request + 1] - step.query_start[request];
  }
  void start_queues(int num_workers);
  void close_queue(int64_t queue);  // it has the items since the one before
  void add_request(const Step& step, int64_t request, int64_t group, int64_t num_kv_heads, Way way);

  std::vector<Item> items_;
  std::vector<int64_t> merge_groups_;
  int64_t rows_at_once_ = 1;   // of a chunk, in an item
  std::vector<Queue> queues_;  // what is for all workers, then the decoding rows of each
  std::vector<Round> rounds_;  // of each worker
  int64_t num_partials_ = 0, partial_size_ = 0;
  Memory partials_;
};

// Rows `mine` of k and v, which are those of the whole step.
void write_kv(View k, View v, const int32_t* slot_mapping, const KVCache& cache, Worker::Range mine);

// All workers of `pool` must call it together (it may hold a barrier).
void attention(View q, const KVCache& cache, const Step& step, AttentionPlan& plan, float scale, View out,
               ThreadPool& pool, Worker worker);

}  // namespace octavo
