// NumPy arrays as the kernels' views, with their shapes checked.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "octavo/attention.h"
#include "octavo/memory.h"
#include "octavo/types.h"

namespace octavo {

namespace nb = nanobind;

using Floats2D = nb::ndarray<float, nb::numpy, nb::ndim<2>, nb::device::cpu>;
using Floats1D = nb::ndarray<const float, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstFloats2D = nb::ndarray<const float, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints1D = nb::ndarray<const int32_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints2D = nb::ndarray<const int32_t, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutableBytes = nb::ndarray<uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

// Matrices as they lay packed in an earlier process, one behind the other.
struct PackedWeights {
  std::shared_ptr<const Memory> memory;
  size_t bytes;
};

// The logits of a step, as the program left them.
struct LogitRows {
  View view;
};

inline View view(const Floats2D& array) {
  require(array.size() == 0 || array.shape(1) == 1 || array.stride(1) == 1,
          "the columns of an array must be contiguous");
  return {array.data(), static_cast<int64_t>(array.shape(0)), static_cast<int64_t>(array.shape(1)),
          static_cast<int64_t>(array.stride(0))};
}

// The arrays of a Batch (ops/api.py), kept alive for as long as the kernels read them: those given, or `ints`.
struct StepArrays {
  StepArrays(Ints1D token_ids, Ints1D positions, Ints1D slot_mapping, Ints1D query_start, Ints1D seq_lens,
             Ints2D block_tables, Ints1D logit_rows);
  StepArrays(std::vector<int32_t> ints, const Step& step) : ints(std::move(ints)), step(step) {}

  Ints1D token_ids, positions, slot_mapping, query_start, seq_lens;
  Ints2D block_tables;
  Ints1D logit_rows;
  std::vector<int32_t> ints;
  Step step;
};

}  // namespace octavo
