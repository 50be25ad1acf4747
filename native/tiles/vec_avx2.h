// Sixteen floats in two AVX2 registers: the same interface as vec_avx512.h for machines without AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "octavo/blocks.h"
#include "octavo/types.h"

namespace octavo {

struct Vec {
  __m256 a, b;

  static Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static Vec load(const float* p, int n) {
    return {_mm256_maskload_ps(p, mask(n)), _mm256_maskload_ps(p + 8, mask(n - 8))};
  }
  static Vec load(const bf16* p) { return {widen(p), widen(p + 8)}; }
  static Vec load(const half* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
  }
  // Eight values, each in two lanes.
  static Vec load_twice(const float* p) { return twice(_mm256_loadu_ps(p)); }
  static Vec load_twice(const half* p) {
    return twice(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  void store(float* p) const {
    _mm256_storeu_ps(p, a);
    _mm256_storeu_ps(p + 8, b);
  }
  void store(float* p, int n) const {
    _mm256_maskstore_ps(p, mask(n), a);
    _mm256_maskstore_ps(p + 8, mask(n - 8), b);
  }
  void stream(float* p) const {  // past the caches; p at a line
    _mm256_stream_ps(p, a);
    _mm256_stream_ps(p + 8, b);
  }
  void store(bf16* p) const {
    narrow(p, a);
    narrow(p + 8, b);
  }

  friend Vec operator+(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  friend Vec operator-(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  friend Vec operator*(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  friend Vec operator/(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  friend Vec fma(Vec x, Vec y, Vec z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
  friend Vec max(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
  friend Vec min(Vec x, Vec y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
  friend Vec abs(Vec x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
  }
  friend float largest(Vec x) {
    const __m256 m = _mm256_max_ps(x.a, x.b);
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
  }
  // A bit for each lane: x == y.
  friend uint32_t equal(Vec x, Vec y) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ)) |
                                 _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)) << 8);
  }
  // x > y, or not comparable.
  friend uint32_t not_up_to(Vec x, Vec y) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_NLE_UQ)) |
                                 _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_NLE_UQ)) << 8);
  }
  // Lanes of integers in [-128, 127] as bytes.
  void store_int8(int8_t* p) const {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));  // lanes 0 2 1 3
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
  }
  // Nearest integer, ties to even.
  friend Vec round(Vec x) {
    return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  // x minus the next lower integer: in [0, 1], and 0 for x <= -127.
  friend Vec fraction(Vec x) { return {fraction(x.a), fraction(x.b)}; }
  // x * 2^floor(y) for y < 128; zero for y < -126.
  friend Vec scale2(Vec x, Vec y) { return {_mm256_mul_ps(x.a, power2(y.a)), _mm256_mul_ps(x.b, power2(y.b))}; }
  // Lane i and lane i + 8, then i and i + 4, and so on.
  friend float sum(Vec x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  // The first n lanes of x, then `fill`.
  friend Vec first(Vec x, int n, float fill) {
    const __m256 f = _mm256_set1_ps(fill);
    return {_mm256_blendv_ps(f, x.a, _mm256_castsi256_ps(mask(n))),
            _mm256_blendv_ps(f, x.b, _mm256_castsi256_ps(mask(n - 8)))};
  }

 private:
  static Vec twice(__m256 x) {
    return {_mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
            _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
  }
  static __m256i mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static __m256 widen(const bf16* p) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
  }
  static void narrow(bf16* p, __m256 v) {
    // Round to nearest even in integers, as everywhere.
    const __m256i x = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(nan));
    const __m128i h = _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), h);
  }
  static __m256 at_least(__m256 x, float least) { return _mm256_max_ps(_mm256_set1_ps(least), x); }  // NaN stays
  static __m256 fraction(__m256 x) {
    const __m256 bounded = at_least(x, -127.0f);
    return _mm256_sub_ps(bounded, _mm256_floor_ps(bounded));
  }
  static __m256 power2(__m256 x) {
    const __m256i n = _mm256_cvtps_epi32(_mm256_floor_ps(at_least(x, -127.0f)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }
};

// Lane i: that of the lanes of x[i].
inline Vec largest_of_each(const Vec (&x)[16]) {
  float out[16];
  for (int i = 0; i < 16; ++i) out[i] = largest(x[i]);
  return Vec::load(out);
}
inline Vec sum_of_each(const Vec (&x)[16]) {
  float out[16];
  for (int i = 0; i < 16; ++i) out[i] = sum(x[i]);
  return Vec::load(out);
}

// Sixteen dwords of packed codes.
struct Codes {
  __m256i a, b;
  static Codes load(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
  }
  // The 4 bits from bit kShift of each dword on.
  template <int kShift>
  Vec nibble() const {
    return bits(kShift, 15);
  }
  template <int kShift>
  Vec byte() const {
    return bits(kShift, 255);
  }
  // What `mask` leaves of each dword shifted right.
  Vec bits(int shift, int mask) const {
    const __m128i count = _mm_cvtsi32_si128(shift);
    const __m256i m = _mm256_set1_epi32(mask);
    return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(a, count), m)),
            _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(b, count), m))};
  }
  // The low and the high half of every byte.
  Codes low() const {
    const __m256i m = _mm256_set1_epi8(15);
    return {_mm256_and_si256(a, m), _mm256_and_si256(b, m)};
  }
  Codes high() const {
    const __m256i m = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_srli_epi32(a, 4), m), _mm256_and_si256(_mm256_srli_epi32(b, 4), m)};
  }
};

// Rounds to bf16 (nearest even): out [32].
inline void store_both(bf16* out, Vec first, Vec second) {
  first.store(out);
  second.store(out + 16);
}

// Rounds to bf16 (nearest even) and interleaves: pair i is even[i], odd[i].
inline void store_interleaved(bf16* out, Vec even, Vec odd) {
  alignas(32) uint16_t low[16], high[16];
  even.store(reinterpret_cast<bf16*>(low));
  odd.store(reinterpret_cast<bf16*>(high));
  for (int i = 0; i < 16; i += 8) {
    const auto widen = [](const uint16_t* h) {
      return _mm256_cvtepu16_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(h)));
    };
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 2 * i),
                        _mm256_or_si256(widen(low + i), _mm256_slli_epi32(widen(high + i), 16)));
  }
}

// Sixteen pairs of bf16: the weight or key side of a pair product.
struct Pairs {
  __m256i a, b;
  static Pairs load(const bf16* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16))};
  }
  Vec even() const {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  }
  Vec odd() const {
    const __m256i high_half = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    return {_mm256_castsi256_ps(_mm256_and_si256(a, high_half)), _mm256_castsi256_ps(_mm256_and_si256(b, high_half))};
  }
};

// The other side of a pair product, in the form in which a tile broadcasts it: two floats, rounded to bf16.
struct PairOperand {
  float even, odd;
};
// Sixteen floats -> eight operands.
inline void store_pairs(PairOperand* out, Vec x) {
  bf16 rounded[16];
  x.store(rounded);
  Vec::load(rounded).store(&out->even);
}
inline void store_pairs(PairOperand* out, Vec first, Vec second) {
  store_pairs(out, first);
  store_pairs(out + 8, second);
}
inline Vec dot(Vec acc, Pairs w, const PairOperand* p) {
  return fma(w.odd(), Vec::set1(p->odd), fma(w.even(), Vec::set1(p->even), acc));
}

}  // namespace octavo
