// The multiply tile of int8 weights and int16 activations. The sum of a product comes out as two integers,
// 256 * high + low, and is exact however a variant makes it: all have the same bits.
#pragma once

#include "tiles/integers.h"
#include "tiles/tile.h"

namespace octavo {

// 256 * high + low of sixteen sums, rounded once: of 48 bits the lower 16 and those above them are exact as floats.
inline Vec joined(const int32_t* high, const int32_t* low) {
  const Integers h = Integers::load(high), l = Integers::load(low);
  const Integers upper = (h + l.shift_right<8>()).shift_right<8>();
  const Integers lower = (h.shift_left<8>() + l) & Integers::set1(0xffff);
  return fma(upper.to_float(), Vec::set1(65536.0f), lower.to_float());
}

#if defined(__AVX512VNNI__)

// Bytes are multiplied. An activation is 256 * high + low, both in [-128, 127]; its row is two rows of operands, all of
// the high bytes and then all of the low ones.
struct Int16Tile {
  using Weight = int8_t;
  using Operand = int32_t;  // four bytes
  using Weights = Integers;
  using Sum = Integers;
  static constexpr int kStep = 4, kPlanes = 2;
  static constexpr int64_t kMaxSteps = Matrix::kMaxInt8Columns / kStep;
#ifdef __AMX_INT8__
  static constexpr uint32_t kOffset = 0;
#else
  static constexpr uint32_t kOffset = 0x80808080;  // vpdpbusd takes unsigned bytes: 128 more
#endif

  // What 128 more in every byte adds to the products is taken off beforehand.
  static Sum start(const int32_t* weight_sums) {
    return Integers::zero() - Integers::load(weight_sums).shift_left<7>();
  }
  static Weights load(const Weight* w) { return Integers::load(w); }
  static Sum multiply_add(Sum sum, Weights w, const Operand* a) {
    return {_mm512_dpbusd_epi32(sum.v, _mm512_set1_epi32(*a), w.v)};
  }
  // `high`: where the sum of this row of operands belongs.
  static void store(Sum sum, bool, int32_t* high, int64_t) { sum.store(high); }

  // Sixteen activations, integers; their low bytes `plane` operands behind the high ones.
  static void store_operands(Operand* out, int64_t plane, Integers x) {
    const __m128i offset = _mm_set1_epi32(static_cast<int>(kOffset));
    const Integers high = (x + Integers::set1(128)).shift_right<8>();
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_xor_si128(high.low_bytes(), offset));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + plane), _mm_xor_si128(x.low_bytes(), offset));
  }
};

#else

// Pairs of 16 bits are multiplied, of four k first the even and then the odd ones.
struct Int16Tile {
  using Weight = int8_t;
  struct Operand {
    int32_t even, odd;
  };
  struct Weights {
    Integers even, odd;
  };
  using Sum = Integers;
  static constexpr int kStep = 4, kPlanes = 1;
  static constexpr int64_t kMaxSteps = 128;  // 512 products of 15 and 7 bits fit a sum, it is split behind them

  static Sum start(const int32_t*) { return Integers::zero(); }
  static Weights load(const Weight* w) {
    const Integers bytes = Integers::load(w);
    return {bytes.even_bytes(), bytes.odd_bytes()};
  }
  static Sum multiply_add(Sum sum, Weights w, const Operand* a) {
    return sum + pair_products(w.even, Integers::set1(a->even)) + pair_products(w.odd, Integers::set1(a->odd));
  }
  static void store(Sum sum, bool first, int32_t* high, int64_t plane) {
    Integers upper = sum.shift_right<8>(), lower = sum & Integers::set1(255);
    if (!first) {
      upper = upper + Integers::load(high);
      lower = lower + Integers::load(high + plane);
    }
    upper.store(high);
    lower.store(high + plane);
  }

  static void store_operands(Operand* out, int64_t, Integers x) {
    int32_t whole[16];
    x.store(whole);
    for (int i = 0; i < 4; ++i, ++out) {
      const auto pair = [&](int k) { return (whole[4 * i + k] & 0xffff) | whole[4 * i + k + 2] << 16; };
      *out = {pair(0), pair(1)};
    }
  }
};

#endif

}  // namespace octavo
