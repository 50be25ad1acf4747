#include <algorithm>
#include <numeric>

#include "octavo/attention.h"

namespace octavo {

void AttentionPlan::build(const Step& step, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                          int num_workers) {
  items_.clear();
  costs_.clear();
  merge_groups_.assign(1, 0);
  num_partials_ = 0;
  const int64_t heads_at_once = std::min(num_heads / num_kv_heads, kMaxQueries);
  partial_size_ = heads_at_once * round_up(head_dim, 16) + 2 * round_up(heads_at_once, 16);
  // Single-token rows are cut into their splits only where there are too few of them to keep the workers evenly busy.
  const bool cut_splits = step.num_requests * num_kv_heads < 8 * num_workers && num_workers > 1;
  // Cut requests first, so that their items are a prefix that merge_groups_ can index.
  for (const bool cut : {true, false}) {
    for (int64_t r = 0; r < step.num_requests; ++r) {
      const bool one_row = step.query_start[r + 1] - step.query_start[r] == 1;
      const bool cut_this = cut_splits && one_row && step.seq_lens[r] > kSplitTokens;
      if (cut_this == cut) add_request(step, r, num_heads / num_kv_heads, num_kv_heads, cut);
    }
  }
  const size_t needed = static_cast<size_t>(num_partials_ * partial_size_) * sizeof(float);
  if (partials_.bytes() < needed) partials_ = Memory(needed);
  share_out(num_workers);
}

void AttentionPlan::add_request(const Step& step, int64_t request, int64_t group, int64_t num_kv_heads,
                                bool cut_splits) {
  const int64_t begin = step.query_start[request], end = step.query_start[request + 1];
  const int64_t first_position = step.seq_lens[request] - (end - begin);
  const int64_t heads_at_once = std::min(group, kMaxQueries), rows_at_once = kMaxQueries / heads_at_once;
  for (int64_t row = begin; row < end; row += rows_at_once) {
    const int64_t rows = std::min(rows_at_once, end - row);
    const int64_t num_tokens = first_position + row - begin + rows;  // what its last row attends to
    const int64_t num_splits = divide_up(num_tokens, kSplitTokens);
    for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
      for (int64_t head = 0; head < group; head += heads_at_once) {
        const int64_t heads = std::min(heads_at_once, group - head);
        for (int64_t split = 0; split < num_splits; split += cut_splits ? 1 : num_splits) {
          const int64_t last = cut_splits ? split + 1 : num_splits;
          items_.push_back({static_cast<int32_t>(request), static_cast<int32_t>(kv_head), static_cast<int32_t>(row),
                            static_cast<int32_t>(rows), static_cast<int32_t>(head), static_cast<int32_t>(heads),
                            static_cast<int32_t>(split), static_cast<int32_t>(last),
                            cut_splits ? static_cast<int32_t>(num_partials_++) : -1});
          const int64_t tokens = std::min(num_tokens, last * kSplitTokens) - split * kSplitTokens;
          costs_.push_back(tokens * (rows * heads + 3));  // 3: reading a key and a value costs about as much
        }
        if (cut_splits) merge_groups_.push_back(static_cast<int64_t>(items_.size()));
      }
    }
  }
}

// Cuts the list into one contiguous range for each worker, of nearly equal cost.
void AttentionPlan::share_out(int num_workers) {
  const int64_t total = std::accumulate(costs_.begin(), costs_.end(), int64_t{0});
  bounds_.assign(1, 0);
  int64_t done = 0;
  size_t item = 0;
  for (int worker = 1; worker <= num_workers; ++worker) {
    const int64_t target = total * worker / num_workers;
    while (item < costs_.size() && (worker == num_workers || done + costs_[item] / 2 < target)) done += costs_[item++];
    bounds_.push_back(static_cast<int64_t>(item));
  }
}

}  // namespace octavo
