// A file of packed weights in memory, and how damage to it is found.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "octavo/checksum.h"
#include "octavo/thread_pool.h"

namespace octavo {
namespace {

// A part of the data with a checksum of its own, so that threads can share the work.
constexpr size_t kPart = size_t{1} << 20;

nb::ndarray<nb::numpy, uint64_t, nb::ndim<1>> checksums(Bytes bytes, ThreadPool* pool) {
  require(bytes.size() % 4 == 0, "checksums are of words of four bytes");
  const size_t parts = (bytes.size() + kPart - 1) / kPart;
  auto* sums = new uint64_t[parts];
  nb::capsule owner(sums, [](void* p) noexcept { delete[] static_cast<uint64_t*>(p); });
  {
    nb::gil_scoped_release release;
    std::atomic<size_t> next{0};
    auto work = [&](int) {
      for (size_t i; (i = next.fetch_add(1)) < parts;)
        sums[i] = checksum(bytes.data() + i * kPart, std::min(kPart, bytes.size() - i * kPart));
    };
    pool != nullptr ? pool->run(work) : work(0);
  }
  return {sums, {parts}, owner};
}

}  // namespace

void bind_mapping(nb::module_& m) {
  nb::class_<Mapping>(m, "Mapping")
      .def(
          "__init__",
          [](Mapping* self, int file, size_t bytes) {
            require(bytes > 0, "an empty file cannot be mapped");
            try {
              const nb::gil_scoped_release release;
              new (self) Mapping{std::make_shared<const Memory>(Memory::map(file, bytes)), bytes};
            } catch (const std::system_error& error) {
              errno = error.code().value();
              PyErr_SetFromErrno(PyExc_OSError);
              throw nb::python_error();
            }
          },
          nb::arg("file"), nb::arg("bytes"))
      .def_prop_ro(
          "data",
          [](const Mapping& self) {
            return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(self.memory->as<const uint8_t>(), {self.bytes});
          },
          nb::rv_policy::reference_internal);
  m.def("checksums", &checksums, nb::arg("bytes"), nb::arg("pool").none());
}

}  // namespace octavo
