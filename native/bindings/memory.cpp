// Long-lived objects: threads, packed weights, caches.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <tuple>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "octavo/decode.h"
#include "octavo/kernels.h"
#include "octavo/kv_cache.h"
#include "octavo/matrix.h"
#include "octavo/thread_pool.h"

namespace octavo {
namespace {

using Release = nb::call_guard<nb::gil_scoped_release>;
// (raw bytes, type, rows, row_order): a TensorSource of ops/api.py.
using Source = std::tuple<Bytes, std::string, int64_t, std::optional<Ints1D>>;

std::vector<MatrixSource> matrix_sources(const std::vector<Source>& arrays, int64_t columns) {
  std::vector<MatrixSource> sources;
  for (const auto& [bytes, type, rows, row_order] : arrays) {
    const SourceType parsed = source_type(type);
    require(static_cast<int64_t>(bytes.size()) >= rows * static_cast<int64_t>(row_bytes(parsed, columns)),
            "a source has fewer bytes than its rows need");
    require(!row_order || static_cast<int64_t>(row_order->size()) == rows,
            "row_order must have one entry for each row");
    sources.push_back({bytes.data(), parsed, rows, row_order ? row_order->data() : nullptr});
  }
  return sources;
}

std::vector<float> bias_values(const std::optional<Floats1D>& bias, const std::vector<MatrixSource>& sources) {
  if (!bias) return {};
  int64_t rows = 0;
  for (const MatrixSource& source : sources) rows += source.rows;
  require(static_cast<int64_t>(bias->size()) == rows, "bias must have one entry for each row");
  return std::vector<float>(bias->data(), bias->data() + bias->size());
}

void make_matrix(Matrix* self, ThreadPool& pool, Arena& arena, const std::vector<Source>& arrays, int64_t columns,
                 const std::string& dtype, const std::string& storage, std::optional<Floats1D> bias) {
  const std::vector<MatrixSource> sources = matrix_sources(arrays, columns);
  std::vector<float> values = bias_values(bias, sources);
  const DType parsed = parse_dtype(dtype);
  const Storage kept = parse_storage(storage);
  nb::gil_scoped_release release;
  new (self) Matrix(pool, arena, sources, columns, parsed, kept, std::move(values));
}

Matrix packed_matrix(const PackedWeights& packed, size_t offset, const std::vector<Source>& arrays, int64_t columns,
                     const std::string& dtype, const std::string& storage, std::optional<Floats1D> bias) {
  require(offset % 64 == 0, "a packed matrix begins at a multiple of 64 bytes");
  const std::vector<MatrixSource> sources = matrix_sources(arrays, columns);
  return Matrix::packed(packed.memory, offset, sources, columns, parse_dtype(dtype), parse_storage(storage),
                        bias_values(bias, sources));
}

void check_block(const KVBlocks& blocks, int64_t block) {
  require(block >= 0 && block < blocks.num_blocks(), "a block must be one of the cache's");
}

}  // namespace

void bind_memory(nb::module_& m) {
  nb::class_<ThreadPool>(m, "ThreadPool")
      .def(nb::init<int, std::vector<int>>(), nb::arg("num_threads"), nb::arg("cpus") = std::vector<int>())
      .def_prop_ro("size", &ThreadPool::size);

  nb::class_<Arena>(m, "Arena").def(nb::init<>());

  nb::class_<Matrix>(m, "Matrix")
      .def("__init__", make_matrix, nb::arg("pool"), nb::arg("arena"), nb::arg("sources"), nb::arg("columns"),
           nb::arg("dtype"), nb::arg("storage"), nb::arg("bias").none())
      .def_static("packed", packed_matrix, nb::arg("mapping"), nb::arg("offset"), nb::arg("sources"),
                  nb::arg("columns"), nb::arg("dtype"), nb::arg("storage"), nb::arg("bias").none())
      .def_static(
          "random",
          [](ThreadPool& pool, Arena& arena, int64_t rows, int64_t columns, const std::string& dtype,
             const std::string& storage, uint64_t seed, float scale) {
            return Matrix::random(pool, arena, rows, columns, parse_dtype(dtype), parse_storage(storage), seed, scale);
          },
          Release())
      .def_prop_ro("shape", [](const Matrix& self) { return std::make_tuple(self.rows(), self.columns()); })
      .def_prop_ro("dtype",
                   [](const Matrix& self) {
                     constexpr const char* kNames[] = {"float32", "bfloat16", "int8", "int16"};
                     return kNames[static_cast<int>(self.dtype())];
                   })
      .def_prop_ro("format", &Matrix::format)
      .def_prop_ro("nbytes", &Matrix::bytes)
      .def_prop_ro(
          "data",
          [](const Matrix& self) {
            return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(self.packed(), {self.bytes()});
          },
          nb::rv_policy::reference_internal)
      .def("reads_rows_of", &reads_rows_of)
      .def("leaves_packed_silu_mul", &leaves_packed_silu_mul)
      .def_prop_ro("can_fuse_silu_mul", &can_fuse_silu_mul);

  nb::class_<KVCache>(m, "KVCache");

  nb::class_<KVBlocks>(m, "KVBlocks")
      .def("__init__",
           [](KVBlocks* self, int64_t num_layers, int64_t num_blocks, int64_t block_size, int64_t num_kv_heads,
              int64_t head_dim, const std::string& dtype) {
             new (self) KVBlocks({num_blocks, block_size, num_kv_heads, head_dim, parse_dtype(dtype)}, num_layers);
           })
      .def_prop_ro("block_bytes", &KVBlocks::block_bytes)
      .def(
          "layer", [](const KVBlocks& self, size_t i) -> const KVCache& { return self.layers().at(i); },
          nb::rv_policy::reference_internal)
      .def(
          "copy_block",
          [](const KVBlocks& self, int64_t from, int64_t to, int64_t num_tokens) {
            check_block(self, from);
            check_block(self, to);
            require(num_tokens > 0 && num_tokens <= self.block_size(), "a copy has tokens of one block");
            self.copy_block(from, to, num_tokens);
          },
          nb::arg("from_block"), nb::arg("to_block"), nb::arg("num_tokens"))
      .def(
          "save_block",
          [](const KVBlocks& self, int64_t block, MutableBytes out) {
            check_block(self, block);
            require(static_cast<int64_t>(out.size()) == self.block_bytes(), "a block has block_bytes bytes");
            std::memcpy(out.data(), self.block(block), out.size());
          },
          nb::arg("block"), nb::arg("out"))
      .def(
          "load_block",
          [](const KVBlocks& self, int64_t block, Bytes bytes) {
            check_block(self, block);
            require(static_cast<int64_t>(bytes.size()) == self.block_bytes(), "a block has block_bytes bytes");
            std::memcpy(self.block(block), bytes.data(), bytes.size());
          },
          nb::arg("block"), nb::arg("bytes"));

  m.def(
      "decode",
      [](const std::string& type, Bytes data, int64_t rows, int64_t columns) {
        const SourceType parsed = source_type(type);
        const size_t stride = row_bytes(parsed, columns);
        require(data.size() >= rows * stride, "fewer bytes than the rows need");
        float* out = new float[rows * columns];
        for (int64_t r = 0; r < rows; ++r) decode_row(parsed, data.data() + r * stride, out + r * columns, columns);
        nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
        return nb::ndarray<nb::numpy, float, nb::ndim<2>>(
            out, {static_cast<size_t>(rows), static_cast<size_t>(columns)}, owner);
      },
      nb::arg("type"), nb::arg("data"), nb::arg("rows"), nb::arg("columns"));
}

}  // namespace octavo
