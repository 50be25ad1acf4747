// Sixteen floats in one AVX-512 register. The only file of the float kernels with AVX-512 intrinsics.
#pragma once

#include <immintrin.h>

#include <cstdint>

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
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(float* p, int n) const { _mm512_mask_storeu_ps(p, mask(n), v); }
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
  // Nearest integer, ties to even.
  friend Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  // a * 2^n for integral n in [-126, 127].
  friend Vec scale2(Vec a, Vec n) {
    const __m512i e = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
    return {_mm512_mul_ps(a.v, _mm512_castsi512_ps(e))};
  }
  // The first n lanes of a, then `fill`.
  friend Vec first(Vec a, int n, float fill) { return {_mm512_mask_mov_ps(_mm512_set1_ps(fill), mask(n), a.v)}; }

  static __mmask16 mask(int n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1); }
};

// Sixteen pairs of bf16: the weight or key side of a pair product.
struct Pairs {
  __m512i v;
  static Pairs load(const bf16* p) { return {_mm512_loadu_si512(p)}; }
};

// The other side of a pair product, in the form in which a tile broadcasts it.
#ifdef __AVX512BF16__
using PairOperand = uint32_t;  // two bf16, the even k in the low half
// Sixteen floats -> eight operands.
inline void store_pairs(PairOperand* out, Vec x) { x.store(reinterpret_cast<bf16*>(out)); }
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
inline Vec dot(Vec acc, Pairs w, const PairOperand* a) {
  const Vec low{_mm512_castsi512_ps(_mm512_slli_epi32(w.v, 16))};
  const Vec high{_mm512_castsi512_ps(_mm512_and_si512(w.v, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
  return fma(high, Vec::set1(a->odd), fma(low, Vec::set1(a->even), acc));
}
#endif

}  // namespace octavo
