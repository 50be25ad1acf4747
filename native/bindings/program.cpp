// The program's builder and its replay.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "octavo/program.h"

namespace octavo {
namespace {

using Release = nb::call_guard<nb::gil_scoped_release>;
// What an instruction refers to must outlive the program: argument n is kept for as long as argument 1, the program.
template <int n>
using Keep = nb::keep_alive<1, n>;

}  // namespace

void bind_program(nb::module_& m) {
  nb::class_<Slice>(m, "Slice")
      .def(nb::init<int, int64_t, int64_t, const Matrix*>(), nb::arg("buffer"), nb::arg("first"), nb::arg("columns"),
           nb::arg("reader").none() = nb::none(), Keep<5>())
      .def_ro("buffer", &Slice::buffer)
      .def_ro("first", &Slice::first)
      .def_ro("columns", &Slice::columns);

  nb::class_<LogitRows>(m, "LogitRows")
      .def("__len__", [](const LogitRows& self) { return self.view.rows; })
      .def(
          "__array__",
          [](LogitRows& self, nb::object dtype, nb::object) {
            const View& v = self.view;
            const nb::ndarray<nb::numpy, float, nb::ndim<2>> rows(
                v.data, {static_cast<size_t>(v.rows), static_cast<size_t>(v.columns)}, {}, {v.stride, 1});
            return nb::cast(rows, nb::rv_policy::copy).attr("astype")(dtype.is_none() ? nb::str("float32") : dtype);
          },
          nb::arg("dtype") = nb::none(), nb::arg("copy") = nb::none(), "Always a copy");

  nb::class_<Program>(m, "Program")
      .def(nb::init<ThreadPool&, int64_t, int64_t, int64_t, int64_t, int64_t>(), nb::arg("pool"), nb::arg("max_tokens"),
           nb::arg("max_logits"), nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"), Keep<2>())
      .def(
          "add_buffer",
          [](Program& self, const std::string& domain, int64_t columns, bool local) {
            require(domain == "tokens" || domain == "logits", "domain must be tokens or logits");
            return self.add_buffer(domain == "tokens" ? Domain::kTokens : Domain::kLogits, columns, local);
          },
          nb::arg("domain"), nb::arg("columns"), nb::arg("local") = false)
      .def("allocate", &Program::allocate)
      .def("embedding", &Program::embedding, Keep<2>())
      .def(
          "rms_norm",
          [](Program& self, std::string name, Slice x, Floats1D weight, float eps, Slice out) {
            self.rms_norm(std::move(name), x, weight.data(), eps, out);
          },
          Keep<4>())
      .def(
          "linear",
          [](Program& self, std::string name, Slice x, const Matrix& weight, std::optional<Slice> residual, Slice out) {
            self.linear(std::move(name), x, weight, residual ? &*residual : nullptr, out);
          },
          nb::arg("name"), nb::arg("x"), nb::arg("weight"), nb::arg("residual").none(), nb::arg("out"), Keep<4>())
      .def("logits", &Program::logits, Keep<4>())
      .def("linear_silu_mul", &Program::linear_silu_mul, Keep<4>())
      .def(
          "rope",
          [](Program& self, Slice x, ConstFloats2D table, int64_t head_dim, Slice out) {
            self.rope(x, table.data(), static_cast<int64_t>(table.shape(1)), head_dim, out);
          },
          Keep<3>())
      .def("write_kv", &Program::write_kv, Keep<4>())
      .def(
          "rope_write_kv",
          [](Program& self, Slice q, Slice k, Slice v, ConstFloats2D table, const KVCache& cache) {
            self.rope_write_kv(q, k, v, table.data(), static_cast<int64_t>(table.shape(1)), cache);
          },
          Keep<5>(), Keep<6>())
      .def("attention", &Program::attention, Keep<3>())
      .def("silu_mul", &Program::silu_mul)
      .def("add", &Program::add)
      .def("take_logit_rows", &Program::take_logit_rows)
      .def(
          "run", [](Program& self, const StepArrays& arrays) { self.run(arrays.step); }, Release())
      .def("run_logits", &Program::run_logits, nb::arg("first"), nb::arg("count"), Release())
      .def(
          "logit_rows", [](Program& self, Slice slice, int64_t rows) { return LogitRows{self.view(slice, rows)}; },
          nb::keep_alive<0, 1>(), "The first rows of the logits, for the sampler: valid until the next run")
      .def(
          "rows",
          [](Program& self, Slice slice, int64_t rows) {
            const View v = self.view(slice, rows);
            return nb::ndarray<nb::numpy, float, nb::ndim<2>>(
                v.data, {static_cast<size_t>(rows), static_cast<size_t>(v.columns)}, nb::find(&self), {v.stride, 1});
          },
          "A view of the first rows of a slice: valid until the next run")
      .def("set_profiling", &Program::set_profiling)
      .def_prop_ro("seconds", &Program::seconds)
      .def_prop_ro("workspace_bytes", &Program::workspace_bytes)
      .def_prop_ro("instructions", [](const Program& self) {
        std::vector<std::tuple<std::string, std::string, std::string, int64_t, int64_t>> rows;
        for (const auto& i : self.instructions())
          rows.emplace_back(i.op, i.name, i.domain == Domain::kTokens ? "tokens" : "logits", i.weight_bytes,
                            i.macs_per_row);
        return rows;
      });
}

}  // namespace octavo
