#include "octavo/program.h"

#include <chrono>
#include <utility>

#include "octavo/kernels.h"

namespace octavo {
namespace {

constexpr int64_t kRowsApart = 256;  // that a worker takes through a segment at a time

}  // namespace

Program::Program(ThreadPool& pool, int64_t max_tokens, int64_t max_logits, int64_t num_heads, int64_t num_kv_heads,
                 int64_t head_dim)
    : pool_(pool),
      max_rows_{max_tokens, max_logits},
      num_heads_(num_heads),
      num_kv_heads_(num_kv_heads),
      head_dim_(head_dim) {}

int Program::add_buffer(Domain domain, int64_t columns, bool local) {
  // An odd number of cache lines: rows 4 KB apart would all fall into one set of the L1.
  buffers_.push_back({domain, columns, local, round_up(columns, 16) | 16, 0});
  return static_cast<int>(buffers_.size()) - 1;
}

void Program::allocate() {
  int64_t floats = 0;
  for (auto& buffer : buffers_) {
    buffer.offset = floats;
    floats += max_rows_[static_cast<int>(buffer.domain)] * buffer.stride;
  }
  workspace_ = Memory(static_cast<size_t>(floats) * sizeof(float));
  shared_ = Memory(shared_bytes_);
}

View Program::view(Slice slice, int64_t rows) const {
  const Buffer& buffer = buffers_[slice.buffer];
  return {workspace_.as<float>() + buffer.offset + slice.first, rows, slice.columns, buffer.stride, slice.reader};
}

View Program::view(Slice slice, const Part& part) const {
  View rows = view(slice, part.num_rows());
  rows.data = rows.row(buffers_[slice.buffer].local ? part.local_row : part.rows.begin);
  return rows;
}

void Program::push(std::string op, std::string name, Domain domain, Kernel kernel, int64_t weight_bytes,
                   int64_t macs_per_row) {
  const size_t index = instructions_.size();
  const bool by_rows = op != "attention";
  if (segments_.empty() || !by_rows || !segments_.back().by_rows || segments_.back().domain != domain)
    segments_.push_back({domain, index, index, by_rows});
  segments_.back().end = index + 1;
  instructions_.push_back({std::move(op), std::move(name), domain, std::move(kernel), weight_bytes, macs_per_row});
  seconds_.push_back(0);
}

void Program::embedding(const Matrix& table, Slice out) {
  push("embedding", "embedding", domain(out), [=, this, &table](const Run& run, const Part& part) {
    octavo::embedding(table, run.step.token_ids + part.rows.begin, view(out, part), part.worker);
  });
}

void Program::rms_norm(std::string name, Slice x, const float* weight, float eps, Slice out) {
  push("rms_norm", std::move(name), domain(out), [=, this](const Run&, const Part& part) {
    octavo::rms_norm(view(x, part), weight, eps, view(out, part), part.worker);
  });
}

void Program::push_linear(std::string op, std::string name, Slice x, const Matrix& weight, Domain domain,
                          Kernel kernel) {
  const int64_t max_rows = max_rows_[static_cast<int>(this->domain(x))];
  shared_bytes_ = std::max(shared_bytes_, linear_shared_bytes(weight, max_rows));
  rows_worth_sharing_ = std::max(rows_worth_sharing_, octavo::rows_worth_sharing(weight));
  push(std::move(op), std::move(name), domain, std::move(kernel), static_cast<int64_t>(weight.bytes()),
       weight.rows() * weight.columns());
}

void Program::linear(std::string name, Slice x, const Matrix& weight, const Slice* residual, Slice out) {
  const bool adds = residual != nullptr;
  const Slice added = adds ? *residual : Slice{};
  push_linear(adds ? "linear_add" : "linear", std::move(name), x, weight, domain(out),
              [=, this, &weight](const Run&, const Part& part) {
                const View residual_rows = adds ? view(added, part) : View{};
                octavo::linear(view(x, part), weight, adds ? &residual_rows : nullptr, view(out, part),
                               {pool_, part.worker, shared_.as<void>()});
              });
}

void Program::logits(std::string name, Slice x, const Matrix& weight, Slice out) {
  const int64_t max_rows = max_rows_[static_cast<int>(Domain::kLogits)], num_panels = weight.num_panels();
  maxima_memory_.resize(static_cast<size_t>(max_rows * num_panels));
  maxima_ = {maxima_memory_.data(), max_rows, num_panels, num_panels};
  push_linear("linear", std::move(name), x, weight, domain(out), [=, this, &weight](const Run&, const Part& part) {
    const View maxima{maxima_.row(part.rows.begin), part.rows.end - part.rows.begin, num_panels, num_panels};
    linear_logits(view(x, part), weight, view(out, part), maxima, {pool_, part.worker, shared_.as<void>()});
  });
}

void Program::linear_silu_mul(std::string name, Slice x, const Matrix& weight, Slice out) {
  push_linear(
      "linear_silu_mul", std::move(name), x, weight, domain(out), [=, this, &weight](const Run&, const Part& part) {
        octavo::linear_silu_mul(view(x, part), weight, view(out, part), {pool_, part.worker, shared_.as<void>()});
      });
}

void Program::rope(Slice x, const float* table, int64_t rotary_dim, int64_t head_dim, Slice out) {
  push("rope", "rope", domain(out), [=, this](const Run& run, const Part& part) {
    octavo::rope(view(x, part), run.step.positions + part.rows.begin, table, rotary_dim, head_dim, view(out, part),
                 part.worker);
  });
}

void Program::write_kv(Slice k, Slice v, const KVCache& cache) {
  kv_blocks_ = cache.blocks();
  push("write_kv", "write_kv", Domain::kTokens, [=, this, &cache](const Run& run, const Part& part) {
    const int64_t rows = run.step.num_tokens;
    octavo::write_kv(view(k, rows), view(v, rows), run.step.slot_mapping, cache, part.share());
  });
}

void Program::rope_write_kv(Slice q, Slice k, Slice v, const float* table, int64_t rotary_dim, const KVCache& cache) {
  kv_blocks_ = cache.blocks();
  push("rope_write_kv", "rope_write_kv", Domain::kTokens, [=, this, &cache](const Run& run, const Part& part) {
    // All three share the rows alike, so that each worker stores the keys that it has just turned.
    for (const Slice& x : {q, k})
      octavo::rope(view(x, part), run.step.positions + part.rows.begin, table, rotary_dim, cache.head_dim(),
                   view(x, part), part.worker);
    const int64_t rows = run.step.num_tokens;
    octavo::write_kv(view(k, rows), view(v, rows), run.step.slot_mapping, cache, part.share());
  });
}

void Program::attention(Slice q, const KVCache& cache, float scale, Slice out) {
  push("attention", "attention", Domain::kTokens, [=, this, &cache](const Run& run, const Part& part) {
    octavo::attention(view(q, part), cache, run.step, plan_, scale, view(out, part), pool_, part.worker);
  });
}

void Program::silu_mul(Slice gate_up, Slice out) {
  push("silu_mul", "silu_mul", domain(out), [=, this](const Run&, const Part& part) {
    octavo::silu_mul(view(gate_up, part), view(out, part), part.worker);
  });
}

void Program::add(Slice x, Slice y, Slice out) {
  push("add", "add", domain(out), [=, this](const Run&, const Part& part) {
    octavo::add(view(x, part), view(y, part), view(out, part), part.worker);
  });
}

void Program::take_logit_rows(Slice x, Slice out) {
  push("take_rows", "take_rows", domain(out), [=, this](const Run& run, const Part& part) {
    octavo::take_rows(view(x, run.step.num_tokens), run.step.logit_rows + run.first_logit + part.rows.begin,
                      view(out, part), part.worker);
  });
}

void Program::run(const Step& step) {
  run_ = {step, 0};
  if (kv_blocks_) kv_blocks_->make_room(pool_, step.slot_mapping, step.num_tokens);
  plan_.build(step, num_heads_, num_kv_heads_, head_dim_, pool_.size());
  replay(Domain::kTokens, step.num_tokens);
}

void Program::run_logits(int64_t first_logit, int64_t num_logits) {
  run_.first_logit = first_logit;
  replay(Domain::kLogits, num_logits);
}

void Program::set_profiling(bool on) {
  profiling_ = on;
  seconds_.assign(instructions_.size(), 0);
}

// Of one worker; adds to the seconds of the instructions while profiling is on and the worker is the first.
class Program::Stopwatch {
 public:
  Stopwatch(Program& program, Worker worker) : program_(program), runs_(program.profiling_ && worker.index == 0) {}

