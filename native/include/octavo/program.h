// A model's forward as a flat list of kernel calls over one preallocated workspace: traced once at load, then replayed
// for every step without an allocation. Owns the list and the workspace; knows no model and no Python.
//
// Rows come in two domains: tokens (all scheduled tokens of the step) and logits (the rows whose logits are wanted, a
// chunk of at most max_logits of them at a time). `run` computes the first, `run_logits` the second for one chunk.
//
// All instructions but attention see each row for itself. With few rows the workers share every instruction, and meet
// after it. With many, each takes its own rows through a segment, all instructions up to the next attention, some
// hundred rows at a time, so that what one instruction writes is still in the L2 when the next reads it. A local buffer
// holds values that never leave their segment: its rows are then used again by all rows of a worker.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "octavo/attention.h"
#include "octavo/matrix.h"
#include "octavo/thread_pool.h"
#include "octavo/types.h"

namespace octavo {

enum class Domain { kTokens, kLogits };

// Rows of a domain that some workers compute together, and the first row that is theirs in local buffers.
struct Part {
  Worker::Range rows;
  int64_t local_row;
  Worker worker;
  int64_t num_rows() const { return rows.end - rows.begin; }
  Worker::Range share() const {
    const Worker::Range mine = worker.share(num_rows());
    return {rows.begin + mine.begin, rows.begin + mine.end};
  }
};

// Columns [first, first + columns) of a buffer of the workspace.
struct Slice {
  int buffer;
  int64_t first, columns;
  const Matrix* reader;  // of a View; then all columns of the buffer
};

class Program {
 public:
  // Everything that one replay reads.
  struct Run {
    Step step;
    int64_t first_logit;
  };
  using Kernel = std::function<void(const Run&, const Part&)>;

  struct Instruction {
    std::string op, name;
    Domain domain;
    Kernel kernel;
    int64_t weight_bytes;  // read once a run
    int64_t macs_per_row;  // multiply-adds for each row, attention excepted
  };

  Program(ThreadPool& pool, int64_t max_tokens, int64_t max_logits, int64_t num_heads, int64_t num_kv_heads,
          int64_t head_dim);

  int add_buffer(Domain domain, int64_t columns, bool local);
  void allocate();                             // after the last add_buffer, before the first run
  View view(Slice slice, int64_t rows) const;  // the first rows of a buffer that is not local
  Domain domain(Slice slice) const { return buffers_[slice.buffer].domain; }

  void embedding(const Matrix& table, Slice out);
  void rms_norm(std::string name, Slice x, const float* weight, float eps, Slice out);
  void linear(std::string name, Slice x, const Matrix& weight, const Slice* residual, Slice out);
  // A linear into logits, whose maxima are kept for the sampler. Once in a program.
  void logits(std::string name, Slice x, const Matrix& weight, Slice out);
  void linear_silu_mul(std::string name, Slice x, const Matrix& weight, Slice out);
  void rope(Slice x, const float* table, int64_t rotary_dim, int64_t head_dim, Slice out);
  void write_kv(Slice k, Slice v, const KVCache& cache);
  // rope of q in place, rope of k in place, then k and v into the cache.
  void rope_write_kv(Slice q, Slice k, Slice v, const float* table, int64_t rotary_dim, const KVCache& cache);
  void attention(Slice q, const KVCache& cache, float scale, Slice out);
  void silu_mul(Slice gate_up, Slice out);
  void add(Slice x, Slice y, Slice out);
  void take_logit_rows(Slice x, Slice out);

  void run(const Step& step);                                // the tokens domain
  void run_logits(int64_t first_logit, int64_t num_logits);  // the logits domain; after run, with its step still alive

  // Of the logits that were computed last: [rows, panels], see linear_logits. Without data where there is no `logits`.
  View logit_maxima() const { return maxima_; }

  const std::vector<Instruction>& instructions() const { return instructions_; }
  // Seconds of each instruction so far, summed by worker 0 while profiling is on.
  void set_profiling(bool on);
  const std::vector<double>& seconds() const { return seconds_; }
  size_t workspace_bytes() const { return workspace_.bytes() + shared_.bytes(); }

 private:
  struct Buffer {
    Domain domain;
    int64_t columns;
    bool local;
    int64_t stride;  // floats from row to row
    int64_t offset;  // floats from the start of the workspace
  };

  // Instructions [begin, end) of one domain.
  struct Segment {
    Domain domain;
    size_t begin, end;
    bool by_rows;  // each instruction sees each row for itself
  };
  class Stopwatch;

  View view(Slice slice, const Part& part) const;
  void push_linear(std::string op, std::string name, Slice x, const Matrix& weight, Domain domain, Kernel kernel);
  void push(std::string op, std::string name, Domain domain, Kernel kernel, int64_t weight_bytes = 0,
            int64_t macs_per_row = 0);
  void replay(Domain domain, int64_t num_rows);
  void run_together(const Segment& segment, const Part& all, Stopwatch& stopwatch);
  void run_apart(const Segment& segment, Worker::Range rows, Stopwatch& stopwatch);

  ThreadPool& pool_;
  int64_t max_rows_[2];
  int64_t num_heads_, num_kv_heads_, head_dim_;
  std::vector<Buffer> buffers_;
  std::vector<Instruction> instructions_;
  std::vector<Segment> segments_;
  int64_t rows_worth_sharing_ = 1;  // of each worker
  std::vector<double> seconds_;
  bool profiling_ = false;
  std::vector<float> maxima_memory_;
  View maxima_{};
  Memory workspace_;
  Memory shared_;  // of the linears, see Team
  size_t shared_bytes_ = 0;
  KVBlocks* kv_blocks_ = nullptr;  // that write_kv writes to
  AttentionPlan plan_;
  Run run_{};
};

}  // namespace octavo
