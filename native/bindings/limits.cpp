#include "octavo/limits.h"

#include <nanobind/stl/string.h>

#include "bindings/bindings.h"

namespace octavo {

namespace nb = nanobind;

void bind_limits(nb::module_& m) {
  m.def("measure_bandwidth", &measure_bandwidth, nb::call_guard<nb::gil_scoped_release>());
  m.def("measure_work", &measure_work, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "measure_flops",
      [](ThreadPool& pool, const std::string& dtype) { return measure_flops(pool, parse_dtype(dtype)); },
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace octavo
