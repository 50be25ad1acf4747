#include "kernels/sampler.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "kernels/logit_row.h"
#include "octavo/philox.h"

namespace octavo {
namespace {

// How many candidates top_p looks at first: they hold the mass of all but flat distributions.
constexpr int32_t kHead = 128;

constexpr char kNotFinite[] = "the model's logits are not finite";
constexpr char kNothingLeft[] =
    "no token is left to sample: allowed_token_ids, bad_words and min_tokens ban all of them";

// Buffers of one thread, kept from row to row.
struct Buffers {
  RowScan scan;
  std::vector<Candidate> candidates;
  std::vector<double> block_sums;
  std::vector<float> raw;           // [vocabulary]: the logits before edits, where logprobs want them
  std::vector<float> allowed;       // the logits of the allowed ids
  std::vector<int32_t> num_output;  // [vocabulary]: all zero between uses
};

bool has_token(int32_t id, int32_t size) { return id >= 0 && id < size; }

void keep_allowed(float* x, int32_t size, const std::vector<int32_t>& token_ids, std::vector<float>& allowed) {
  allowed.clear();
  for (const int32_t id : token_ids) allowed.push_back(has_token(id, size) ? x[id] : 0);
  std::fill(x, x + size, -kInfinity);
  for (size_t i = 0; i < token_ids.size(); ++i)
    if (has_token(token_ids[i], size)) x[token_ids[i]] = allowed[i];
}

void ban(float* x, int32_t size, const std::vector<int32_t>& token_ids) {
  for (const int32_t id : token_ids)
    if (has_token(id, size)) x[id] = -kInfinity;
}

void add_bias(float* x, int32_t size, const SamplerRow& row) {
  for (size_t i = 0; i < row.bias_token_ids.size(); ++i)
    if (has_token(row.bias_token_ids[i], size)) x[row.bias_token_ids[i]] += row.bias_values[i];
}

// Repetition (Keskar et al., CTRL, 2019) for every id of the history; frequency and presence (OpenAI's definition) for
// those of the output.
void penalise(float* x, int32_t size, const SamplerRow& row, std::vector<int32_t>& num_output) {
  constexpr int32_t kDone = -1;
  num_output.resize(size);
  for (size_t i = row.num_prompt_tokens; i < row.history.size(); ++i)
    if (has_token(row.history[i], size)) ++num_output[row.history[i]];
  for (const int32_t id : row.history) {
    if (!has_token(id, size) || num_output[id] == kDone) continue;
    x[id] = x[id] > 0 ? x[id] / row.repetition_penalty : x[id] * row.repetition_penalty;
    if (num_output[id] > 0) {
      x[id] -= row.frequency_penalty * static_cast<float>(num_output[id]);
      x[id] -= row.presence_penalty;
    }
    num_output[id] = kDone;
  }
  for (const int32_t id : row.history)
    if (has_token(id, size)) num_output[id] = 0;
}

void edit(float* x, int32_t size, const SamplerRow& row, Buffers& buffers) {
  if (!row.allowed_token_ids.empty()) keep_allowed(x, size, row.allowed_token_ids, buffers.allowed);
  ban(x, size, row.banned_words);
  ban(x, size, row.banned_ends);
  add_bias(x, size, row);
  if (row.penalised()) penalise(x, size, row, buffers.num_output);
}

double mass_of(const std::vector<Candidate>& candidates) {
  double mass = 0;
  for (const Candidate& c : candidates) mass += static_cast<double>(c.weight);
  return mass;
}

// Draws the token of a scanned row. Leaves in `softmax` the cutoff it drew with.
int32_t draw(const SamplerRow& row, Softmax& softmax, Buffers& buffers) {
  RowScan& scan = buffers.scan;
  std::vector<Candidate>& candidates = buffers.candidates;
  const bool has_top_k = row.top_k > 0 && row.top_k < scan.size();
  if (has_top_k) {
    scan.collect(scan.threshold(row.top_k), candidates);
    if (static_cast<int32_t>(candidates.size()) >= row.top_k) {
      const auto last = candidates.begin() + (row.top_k - 1);
      std::nth_element(candidates.begin(), last, candidates.end(), in_order);
      softmax.set_cutoff({last->value, last->id});
      candidates.erase(last + 1, candidates.end());
    }
  }
  double total = softmax.sum(buffers.block_sums);
  if (row.top_p < 1) {
    if (!has_top_k) scan.collect(scan.threshold(kHead), candidates);
    softmax.weigh(candidates);
    const double mass = row.top_p * total;
    const bool in_candidates = has_top_k || mass_of(candidates) >= mass;
    softmax.set_cutoff(in_candidates ? prefix_of_mass(candidates, mass) : softmax.cutoff_of_mass(mass, candidates));
    total = softmax.sum(buffers.block_sums);
  }
  return softmax.draw(uniform(row.seed, row.sample_index, row.position), total, buffers.block_sums);
}

// ln(sum of e^x) over a whole row, the ids without a token too: they are part of the model's distribution. NaN where
// the row is not finite.
double log_sum_exp(const float* x, int32_t size, std::vector<double>& block_sums) {
  RowScan scan;
  if (!scan.read(x, size)) return std::numeric_limits<double>::quiet_NaN();
  return static_cast<double>(scan.top()) + std::log(Softmax(scan, 1, 0).sum(block_sums));
}

// `buffers.scan` is of the row asked about; `normaliser` is subtracted from its logits.
TokenLogprobs logprobs_of(int32_t token_id, int32_t num_logprobs, double normaliser, Buffers& buffers) {
  RowScan& scan = buffers.scan;
  TokenLogprobs out;
  out.rank = scan.rank(token_id);
  const auto add = [&](int32_t id, float logit) {
    out.token_ids.push_back(id);
    out.logprobs.push_back(static_cast<float>(static_cast<double>(logit) - normaliser));
  };
  add(token_id, scan.data()[token_id]);
  if (num_logprobs == 0) return out;
  std::vector<Candidate>& candidates = buffers.candidates;
  scan.collect(scan.threshold(num_logprobs), candidates);
  const auto count = std::min<size_t>(num_logprobs, candidates.size());
  std::partial_sort(candidates.begin(), candidates.begin() + count, candidates.end(), in_order);
  for (size_t i = 0; i < count; ++i) add(candidates[i].id, candidates[i].value);
  return out;
}

// What the token was drawn from, in place: logits over temperature, -infinity where truncated away.
void write_processed(float* x, int32_t size, const SamplerRow& row, const Softmax& softmax) {
  float w[kBlock];
  const float scale = 1.0f / row.temperature;
  for (int32_t begin = 0; begin < size; begin += kBlock) {
    const int32_t count = std::min(kBlock, size - begin);
    softmax.weights(begin, count, w);
    for (int32_t j = 0; j < count; ++j) x[begin + j] = w[j] > 0 ? x[begin + j] * scale : -kInfinity;
  }
}

void sample_row(float* x, const float* panel_maxima, int32_t vocabulary, const SamplerRow& row, Buffers& buffers,
                SampledRow& out) {
  const LogprobsMode mode = row.logprobs_mode;
  const int32_t size = std::min(vocabulary, row.num_vocab_tokens);
  const bool wants_raw =
      row.num_logprobs >= 0 && (mode == LogprobsMode::kRawLogprobs || mode == LogprobsMode::kRawLogits);
  const bool wants_processed = row.num_logprobs >= 0 && !wants_raw;
  const bool normalised = mode == LogprobsMode::kRawLogprobs || mode == LogprobsMode::kProcessedLogprobs;
  RowScan& scan = buffers.scan;
  if (!scan.read(x, size, panel_maxima) || scan.top() == -kInfinity) {
    out.error = kNotFinite;
    return;
  }
  double normaliser = 0;
  if (wants_raw && normalised) normaliser = log_sum_exp(x, vocabulary, buffers.block_sums);
  if (!std::isfinite(normaliser)) {  // an id without a token spoils the distribution
    out.error = kNotFinite;
    return;
  }
  if (row.edited()) {
    if (wants_raw) buffers.raw.assign(x, x + size);
    edit(x, size, row, buffers);
    const bool finite = scan.read(x, size);
    if (!finite || scan.top() == -kInfinity) {
      out.error = finite ? kNothingLeft : kNotFinite;
      return;
    }
  }
  if (row.temperature == 0) {
    out.token_id = scan.argmax();
  } else {
    Softmax softmax(scan, row.temperature, row.min_p);
    out.token_id = draw(row, softmax, buffers);
    if (wants_processed) {
      write_processed(x, size, row, softmax);
      scan.read(x, size);
    }
  }
  if (row.num_logprobs < 0) return;
  if (wants_raw && row.edited()) scan.read(buffers.raw.data(), size);
  if (wants_processed && normalised) normaliser = log_sum_exp(x, size, buffers.block_sums);
  out.logprobs = logprobs_of(out.token_id, row.num_logprobs, normaliser, buffers);
}

// Calls f(i, buffers) for each of `count` rows, on all threads.
template <class F>
void for_rows(ThreadPool& pool, int64_t count, F&& f) {
  std::atomic<int64_t> next{0};
  auto work = [&](int) {
    Buffers buffers;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(i, buffers);
  };
  if (count > 1)
    pool.run(work);
  else
    work(0);
}

}  // namespace

void sample(ThreadPool& pool, View logits, const SamplerRow* const* rows, SampledRow* results, View panel_maxima) {
  for_rows(pool, logits.rows, [&](int64_t i, Buffers& buffers) {
    const float* maxima = panel_maxima.data == nullptr ? nullptr : panel_maxima.row(i);
    sample_row(logits.row(i), maxima, static_cast<int32_t>(logits.columns), *rows[i], buffers, results[i]);
  });
}

std::vector<SampledRow> token_logprobs(ThreadPool& pool, View logits, const std::vector<int32_t>& token_ids,
                                       int32_t num_logprobs, int32_t num_vocab_tokens, bool normalised) {
  std::vector<SampledRow> results(token_ids.size());
  const auto vocabulary = static_cast<int32_t>(logits.columns);
  for_rows(pool, logits.rows, [&](int64_t i, Buffers& buffers) {
    const float* x = logits.row(i);
    results[i].token_id = token_ids[i];
    const bool finite = buffers.scan.read(x, std::min(vocabulary, num_vocab_tokens));
    const double normaliser = normalised ? log_sum_exp(x, vocabulary, buffers.block_sums) : 0;
    if (!finite || !std::isfinite(normaliser)) {
      results[i].error = kNotFinite;
      return;
    }
    results[i].logprobs = logprobs_of(token_ids[i], num_logprobs, normaliser, buffers);
  });
  return results;
}

}  // namespace octavo
