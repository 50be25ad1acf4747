#include "kernels/sampler.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "octavo/program.h"

namespace octavo {
namespace {

View view_rows(const std::variant<LogitRows, Floats2D>& logits, size_t num_rows) {
  const auto* rows = std::get_if<LogitRows>(&logits);
  const View v = rows != nullptr ? rows->view : view(std::get<Floats2D>(logits));
  require(v.rows == static_cast<int64_t>(num_rows), "logits must have one row for each request");
  require(v.columns > 0, "logits must have columns");
  return v;
}

using Rows = std::vector<const SamplerRow*>;

// The token of each row (-1: none), and by row whatever has more to say.
nb::tuple as_tokens(std::vector<SampledRow>&& rows) {
  nb::list token_ids;
  nb::dict details;
  for (size_t i = 0; i < rows.size(); ++i) {
    token_ids.append(rows[i].token_id);
    if (rows[i].logprobs || rows[i].error) details[nb::int_(i)] = nb::cast(std::move(rows[i]));
  }
  return nb::make_tuple(token_ids, details);
}

}  // namespace

void bind_sampler(nb::module_& m) {
  nb::enum_<LogprobsMode>(m, "LogprobsMode")
      .value("raw_logprobs", LogprobsMode::kRawLogprobs)
      .value("processed_logprobs", LogprobsMode::kProcessedLogprobs)
      .value("raw_logits", LogprobsMode::kRawLogits)
      .value("processed_logits", LogprobsMode::kProcessedLogits);

  nb::class_<SamplerRow>(m, "SamplerRow")
      .def(nb::init<>())
      .def_rw("num_vocab_tokens", &SamplerRow::num_vocab_tokens)
      .def_rw("allowed_token_ids", &SamplerRow::allowed_token_ids)
      .def_rw("banned_words", &SamplerRow::banned_words)
      .def_rw("banned_ends", &SamplerRow::banned_ends)
      .def_rw("repetition_penalty", &SamplerRow::repetition_penalty)
      .def_rw("frequency_penalty", &SamplerRow::frequency_penalty)
      .def_rw("presence_penalty", &SamplerRow::presence_penalty)
      .def_rw("temperature", &SamplerRow::temperature)
      .def_rw("top_k", &SamplerRow::top_k)
      .def_rw("top_p", &SamplerRow::top_p)
      .def_rw("min_p", &SamplerRow::min_p)
      .def_rw("seed", &SamplerRow::seed)
      .def_rw("sample_index", &SamplerRow::sample_index)
      .def_rw("position", &SamplerRow::position)
      .def_rw("num_logprobs", &SamplerRow::num_logprobs)
      .def_rw("logprobs_mode", &SamplerRow::logprobs_mode)
      .def(
          "set_bias",
          [](SamplerRow& row, std::vector<int32_t> token_ids, std::vector<float> values) {
            require(token_ids.size() == values.size(), "each biased id needs one value");
            row.bias_token_ids = std::move(token_ids);
            row.bias_values = std::move(values);
          },
          nb::arg("token_ids"), nb::arg("values"))
      .def(
          "set_history",
          [](SamplerRow& row, Ints1D token_ids, int64_t num_prompt_tokens) {
            require(num_prompt_tokens >= 0 && num_prompt_tokens <= static_cast<int64_t>(token_ids.size()),
                    "the prompt is longer than the history");
            row.history.assign(token_ids.data(), token_ids.data() + token_ids.size());
            row.num_prompt_tokens = num_prompt_tokens;
          },
          nb::arg("token_ids"), nb::arg("num_prompt_tokens"),
          "Copies the tokens: the caller's array stays free to grow.");

  nb::class_<TokenLogprobs>(m, "TokenLogprobs")
      .def_ro("token_ids", &TokenLogprobs::token_ids)
      .def_ro("logprobs", &TokenLogprobs::logprobs)
      .def_ro("rank", &TokenLogprobs::rank);

  nb::class_<SampledRow>(m, "SampledRow")
      .def_ro("token_id", &SampledRow::token_id)
      .def_ro("logprobs", &SampledRow::logprobs)
      .def_ro("error", &SampledRow::error);

  m.def(
      "sample",
      [](ThreadPool& pool, Floats2D logits, const Rows& rows) {
        const View v = view_rows(logits, rows.size());
        std::vector<SampledRow> sampled(rows.size());
        {
          nb::gil_scoped_release unlocked;
          sample(pool, v, rows.data(), sampled.data());
        }
        return as_tokens(std::move(sampled));
      },
      nb::arg("pool"), nb::arg("logits"), nb::arg("rows"));

  m.def(
      "run_and_sample",
      [](ThreadPool& pool, Program& program, const StepArrays& arrays, Slice logits, const Rows& rows,
         int64_t max_logits) {
        const auto count = static_cast<int64_t>(rows.size());
        require(count <= arrays.step.num_logits, "there are more rows to sample than logit rows");
        std::vector<SampledRow> sampled(rows.size());
        {
          nb::gil_scoped_release unlocked;
          program.run(arrays.step);
          for (int64_t first = 0; first < count; first += max_logits) {
            const int64_t chunk = std::min(max_logits, count - first);
            program.run_logits(first, chunk);
            sample(pool, program.view(logits, chunk), rows.data() + first, sampled.data() + first,
                   program.logit_maxima());
          }
        }
        return as_tokens(std::move(sampled));
      },
      nb::arg("pool"), nb::arg("program"), nb::arg("step"), nb::arg("logits"), nb::arg("rows"), nb::arg("max_logits"),
      "A whole step: runs the program, and samples the first of its logit rows where they lie");

  m.def(
      "token_logprobs",
      [](ThreadPool& pool, std::variant<LogitRows, Floats2D> logits, const std::vector<int32_t>& token_ids,
         int32_t num_logprobs, int32_t num_vocab_tokens, bool normalised) {
        const View v = view_rows(logits, token_ids.size());
        for (const int32_t id : token_ids)
          require(id >= 0 && id < std::min<int64_t>(v.columns, num_vocab_tokens),
                  "a token id is outside the vocabulary");
        nb::gil_scoped_release unlocked;
        return token_logprobs(pool, v, token_ids, num_logprobs, num_vocab_tokens, normalised);
      },
      nb::arg("pool"), nb::arg("logits"), nb::arg("token_ids"), nb::arg("num_logprobs"), nb::arg("num_vocab_tokens"),
      nb::arg("normalised"));
}

}  // namespace octavo
