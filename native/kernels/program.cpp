#include "octavo/program.h"

#include <chrono>
#include <utility>

#include "octavo/kernels.h"

namespace octavo {

Program::Program(ThreadPool& pool, int64_t max_tokens, int64_t max_logits, int64_t num_heads, int64_t num_kv_heads,
                 int64_t head_dim)
    : pool_(pool),
      max_rows_{max_tokens, max_logits},
      num_heads_(num_heads),
      num_kv_heads_(num_kv_heads),
      head_dim_(head_dim) {}

int Program::add_buffer(Domain domain, int64_t columns) {
  // An odd number of cache lines: rows 4 KB apart would all fall into one set of the L1.
  buffers_.push_back({domain, columns, round_up(columns, 16) | 16, 0});
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
  return {workspace_.as<float>() + buffer.offset + slice.first, rows, slice.columns, buffer.stride};
}

int64_t Program::rows_of(const Run& run, Slice slice) const {
  return domain(slice) == Domain::kTokens ? run.step.num_tokens : run.num_logits;
}

void Program::push(std::string op, std::string name, Domain domain, Kernel kernel, int64_t weight_bytes,
                   int64_t macs_per_row) {
  instructions_.push_back({std::move(op), std::move(name), domain, std::move(kernel), weight_bytes, macs_per_row});
  seconds_.push_back(0);
}

void Program::embedding(const Matrix& table, Slice out) {
  push("embedding", "embedding", domain(out), [=, this, &table](const Run& run, Worker worker) {
    octavo::embedding(table, run.step.token_ids, view(out, run.step.num_tokens), worker);
  });
}

void Program::rms_norm(std::string name, Slice x, const float* weight, float eps, Slice out) {
  push("rms_norm", std::move(name), domain(out), [=, this](const Run& run, Worker worker) {
    const int64_t rows = rows_of(run, x);
    octavo::rms_norm(view(x, rows), weight, eps, view(out, rows), worker);
  });
}

void Program::push_linear(std::string op, std::string name, Slice x, const Matrix& weight, Domain domain,
                          Kernel kernel) {
  const int64_t max_rows = max_rows_[static_cast<int>(this->domain(x))];
  shared_bytes_ = std::max(shared_bytes_, linear_shared_bytes(weight, max_rows));
  push(std::move(op), std::move(name), domain, std::move(kernel), static_cast<int64_t>(weight.bytes()),
       weight.rows() * weight.columns());
}

void Program::linear(std::string name, Slice x, const Matrix& weight, const Slice* residual, Slice out) {
  const bool adds = residual != nullptr;
  const Slice added = adds ? *residual : Slice{};
  push_linear(adds ? "linear_add" : "linear", std::move(name), x, weight, domain(out),
              [=, this, &weight](const Run& run, Worker worker) {
                const int64_t rows = rows_of(run, x);
                const View residual_rows = adds ? view(added, rows) : View{};
                octavo::linear(view(x, rows), weight, adds ? &residual_rows : nullptr, view(out, rows),
                               {pool_, worker, shared_.as<void>()});
              });
}

void Program::linear_silu_mul(std::string name, Slice x, const Matrix& weight, Slice out) {
  push_linear("linear_silu_mul", std::move(name), x, weight, domain(out),
              [=, this, &weight](const Run& run, Worker worker) {
                const int64_t rows = rows_of(run, x);
                octavo::linear_silu_mul(view(x, rows), weight, view(out, rows), {pool_, worker, shared_.as<void>()});
              });
}

void Program::rope(Slice x, const float* table, int64_t rotary_dim, int64_t head_dim, Slice out) {
  push("rope", "rope", domain(out), [=, this](const Run& run, Worker worker) {
    const int64_t rows = rows_of(run, x);
    octavo::rope(view(x, rows), run.step.positions, table, rotary_dim, head_dim, view(out, rows), worker);
  });
}

void Program::write_kv(Slice k, Slice v, const KVCache& cache) {
  push("write_kv", "write_kv", Domain::kTokens, [=, this, &cache](const Run& run, Worker worker) {
    const int64_t rows = run.step.num_tokens;
    octavo::write_kv(view(k, rows), view(v, rows), run.step.slot_mapping, cache, worker);
  });
}

void Program::rope_write_kv(Slice q, Slice k, Slice v, const float* table, int64_t rotary_dim, const KVCache& cache) {
  push("rope_write_kv", "rope_write_kv", Domain::kTokens, [=, this, &cache](const Run& run, Worker worker) {
    const int64_t rows = run.step.num_tokens;
    // All three share the rows alike, so that each worker stores the keys that it has just turned.
    for (const Slice& x : {q, k})
      octavo::rope(view(x, rows), run.step.positions, table, rotary_dim, cache.head_dim(), view(x, rows), worker);
    octavo::write_kv(view(k, rows), view(v, rows), run.step.slot_mapping, cache, worker);
  });
}

void Program::attention(Slice q, const KVCache& cache, float scale, Slice out) {
  push("attention", "attention", Domain::kTokens, [=, this, &cache](const Run& run, Worker worker) {
    const int64_t rows = run.step.num_tokens;
    octavo::attention(view(q, rows), cache, run.step, plan_, scale, view(out, rows), pool_, worker);
  });
}

void Program::silu_mul(Slice gate_up, Slice out) {
  push("silu_mul", "silu_mul", domain(out), [=, this](const Run& run, Worker worker) {
    const int64_t rows = rows_of(run, out);
    octavo::silu_mul(view(gate_up, rows), view(out, rows), worker);
  });
}

void Program::add(Slice x, Slice y, Slice out) {
  push("add", "add", domain(out), [=, this](const Run& run, Worker worker) {
    const int64_t rows = rows_of(run, out);
    octavo::add(view(x, rows), view(y, rows), view(out, rows), worker);
  });
}

void Program::take_logit_rows(Slice x, Slice out) {
  push("take_rows", "take_rows", domain(out), [=, this](const Run& run, Worker worker) {
    octavo::take_rows(view(x, run.step.num_tokens), run.step.logit_rows + run.first_logit, view(out, run.num_logits),
                      worker);
  });
}

void Program::run(const Step& step) {
  run_ = {step, 0, 0};
  plan_.build(step, num_heads_, num_kv_heads_, head_dim_, pool_.size());
  replay(Domain::kTokens);
}

void Program::run_logits(int64_t first_logit, int64_t num_logits) {
  run_.first_logit = first_logit;
  run_.num_logits = num_logits;
  replay(Domain::kLogits);
}

void Program::set_profiling(bool on) {
  profiling_ = on;
  seconds_.assign(instructions_.size(), 0);
}

void Program::replay(Domain domain) {
  using Clock = std::chrono::steady_clock;
  pool_.run([&](int index) {
    const Worker worker{index, pool_.size()};
    auto began = Clock::now();
    for (size_t i = 0; i < instructions_.size(); ++i) {
      if (instructions_[i].domain != domain) continue;
      instructions_[i].kernel(run_, worker);
      pool_.barrier();
      if (profiling_ && index == 0) {
        const auto now = Clock::now();
        seconds_[i] += std::chrono::duration<double>(now - began).count();
        began = now;
      }
    }
  });
}

}  // namespace octavo