  // What has passed since the last call belongs to this instruction.
  void count(size_t instruction) {
    if (!runs_) return;
    const auto now = Clock::now();
    program_.seconds_[instruction] += std::chrono::duration<double>(now - began_).count();
    began_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Program& program_;
  bool runs_;
  Clock::time_point began_ = Clock::now();
};

void Program::replay(Domain domain, int64_t num_rows) {
  const bool many = num_rows >= rows_worth_sharing_ * pool_.size();
  pool_.run([&](int index) {
    const Worker worker{index, pool_.size()};
    Stopwatch stopwatch(*this, worker);
    for (const Segment& segment : segments_) {
      if (segment.domain != domain) continue;
      if (many && segment.by_rows)
        run_apart(segment, worker.share(num_rows), stopwatch);
      else
        run_together(segment, {{0, num_rows}, 0, worker}, stopwatch);
    }
  });
}

void Program::run_together(const Segment& segment, const Part& all, Stopwatch& stopwatch) {
  for (size_t i = segment.begin; i < segment.end; ++i) {
    instructions_[i].kernel(run_, all);
    pool_.barrier();
    stopwatch.count(i);
  }
}

void Program::run_apart(const Segment& segment, Worker::Range rows, Stopwatch& stopwatch) {
  const int64_t num_rows = rows.end - rows.begin, num_parts = divide_up(num_rows, kRowsApart);
  for (int64_t p = 0; p < num_parts; ++p) {
    const Worker::Range mine{rows.begin + num_rows * p / num_parts, rows.begin + num_rows * (p + 1) / num_parts};
    for (size_t i = segment.begin; i < segment.end; ++i) {
      instructions_[i].kernel(run_, {mine, rows.begin, {0, 1}});
      stopwatch.count(i);
    }
  }
  pool_.barrier();
  stopwatch.count(segment.end - 1);
}

}  // namespace octavo
