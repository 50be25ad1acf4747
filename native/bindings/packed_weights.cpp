// A file of packed weights in memory, and how damage to it is found.
//
// The file is read, not mapped: a file's pages are small in most file systems, and where they are large they are rarely
// mapped as such. Memory of our own comes in pages of 2 MB, over which a decoding step streams an eighth faster.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <utility>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "octavo/checksum.h"
#include "octavo/thread_pool.h"

namespace octavo {
namespace {

// A part of the data with a checksum of its own, so that threads can share the work.
constexpr size_t kPart = size_t{1} << 20;
constexpr size_t kReadBytes = size_t{2} << 20;  // at a time: a large page, which one thread touches first

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

// The first `bytes` of a file, by all threads. 0, or an error of the system.
int read_file(int file, char* to, size_t bytes, ThreadPool& pool) {
  std::atomic<size_t> next{0};
  std::atomic<int> error{0};
  pool.run([&](int) {
    for (size_t part; error == 0 && (part = next.fetch_add(kReadBytes)) < bytes;) {
      const size_t end = std::min(part + kReadBytes, bytes);
      for (size_t at = part; at < end;) {
        const ssize_t count = pread(file, to + at, end - at, static_cast<off_t>(at));
        if (count > 0)
          at += static_cast<size_t>(count);
        else if (count == 0 || errno != EINTR) {
          error = count == 0 ? EIO : errno;  // the file is shorter than it was
          return;
        }
      }
    }
  });
  return error;
}

}  // namespace

void bind_packed_weights(nb::module_& m) {
  nb::class_<PackedWeights>(m, "PackedWeights")
      .def(
          "__init__",
          [](PackedWeights* self, int file, size_t bytes, ThreadPool& pool) {
            require(bytes > 0, "an empty file has no packed weights");
            auto memory = std::make_shared<const Memory>(bytes);
            int error = 0;
            {
              const nb::gil_scoped_release release;
              error = read_file(file, memory->as<char>(), bytes, pool);
            }
            if (error != 0) {
              errno = error;
              PyErr_SetFromErrno(PyExc_OSError);
              throw nb::python_error();
            }
            new (self) PackedWeights{std::move(memory), bytes};
          },
          nb::arg("file"), nb::arg("bytes"), nb::arg("pool"))
      .def_prop_ro(
          "data",
          [](const PackedWeights& self) {
            return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(self.memory->as<const uint8_t>(), {self.bytes});
          },
          nb::rv_policy::reference_internal);
  m.def("checksums", &checksums, nb::arg("bytes"), nb::arg("pool").none());
}

}  // namespace octavo
