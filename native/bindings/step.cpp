// A plan's rows (core/plan.py) as the arrays of a step: what runtime/batch.py defines, in one call. Python objects are
// read by their attributes; each row costs a fraction of a microsecond.
#include <algorithm>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"

namespace octavo {
namespace {

// The names of attributes as Python compares them: by address.
struct Names {
  static PyObject* intern(const char* name) { return PyUnicode_InternFromString(name); }
  PyObject* request = intern("request");
  PyObject* token_ids = intern("token_ids");
  PyObject* start = intern("start");
  PyObject* num_tokens = intern("num_tokens");
  PyObject* block_table = intern("block_table");
  PyObject* samples = intern("samples");
  PyObject* num_scored = intern("num_scored");
  PyObject* forks = intern("forks");
};

nb::object get(nb::handle object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name);
  if (value == nullptr) nb::raise_python_error();
  return nb::steal(value);
}

// The items of an array.array('i'), held for as long as this lives.
class Ints {
 public:
  explicit Ints(nb::handle array) {
    if (PyObject_GetBuffer(array.ptr(), &buffer_, PyBUF_SIMPLE) != 0) nb::raise_python_error();
  }
  ~Ints() { PyBuffer_Release(&buffer_); }
  Ints(const Ints&) = delete;
  Ints& operator=(const Ints&) = delete;

  const int32_t* data() const { return static_cast<const int32_t*>(buffer_.buf); }
  int64_t size() const { return buffer_.len / static_cast<int64_t>(sizeof(int32_t)); }

 private:
  Py_buffer buffer_;
};

struct Row {
  nb::object token_ids, block_table;
  int64_t start, num_tokens, num_scored, num_samples;
  int64_t end() const { return start + num_tokens; }
};

Row read_row(nb::handle scheduled, const Names& names) {
  Row row{get(get(scheduled, names.request), names.token_ids), get(scheduled, names.block_table),
          nb::cast<int64_t>(get(scheduled, names.start)),      nb::cast<int64_t>(get(scheduled, names.num_tokens)),
          nb::cast<int64_t>(get(scheduled, names.num_scored)), 0};
  if (nb::cast<bool>(get(scheduled, names.samples)))
    row.num_samples = 1 + static_cast<int64_t>(nb::len(get(scheduled, names.forks)));
  require(row.start >= 0 && row.num_tokens > 0 && row.num_scored >= 0 && row.num_scored <= row.num_tokens,
          "a row must begin at a token and have some");
  return row;
}

// The arrays of a step, one behind the other in one allocation.
class StepWriter {
 public:
  StepWriter(const std::vector<Row>& rows, int64_t block_size) : block_size_(block_size) {
    int64_t tokens = 0, logits = 0, width = 0;
    for (const Row& row : rows) {
      tokens += row.num_tokens;
      logits += row.num_samples + row.num_scored;
      width = std::max(width, static_cast<int64_t>(nb::len(row.block_table)));
    }
    const auto requests = static_cast<int64_t>(rows.size());
    ints_.resize(3 * tokens + 2 * requests + 1 + requests * width + logits);
    int32_t* at = ints_.data();
    const auto take = [&](int64_t count) { return std::exchange(at, at + count); };
    token_ids_ = take(tokens);
    positions_ = take(tokens);
    slots_ = take(tokens);
    query_start_ = take(requests + 1);
    seq_lens_ = take(requests);
    block_tables_ = take(requests * width);
    logit_rows_ = take(logits);
    step_ = {tokens,       requests,  logits,        token_ids_, positions_, slots_,
             query_start_, seq_lens_, block_tables_, width,      logit_rows_};
    for (int64_t r = 0; r < requests; ++r) write(rows[r], r);
    write_logit_rows(rows);
  }

  StepArrays finish() { return StepArrays(std::move(ints_), step_); }  // a moved vector keeps its memory

 private:
  void write(const Row& row, int64_t r) {
    const Ints tokens(row.token_ids), blocks(row.block_table);
    require(row.end() <= tokens.size() && row.end() <= blocks.size() * block_size_,
            "a row must lie within its tokens and blocks");
    const int64_t first = query_start_[r];
    std::copy(tokens.data() + row.start, tokens.data() + row.end(), token_ids_ + first);
    std::copy(blocks.data(), blocks.data() + blocks.size(), block_tables_ + r * step_.block_table_stride);
    for (int64_t i = 0; i < row.num_tokens; ++i) {
      const int64_t position = row.start + i;
      positions_[first + i] = static_cast<int32_t>(position);
      slots_[first + i] =
          static_cast<int32_t>(blocks.data()[position / block_size_] * block_size_ + position % block_size_);
    }
    query_start_[r + 1] = static_cast<int32_t>(first + row.num_tokens);
    seq_lens_[r] = static_cast<int32_t>(row.end());
  }

  // First the rows that sample, once for each sample, then those that score.
  void write_logit_rows(const std::vector<Row>& rows) {
    int32_t* at = logit_rows_;
    for (size_t r = 0; r < rows.size(); ++r)
      for (int64_t i = 0; i < rows[r].num_samples; ++i) *at++ = query_start_[r + 1] - 1;
    for (size_t r = 0; r < rows.size(); ++r)
      for (int64_t i = 0; i < rows[r].num_scored; ++i) *at++ = static_cast<int32_t>(query_start_[r] + i);
  }

  int64_t block_size_;
  std::vector<int32_t> ints_;
  int32_t *token_ids_, *positions_, *slots_, *query_start_, *seq_lens_, *block_tables_, *logit_rows_;
  Step step_;
};

using Array = nb::ndarray<nb::numpy, const int32_t>;

nb::tuple arrays_of(StepArrays& self) {
  const Step& s = self.step;
  const nb::handle owner = nb::find(self);
  const auto flat = [&](const int32_t* data, int64_t count) {
    return Array(data, {static_cast<size_t>(count)}, owner);
  };
  return nb::make_tuple(
      flat(s.token_ids, s.num_tokens), flat(s.positions, s.num_tokens), flat(s.slot_mapping, s.num_tokens),
      flat(s.query_start, s.num_requests + 1), flat(s.seq_lens, s.num_requests),
      Array(s.block_tables, {static_cast<size_t>(s.num_requests), static_cast<size_t>(s.block_table_stride)}, owner),
      flat(s.logit_rows, s.num_logits));
}

}  // namespace

void bind_step(nb::module_& m) {
  m.def(
      "make_step",
      [names = Names()](nb::list scheduled, int64_t block_size) {
        std::vector<Row> rows;
        rows.reserve(scheduled.size());
        for (nb::handle row : scheduled) rows.push_back(read_row(row, names));
        return StepWriter(rows, block_size).finish();
      },
      nb::arg("scheduled"), nb::arg("block_size"), "The step of a plan's rows");
  m.def("step_arrays", &arrays_of, nb::arg("step"), "Its arrays, in the order of a Batch");
}

}  // namespace octavo
