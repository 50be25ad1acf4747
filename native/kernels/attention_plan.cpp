#include <algorithm>

#include "octavo/attention.h"

namespace octavo {

constexpr int64_t kItemsPerWorker = 2, kMinQueries = 32;

void AttentionPlan::build(const Step& step, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                          int num_workers) {
  items_.clear();
  start_queues(num_workers);
  merge_groups_.assign(1, 0);
  num_partials_ = 0;
  const int64_t heads_at_once = std::min(num_heads / num_kv_heads, kMaxQueries);
  partial_size_ = heads_at_once * round_up(head_dim, 16) + 2 * round_up(heads_at_once, 16);

  int64_t total = 0, chunk_rows = 0;  // tokens of the cache that decoding rows read; rows of chunks
  for (int64_t r = 0; r < step.num_requests; ++r)
    if (num_rows(step, r) == 1)
      total += step.seq_lens[r];
    else
      chunk_rows += num_rows(step, r);
  // Large items read the cache less often; there must be enough of them for all workers to finish together.
  rows_at_once_ = std::clamp(divide_up(chunk_rows * num_heads / heads_at_once, kItemsPerWorker * num_workers),
                             std::min(kMinQueries, kMaxQueries) / heads_at_once, kMaxQueries / heads_at_once);
  const auto way_of = [&](int64_t r) {
    if (num_rows(step, r) > 1) return Way::kChunk;
    const int64_t tokens = step.seq_lens[r];
    // An item of this length would leave the other workers idle at the end.
    const bool is_long = num_workers > 1 && tokens > kSplitTokens && 8 * num_workers * tokens > total * num_kv_heads;
    return is_long ? Way::kCut : Way::kRow;
  };
  const int64_t group = num_heads / num_kv_heads;
  // Cut requests first, so that their items are a prefix that merge_groups_ can index; the small items last.
  for (const Way way : {Way::kCut, Way::kChunk})
    for (int64_t r = 0; r < step.num_requests; ++r)
      if (way_of(r) == way) add_request(step, r, group, num_kv_heads, way);
  close_queue(0);
  int64_t r = 0;
  for (int worker = 0; worker < num_workers; close_queue(++worker)) {
    const int64_t end = Worker{worker, num_workers}.share(step.num_tokens).end;
    for (; r < step.num_requests && step.query_start[r] < end; ++r)
      if (way_of(r) == Way::kRow) add_request(step, r, group, num_kv_heads, Way::kRow);
  }

  const size_t needed = static_cast<size_t>(num_partials_ * partial_size_) * sizeof(float);
  if (partials_.bytes() < needed) partials_ = Memory(needed);
}

void AttentionPlan::add_request(const Step& step, int64_t request, int64_t group, int64_t num_kv_heads, Way way) {
  const int64_t begin = step.query_start[request], end = step.query_start[request + 1];
  const int64_t first_position = step.seq_lens[request] - (end - begin);
  const int64_t heads_at_once = std::min(group, kMaxQueries), rows_at_once = rows_at_once_;
  // The last rows, which see most, first.
  for (int64_t row = begin + (end - begin - 1) / rows_at_once * rows_at_once; row >= begin; row -= rows_at_once) {
    const int64_t rows = std::min(rows_at_once, end - row);
    const int64_t num_tokens = first_position + row - begin + rows;  // what its last row attends to
    const int64_t num_splits = divide_up(num_tokens, kSplitTokens);
    // The kv heads of a decoding row lie side by side in memory, so they come one after the other.
    for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
      for (int64_t head = 0; head < group; head += heads_at_once) {
        const int64_t heads = std::min(heads_at_once, group - head);
        for (int64_t split = 0; split < num_splits; split += way == Way::kCut ? 1 : num_splits) {
          items_.push_back({static_cast<int32_t>(request), static_cast<int32_t>(kv_head), static_cast<int32_t>(row),
                            static_cast<int32_t>(rows), static_cast<int32_t>(head), static_cast<int32_t>(heads),
                            static_cast<int32_t>(split),
                            static_cast<int32_t>(way == Way::kCut ? split + 1 : num_splits),
                            way == Way::kCut ? static_cast<int32_t>(num_partials_++) : -1});
        }
        if (way == Way::kCut) merge_groups_.push_back(static_cast<int64_t>(items_.size()));
      }
    }
  }
}

void AttentionPlan::start_queues(int num_workers) {
  if (rounds_.size() != static_cast<size_t>(num_workers)) {
    rounds_.resize(num_workers);
    queues_ = std::vector<Queue>(num_workers + 1);
  }
  for (Round& round : rounds_) round.number = 1;
  for (Queue& queue : queues_) queue.taken = 0;
}

void AttentionPlan::close_queue(int64_t queue) {
  queues_[queue].begin = queue == 0 ? 0 : queues_[queue - 1].end;
  queues_[queue].end = static_cast<int64_t>(items_.size());
}

int64_t AttentionPlan::Queue::take(uint32_t round) {
  uint64_t seen = taken.load(std::memory_order_relaxed);
  while (true) {
    const uint64_t next = seen >> 32 == round ? seen & UINT32_MAX : 0;
    const int64_t item = begin + static_cast<int64_t>(next);
    if (item >= end) return -1;
    if (taken.compare_exchange_weak(seen, uint64_t{round} << 32 | (next + 1), std::memory_order_relaxed)) return item;
  }
}

const AttentionPlan::Item* AttentionPlan::claim(int worker) {
  const auto num_workers = static_cast<int>(rounds_.size());
  uint32_t& round = rounds_[worker].number;
  for (int i = 0; i <= num_workers; ++i) {
    // What is for all, then one's own rows, then those of others.
    const int64_t item = queues_[i == 0 ? 0 : 1 + (worker + i - 1) % num_workers].take(round);
    if (item >= 0) return &items_[item];
  }
  ++round;
  return nullptr;
}

}  // namespace octavo
