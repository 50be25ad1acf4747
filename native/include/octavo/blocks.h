// Quantised values: integer codes in groups of 32 along K, and for each group of a row a scale, perhaps two, perhaps a
// minimum:
//
//   value = scale * (code - zero)     or     value = scale * code + minimum
//
// All block types of a checkpoint come down to this, and what is quantised at load becomes one of them (int8: Q8_0,
// int4: Q4_1). Owns what each type needs, and the way from a row to codes; how panels hold them is octavo/matrix.h's.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "octavo/decode.h"

namespace octavo {

inline constexpr int64_t kGroup = 32;

using half = _Float16;

// How packed panels keep one block type. Codes have 4 or 8 bits (those of 5 and 6 bits take 8); scales keep the width
// in which their values are exact: those of the K types are products of a half and six bits.
template <int kBits_, int kZero_, bool kMinimum_, class Scale_, int kScales_>
struct BlockFormat {
  static constexpr int kBits = kBits_;
  static constexpr int kZero = kZero_;
  static constexpr bool kMinimum = kMinimum_;
  using Scale = Scale_;
  static constexpr int kScales = kScales_;  // of a group, each for an equal part of it
};

// Calls f(BlockFormat<...>()) with the format of a block type.
template <class F>
decltype(auto) with_block_format(SourceType type, F&& f) {
  switch (type) {
    case SourceType::kQ4_0:
      return f(BlockFormat<4, 8, false, half, 1>());
    case SourceType::kQ4_1:
      return f(BlockFormat<4, 0, true, half, 1>());
    case SourceType::kQ5_0:
      return f(BlockFormat<8, 16, false, half, 1>());
    case SourceType::kQ5_1:
      return f(BlockFormat<8, 0, true, half, 1>());
    case SourceType::kQ8_0:
      return f(BlockFormat<8, 128, false, half, 1>());
    case SourceType::kQ4_K:
      return f(BlockFormat<4, 0, true, float, 1>());
    case SourceType::kQ5_K:
      return f(BlockFormat<8, 0, true, float, 1>());
    case SourceType::kQ6_K:
      return f(BlockFormat<8, 32, false, float, 2>());
    default:
      throw std::invalid_argument("not a block type");
  }
}

inline bool is_block_type(SourceType type) { return type >= SourceType::kQ4_0; }

// A row in codes: `codes` [columns rounded up to whole groups], `scales` [groups][kScales], `minimums` [groups] (zeros
// where the type has none).
struct CodedRow {
  uint8_t* codes;
  float *scales, *minimums;
};

// The codes of a row of a block type: nothing is lost.
void split_row(SourceType type, const uint8_t* row, int64_t columns, CodedRow out);

// Quantises a row of floats to kQ8_0 (scale: the largest magnitude over 127, so that zero stays zero) or kQ4_1 (scale
// and minimum span the values of the group), scales and minimums rounded to half, codes to the nearest.
void quantise_row(SourceType type, const float* row, int64_t columns, CodedRow out);

// Quantises a row of floats (whole groups) to codes in [-127, 127], and returns their one scale.
float quantise_row(const float* row, int64_t columns, int8_t* codes);

}  // namespace octavo
