// Element types, views, and the share of work of one thread. Plain C++: includes nothing of Python or of a vector unit.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string_view>

namespace octavo {

struct bf16 {
  uint16_t bits;
};

// Round to nearest even; a NaN stays one.
inline bf16 to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if (x != x) return {0x7fc0};
  return {static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline float to_float(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

enum class DType { kFloat32, kBFloat16, kInt8, kInt16 };

DType parse_dtype(std::string_view name);  // throws std::invalid_argument

// float32 [rows, columns], rows `stride` floats apart; or, in their place, what a product makes of them
// (kernels/packed_rows.h).
struct View {
  float* data;
  int64_t rows, columns, stride;
  float packed = 0;  // by what they are multiplied there; 0: float32
  float* row(int64_t i) const { return data + i * stride; }
};

// One of `count` threads that share a kernel's work. What a thread computes never depends on count, only who does.
struct Worker {
  int index, count;
  struct Range {
    int64_t begin, end;
  };
  Range share(int64_t total) const { return {total * index / count, total * (index + 1) / count}; }
};

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

}  // namespace octavo
