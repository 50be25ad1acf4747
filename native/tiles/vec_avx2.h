// Sixteen floats in two AVX2 registers: the same interface as vec_avx512.h for machines without AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

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
  void store(float* p) const {
    _mm256_storeu_ps(p, a);
    _mm256_storeu_ps(p + 8, b);
  }
  void store(float* p, int n) const {
    _mm256_maskstore_ps(p, mask(n), a);
    _mm256_maskstore_ps(p + 8, mask(n - 8), b);
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
  // Nearest integer, ties to even.
  friend Vec round(Vec x) {
    return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  // x * 2^n for integral n in [-126, 127].
  friend Vec scale2(Vec x, Vec n) { return {_mm256_mul_ps(x.a, power2(n.a)), _mm256_mul_ps(x.b, power2(n.b))}; }
  // The first n lanes of x, then `fill`.
  friend Vec first(Vec x, int n, float fill) {
    const __m256 f = _mm256_set1_ps(fill);
    return {_mm256_blendv_ps(f, x.a, _mm256_castsi256_ps(mask(n))),
            _mm256_blendv_ps(f, x.b, _mm256_castsi256_ps(mask(n - 8)))};
  }

 private:
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
  static __m256 power2(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  }
};

// Sixteen pairs of bf16: the weight or key side of a pair product.
struct Pairs {
  __m256i a, b;
  static Pairs load(const bf16* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16))};
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
inline Vec dot(Vec acc, Pairs w, const PairOperand* p) {
  const __m256i high_half = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  const Vec low{_mm256_castsi256_ps(_mm256_slli_epi32(w.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(w.b, 16))};
  const Vec high{_mm256_castsi256_ps(_mm256_and_si256(w.a, high_half)),
                 _mm256_castsi256_ps(_mm256_and_si256(w.b, high_half))};
  return fma(high, Vec::set1(p->odd), fma(low, Vec::set1(p->even), acc));
}

}  // namespace octavo
