// Block panels of a variant that calculates in half precision (AVX512-FP16), for products with bfloat16 activations:
// how their scales are kept, and by which powers of two inputs and outputs differ from what they stand for. The way
// from codes to bfloat16 is tiles/unpack_halves.h's.
//
// A code of a panel is read as a half as it lies, in the low bits of 16: it is subnormal then, code * 2^unit. What is
// unpacked is
//
//   w' = scale' * (code * 2^unit) + minimum'     where scale' = scale / 2^(t + unit), minimum' = minimum / 2^t
//
// in one rounding, so that w' stands for w = 2^t * w'. The power t is its column's: the largest for which neither the
// largest scale' nor the largest minimum' leaves a half's range. That costs nothing where scales are halves themselves,
// and rounds those of the K types, which are products, to eleven bits.
//
// Half and bfloat16 differ in the bias of the exponent by 112. The bits of w', three of its mantissa rounded off, are
// those of 2^-112 * w' in bfloat16; what was subnormal in half is so in bfloat16, where the tile unit takes it for
// zero. To stay in float32's range, inputs are multiplied by 2^64, and sums by what is left: 2^(t + 48).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "octavo/blocks.h"

namespace octavo {

#ifdef __AVX512FP16__
inline constexpr bool kUnpacksInHalves = true;
#else
inline constexpr bool kUnpacksInHalves = false;
#endif

// A block type with the scales of such panels.
template <class Format>
using InHalves = BlockFormat<Format::kBits, Format::kZero, Format::kMinimum, half, Format::kScales>;

struct HalfScaling {
  static constexpr float kInputFactor = 0x1p64f;
  static constexpr int kOutputPower = 112 - 64;
  // The lowest four bits of a half that are not its last two, or its lowest eight.
  static constexpr int unit(int bits) { return bits == 4 ? -22 : -24; }

  // Of the 32 columns of a panel, two vectors of 16: where among its scales that of column c stands. The lower and the
  // upper halves of its 128-bit lanes are then one vector's, and can be doubled within the lanes.
  static constexpr int64_t place(int64_t c) { return c % 16 / 4 * 8 + c / 16 * 4 + c % 4; }

  // Of a column: what its scales, minimums and sums are multiplied by. All sums are NaN where one of the first two is
  // not finite.
  float of_scales, of_minimums, of_sums;

  static HalfScaling of_column(int bits, float largest_scale, float largest_minimum) {
    if (!std::isfinite(largest_scale) || !std::isfinite(largest_minimum))
      return {0, 0, std::numeric_limits<float>::quiet_NaN()};
    int t = -100;  // of nothing but zeros
    if (largest_scale > 0) t = std::max(t, exponent(largest_scale) - 16 - unit(bits));
    if (largest_minimum > 0) t = std::max(t, exponent(largest_minimum) - 14);
    return {std::ldexp(1.0f, -t - unit(bits)), std::ldexp(1.0f, -t), std::ldexp(1.0f, t + kOutputPower)};
  }
  // The way back to what was packed.
  static HalfScaling back(int bits, float of_sums) {
    const float of_minimums = of_sums * std::ldexp(1.0f, -kOutputPower);
    return {of_minimums * std::ldexp(1.0f, unit(bits)), of_minimums, 1};
  }

 private:
  // The power of two above x, and above what it may be rounded to in half.
  static int exponent(float x) {
    int e;
    std::frexp(x * (1 + 0x1p-11f), &e);
    return e;
  }
};

}  // namespace octavo
