// The sampler: logits in; for each row one token out, with logprobs where they are asked for.
//
// One fixed pipeline for a row, of which a step that is off costs nothing:
//   1 allowed ids   2 bans   3 logit bias   4 penalties   5 temperature   6 min_p, top_k, top_p   7 the draw
// A row's outcome depends on its logits and settings alone. Knows no requests and no text.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "octavo/thread_pool.h"
#include "octavo/types.h"

namespace octavo {

// What logprobs are of: the model's logits, or those that the token was drawn from; normalised or as they are.
enum class LogprobsMode { kRawLogprobs, kProcessedLogprobs, kRawLogits, kProcessedLogits };

// One request's settings. The defaults switch everything off: greedy.
struct SamplerRow {
  int32_t num_vocab_tokens = std::numeric_limits<int32_t>::max();  // ids from here on have no token
  std::vector<int32_t> allowed_token_ids;                          // empty: all
  std::vector<int32_t> banned_words, banned_ends;
  std::vector<int32_t> bias_token_ids;
  std::vector<float> bias_values;  // added to the logits of bias_token_ids
  float repetition_penalty = 1, frequency_penalty = 0, presence_penalty = 0;
  std::vector<int32_t> history;  // prompt, then output; read by the penalties
  int64_t num_prompt_tokens = 0;
  float temperature = 0;  // 0: greedy
  int32_t top_k = 0;      // 0: off
  double top_p = 1;
  float min_p = 0;
  uint64_t seed = 0;
  uint32_t sample_index = 0, position = 0;  // position: number of output tokens so far
  int32_t num_logprobs = -1;                // -1: none; above the vocabulary: all
  LogprobsMode logprobs_mode = LogprobsMode::kRawLogprobs;

  bool penalised() const { return repetition_penalty != 1 || frequency_penalty != 0 || presence_penalty != 0; }
  bool edited() const {
    return penalised() || !allowed_token_ids.empty() || !banned_words.empty() || !banned_ends.empty() ||
           !bias_token_ids.empty();
  }
};

// Entry 0 is the token itself, then the most likely ones in order. `rank` is the token's place in that order, from 1.
struct TokenLogprobs {
  std::vector<int32_t> token_ids;
  std::vector<float> logprobs;
  int32_t rank = 0;
};

struct SampledRow {
  int32_t token_id = -1;
  std::optional<TokenLogprobs> logprobs;
  std::optional<std::string> error;  // why the row has no token
};

// rows[i] samples from row i of `logits`, which may be overwritten, into results[i]. The threads share the rows.
// `panel_maxima`: of each row, what RowScan::read says; without data where they are not known.
void sample(ThreadPool& pool, View logits, const SamplerRow* const* rows, SampledRow* results, View panel_maxima = {});

// What row i of `logits`, as the model gave it, says of token_ids[i] (below num_vocab_tokens). Not `normalised`: the
// logits themselves.
std::vector<SampledRow> token_logprobs(ThreadPool& pool, View logits, const std::vector<int32_t>& token_ids,
                                       int32_t num_logprobs, int32_t num_vocab_tokens, bool normalised);

}  // namespace octavo
