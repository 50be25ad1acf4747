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

  // Sixteen operands; their low bytes `plane` operands behind the high ones. A code lies in [-32639, 32639].
  static void store_block(Operand* out, int64_t plane, const Integers (&x)[kStep]) {
    const __m512i a = _mm512_packs_epi32(x[0].v, x[1].v), b = _mm512_packs_epi32(x[2].v, x[3].v);
    const auto high = [](__m512i c) { return _mm512_srai_epi16(_mm512_add_epi16(c, _mm512_set1_epi16(128)), 8); };
    const auto low = [](__m512i c) { return _mm512_and_si512(c, _mm512_set1_epi16(255)); };
    store_bytes(out, _mm512_packs_epi16(high(a), high(b)));
    store_bytes(out + plane, _mm512_packus_epi16(low(a), low(b)));
  }

 private:
  // Packing took four dwords of four vectors by turns.
  static void store_bytes(Operand* out, __m512i bytes) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i offset = _mm512_set1_epi32(static_cast<int>(kOffset));
    _mm512_storeu_si512(out, _mm512_xor_si512(_mm512_permutexvar_epi32(order, bytes), offset));
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

  static void store_block(Operand* out, int64_t, const Integers (&x)[kStep]) {
    for (const Integers& vector : x) {
      int32_t whole[16];
      vector.store(whole);
      for (int i = 0; i < 4; ++i, ++out) {
        const auto pair = [&](int k) { return (whole[4 * i + k] & 0xffff) | whole[4 * i + k + 2] << 16; };
        *out = {pair(0), pair(1)};
      }
    }
  }
};

#endif

}  // namespace octavo
