// Sixteen floats in one AVX-512 register: vectors, packed codes and pairs for the variants that have it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "octavo/blocks.h"
#include "octavo/types.h"

namespace octavo {

struct Vec {
  __m512 v;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec set1(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load(const float* p, int n) { return {_mm512_maskz_loadu_ps(mask(n), p)}; }
  static Vec load(const bf16* p) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
  }
  static Vec load(const half* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
  // Eight values, each in two lanes.
  static Vec load_twice(const float* p) { return twice(_mm256_loadu_ps(p)); }
  static Vec load_twice(const half* p) {
    return twice(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(float* p, int n) const { _mm512_mask_storeu_ps(p, mask(n), v); }
  void stream(float* p) const { _mm512_stream_ps(p, v); }  // past the caches; p at a line
  void store(bf16* p) const {
    // Round to nearest even in integers: the same bits on every variant (vcvtneps2bf16 would flush denormals).
    const __m512i x = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7fff)), odd), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    r = _mm512_mask_mov_epi32(r, nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
  }

  friend Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
  friend Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
  friend Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  friend Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
  friend Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
  friend Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
  friend float largest(Vec a) { return _mm512_reduce_max_ps(a.v); }
  // A bit for each lane: a == b.
  friend uint32_t equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
  // a > b, or not comparable.
  friend uint32_t not_up_to(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NLE_UQ); }
  // Lanes of integers in [-128, 127] as bytes.
  void store_int8(int8_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
  }
  // Nearest integer, ties to even.
  friend Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  // a minus the next lower integer: in [0, 1], and 0 for infinity.
  friend Vec fraction(Vec a) { return {_mm512_reduce_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
  // a * 2^floor(x) for x < 128; zero or subnormal for x < -126.
  friend Vec scale2(Vec a, Vec x) { return {_mm512_scalef_ps(a.v, x.v)}; }
  // Lane i and lane i + 8, then i and i + 4, and so on.
  friend float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
  // The first n lanes of a, then `fill`.
  friend Vec first(Vec a, int n, float fill) { return {_mm512_mask_mov_ps(_mm512_set1_ps(fill), mask(n), a.v)}; }

  static Vec twice(__m256 x) {
    const __m512i lanes = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return {_mm512_permutexvar_ps(lanes, _mm512_castps256_ps512(x))};
  }
  static __mmask16 mask(int n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1); }
};

// Lane i: the lanes of x[i], combined by `op`, which goes two vectors at a time and lane by lane.
template <class Op>
[[gnu::always_inline]] inline Vec combine_each(const Vec (&x)[16], Op op) {
  Vec eight[8], four[4], two[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    eight[i] = op(Vec{_mm512_unpacklo_ps(x[i].v, x[i + 8].v)}, Vec{_mm512_unpackhi_ps(x[i].v, x[i + 8].v)});
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    four[i] =
        op(Vec{_mm512_unpacklo_ps(eight[i].v, eight[i + 4].v)}, Vec{_mm512_unpackhi_ps(eight[i].v, eight[i + 4].v)});
  const auto quarters = [&](Vec a, Vec b) {
    return op(Vec{_mm512_shuffle_f32x4(a.v, b.v, 0x88)}, Vec{_mm512_shuffle_f32x4(a.v, b.v, 0xdd)});
  };
  for (int i = 0; i < 2; ++i) two[i] = quarters(four[i], four[i + 2]);
  const __m512i order = _mm512_setr_epi32(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
  return {_mm512_permutexvar_ps(order, quarters(two[0], two[1]).v)};
}
inline Vec largest_of_each(const Vec (&x)[16]) {
  return combine_each(x, [](Vec a, Vec b) { return max(a, b); });
}
inline Vec sum_of_each(const Vec (&x)[16]) {  // of small integers: exact in any order
  return combine_each(x, [](Vec a, Vec b) { return a + b; });
}

// Sixteen dwords of packed codes.
struct Codes {
  __m512i v;
  static Codes load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
  // The 4 bits from bit kShift of each dword on.
  template <int kShift>
  Vec nibble() const {
    // A look-up: vpermps reads the low four bits of each lane and nothing else.
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(v, kShift), table)};
  }
  template <int kShift>
  Vec byte() const {
    return {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(v, kShift), _mm512_set1_epi32(0xff)))};
  }
  // What `mask` leaves of each dword shifted right.
  Vec bits(int shift, int mask) const {
    const __m512i shifted = _mm512_srl_epi32(v, _mm_cvtsi32_si128(shift));
    return {_mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(mask)))};
  }
  // The low and the high half of every byte.
  Codes low() const { return {_mm512_and_si512(v, _mm512_set1_epi8(15))}; }
  Codes high() const { return {_mm512_and_si512(_mm512_srli_epi32(v, 4), _mm512_set1_epi8(15))}; }
};

// Rounds to bf16 (nearest even): out [32].
inline void store_both(bf16* out, Vec first, Vec second) {
#ifdef __AVX512BF16__
  // Zeroes what is subnormal, as every product of this variant does with it anyway.
  _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v));
#else
  first.store(out);
  second.store(out + 16);
#endif
}

// Rounds to bf16 (nearest even) and interleaves: pair i is even[i], odd[i].
inline void store_interleaved(bf16* out, Vec even, Vec odd) {
#ifdef __AVX512BF16__
  // Zeroes what is subnormal, as every product of this variant does with it anyway.
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd.v, even.v);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i order = _mm512_or_si512(lane, _mm512_slli_epi32(_mm512_or_si512(lane, _mm512_set1_epi32(16)), 16));
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(order, halves));
#else
  alignas(64) uint16_t low[16], high[16];
  even.store(reinterpret_cast<bf16*>(low));
  odd.store(reinterpret_cast<bf16*>(high));
  const auto widen = [](const uint16_t* h) {
    return _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(h)));
  };
  _mm512_storeu_si512(out, _mm512_or_si512(widen(low), _mm512_slli_epi32(widen(high), 16)));
#endif
}

// Sixteen pairs of bf16: the weight or key side of a pair product.
struct Pairs {
  __m512i v;
  static Pairs load(const bf16* p) { return {_mm512_loadu_si512(p)}; }
  Vec even() const { return {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16))}; }
  Vec odd() const {
    return {_mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
  }
};

// The other side of a pair product, in the form in which a tile broadcasts it.
#ifdef __AVX512BF16__
using PairOperand = uint32_t;  // two bf16, the even k in the low half
// Sixteen floats -> eight operands. Zeroes what is subnormal, as the product does with it anyway.
inline void store_pairs(PairOperand* out, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(x.v));
}
inline void store_pairs(PairOperand* out, Vec first, Vec second) {
  store_both(reinterpret_cast<bf16*>(out), first, second);
}
inline Vec dot(Vec acc, Pairs w, const PairOperand* a) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.v, (__m512bh)_mm512_set1_epi32(static_cast<int>(*a)))};
}
#else
struct PairOperand {
  float even, odd;  // rounded to bf16
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
inline Vec dot(Vec acc, Pairs w, const PairOperand* a) {
  return fma(w.odd(), Vec::set1(a->odd), fma(w.even(), Vec::set1(a->even), acc));
}
#endif

}  // namespace octavo
