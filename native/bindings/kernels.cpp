// The kernels one by one, as --enforce-eager and the parity tests call them. Outputs are given by the caller.
#include <nanobind/stl/optional.h>

#include <optional>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "octavo/kernels.h"
#include "octavo/thread_pool.h"

namespace octavo {

StepArrays::StepArrays(Ints1D token_ids, Ints1D positions, Ints1D slot_mapping, Ints1D query_start, Ints1D seq_lens,
                       Ints2D block_tables, Ints1D logit_rows)
    : token_ids(token_ids),
      positions(positions),
      slot_mapping(slot_mapping),
      query_start(query_start),
      seq_lens(seq_lens),
      block_tables(block_tables),
      logit_rows(logit_rows),
      step{static_cast<int64_t>(token_ids.size()),
           static_cast<int64_t>(seq_lens.size()),
           static_cast<int64_t>(logit_rows.size()),
           token_ids.data(),
           positions.data(),
           slot_mapping.data(),
           query_start.data(),
           seq_lens.data(),
           block_tables.data(),
           static_cast<int64_t>(block_tables.shape(1)),
           logit_rows.data()} {
  require(positions.size() == token_ids.size() && slot_mapping.size() == token_ids.size(),
          "token_ids, positions and slot_mapping must have one entry for each token");
  require(query_start.size() == seq_lens.size() + 1, "query_start must have one entry more than seq_lens");
  require(block_tables.shape(0) == seq_lens.size(), "block_tables must have one row for each request");
}

namespace {

// Runs one kernel on all threads of the pool, without the GIL.
template <class Kernel>
void on_all(ThreadPool& pool, Kernel kernel) {
  nb::gil_scoped_release release;
  pool.run([&](int index) { kernel(Worker{index, pool.size()}); });
}

bool same_shape(View a, View b) { return a.rows == b.rows && a.columns == b.columns; }

}  // namespace

void bind_kernels(nb::module_& m) {
  nb::class_<StepArrays>(m, "Step").def(nb::init<Ints1D, Ints1D, Ints1D, Ints1D, Ints1D, Ints2D, Ints1D>(),
                                        nb::arg("token_ids"), nb::arg("positions"), nb::arg("slot_mapping"),
                                        nb::arg("query_start"), nb::arg("seq_lens"), nb::arg("block_tables"),
                                        nb::arg("logit_rows"));

  m.def("embedding", [](ThreadPool& pool, const Matrix& table, Ints1D token_ids, Floats2D out) {
    const View to = view(out);
    require(to.rows == static_cast<int64_t>(token_ids.size()) && to.columns == table.columns(),
            "embedding: out must be [tokens, K]");
    on_all(pool, [&](Worker worker) { embedding(table, token_ids.data(), to, worker); });
  });

  m.def("rms_norm", [](ThreadPool& pool, Floats2D x, Floats1D weight, float eps, Floats2D out) {
    const View from = view(x), to = view(out);
    require(same_shape(from, to) && static_cast<int64_t>(weight.size()) == from.columns,
            "rms_norm: x and out must be [T, K], weight [K]");
    on_all(pool, [&](Worker worker) { rms_norm(from, weight.data(), eps, to, worker); });
  });

  m.def(
      "linear",
      [](ThreadPool& pool, Floats2D x, const Matrix& weight, std::optional<Floats2D> residual, Floats2D out) {
        const View from = view(x), to = view(out);
        require(from.columns == weight.columns() && to.columns == weight.rows() && from.rows == to.rows,
                "linear: x must be [T, K], out [T, N]");
        const View added = residual ? view(*residual) : View{};
        require(!residual || same_shape(added, to), "linear: residual must have the shape of out");
        const Memory shared(linear_shared_bytes(weight, from.rows));
        on_all(pool, [&](Worker worker) {
          linear(from, weight, residual ? &added : nullptr, to, {pool, worker, shared.as<void>()});
        });
      },
      nb::arg("pool"), nb::arg("x"), nb::arg("weight"), nb::arg("residual").none(), nb::arg("out"));

  m.def("rope", [](ThreadPool& pool, Floats2D x, Ints1D positions, ConstFloats2D table, int64_t head_dim,
                   Floats2D out) {
    const View from = view(x), to = view(out);
    require(same_shape(from, to) && from.columns % head_dim == 0 && static_cast<int64_t>(positions.size()) == from.rows,
            "rope: x and out must be [T, heads * head_dim], positions [T]");
    const auto rotary_dim = static_cast<int64_t>(table.shape(1));
    on_all(pool, [&](Worker worker) { rope(from, positions.data(), table.data(), rotary_dim, head_dim, to, worker); });
  });

  m.def("silu_mul", [](ThreadPool& pool, Floats2D gate_up, Floats2D out) {
    const View from = view(gate_up), to = view(out);
    require(from.rows == to.rows && from.columns == 2 * to.columns, "silu_mul: gate_up must be [T, 2F], out [T, F]");
    on_all(pool, [&](Worker worker) { silu_mul(from, to, worker); });
  });

  m.def("add", [](ThreadPool& pool, Floats2D x, Floats2D y, Floats2D out) {
    const View a = view(x), b = view(y), to = view(out);
    require(same_shape(a, b) && same_shape(a, to), "add: x, y and out must have one shape");
    on_all(pool, [&](Worker worker) { add(a, b, to, worker); });
  });

  m.def("take_rows", [](ThreadPool& pool, Floats2D x, Ints1D rows, Floats2D out) {
    const View from = view(x), to = view(out);
    require(from.columns == to.columns && to.rows == static_cast<int64_t>(rows.size()),
            "take_rows: x must be [T, K], out [L, K]");
    on_all(pool, [&](Worker worker) { take_rows(from, rows.data(), to, worker); });
  });

  m.def("write_kv", [](ThreadPool& pool, Floats2D k, Floats2D v, const KVCache& cache, const StepArrays& arrays) {
    const View keys = view(k), values = view(v);
    require(same_shape(keys, values) && keys.columns == cache.num_kv_heads() * cache.head_dim() &&
                keys.rows == arrays.step.num_tokens,
            "write_kv: k and v must be [T, kv_heads * head_dim]");
    on_all(pool,
           [&](Worker worker) { write_kv(keys, values, arrays.step.slot_mapping, cache, worker.share(keys.rows)); });
  });

  m.def("attention",
        [](ThreadPool& pool, Floats2D q, const KVCache& cache, const StepArrays& arrays, float scale, Floats2D out) {
          const View from = view(q), to = view(out);
          const int64_t num_heads = from.columns / cache.head_dim();
          require(same_shape(from, to) && from.rows == arrays.step.num_tokens &&
                      from.columns % (cache.head_dim() * cache.num_kv_heads()) == 0,
                  "attention: q and out must be [T, heads * head_dim], heads a multiple of kv_heads");
          AttentionPlan plan;
          plan.build(arrays.step, num_heads, cache.num_kv_heads(), cache.head_dim(), pool.size());
          on_all(pool, [&](Worker worker) { attention(from, cache, arrays.step, plan, scale, to, pool, worker); });
        });
}

}  // namespace octavo
