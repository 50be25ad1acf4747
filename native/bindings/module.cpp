// The Python module: a list of definitions. Kernels know nothing of Python; what binds them is in this folder.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "octavo/thread_pool.h"

namespace nb = nanobind;

NB_MODULE(OCTAVO_MODULE, m) {
  using octavo::ThreadPool;
  nb::class_<ThreadPool>(m, "ThreadPool")
      .def(nb::init<int, std::vector<int>>(), nb::arg("num_threads"), nb::arg("cpus") = std::vector<int>())
      .def_prop_ro("size", &ThreadPool::size);
}
