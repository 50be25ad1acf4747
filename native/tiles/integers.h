// Integers: sixteen of 32 bits, in whatever registers the variant has, and what products of int16 need of them.
#pragma once

#include <algorithm>

#include "tiles/vec.h"

namespace octavo {

#ifdef __AVX512F__

struct Integers {
  __m512i v;

  static Integers zero() { return {_mm512_setzero_si512()}; }
  static Integers set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
  static Integers load(const void* p) { return {_mm512_loadu_si512(p)}; }
  void store(void* p) const { _mm512_storeu_si512(p, v); }
  // To the nearest, ties to even.
  static Integers rounded(Vec x) { return {_mm512_cvtps_epi32(x.v)}; }
  static Integers bits_of(Vec x) { return {_mm512_castps_si512(x.v)}; }
  Vec to_float() const { return {_mm512_cvtepi32_ps(v)}; }

  friend Integers operator+(Integers x, Integers y) { return {_mm512_add_epi32(x.v, y.v)}; }
  friend Integers operator-(Integers x, Integers y) { return {_mm512_sub_epi32(x.v, y.v)}; }
  friend Integers operator&(Integers x, Integers y) { return {_mm512_and_si512(x.v, y.v)}; }
  friend Integers max(Integers x, Integers y) { return {_mm512_max_epi32(x.v, y.v)}; }
  friend int32_t largest(Integers x) { return _mm512_reduce_max_epi32(x.v); }
  template <int kBits>
  Integers shift_left() const {
    return {_mm512_slli_epi32(v, kBits)};
  }
  template <int kBits>
  Integers shift_right() const {  // keeps the sign
    return {_mm512_srai_epi32(v, kBits)};
  }

  // Of four bytes those with even and with odd index, as two of 16 bits; the products of such pairs, added.
  Integers even_bytes() const { return {_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8)}; }
  Integers odd_bytes() const { return {_mm512_srai_epi16(v, 8)}; }
  friend Integers pair_products(Integers x, Integers y) { return {_mm512_madd_epi16(x.v, y.v)}; }
};

#else

struct Integers {
  __m256i a, b;

  static Integers zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static Integers set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static Integers load(const void* p) {
    const auto* at = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
  }
  void store(void* p) const {
    auto* at = static_cast<__m256i*>(p);
    _mm256_storeu_si256(at, a);
    _mm256_storeu_si256(at + 1, b);
  }
  static Integers rounded(Vec x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
  static Integers bits_of(Vec x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
  Vec to_float() const { return {_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)}; }

  friend Integers operator+(Integers x, Integers y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
  friend Integers operator&(Integers x, Integers y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
  friend Integers max(Integers x, Integers y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
  friend int32_t largest(Integers x) {
    int32_t lanes[16];
    x.store(lanes);
    return *std::max_element(lanes, lanes + 16);
  }
  template <int kBits>
  Integers shift_left() const {
    return {_mm256_slli_epi32(a, kBits), _mm256_slli_epi32(b, kBits)};
  }
  template <int kBits>
  Integers shift_right() const {
    return {_mm256_srai_epi32(a, kBits), _mm256_srai_epi32(b, kBits)};
  }

  Integers even_bytes() const {
    return {_mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8)};
  }
  Integers odd_bytes() const { return {_mm256_srai_epi16(a, 8), _mm256_srai_epi16(b, 8)}; }
  friend Integers pair_products(Integers x, Integers y) {
    return {_mm256_madd_epi16(x.a, y.a), _mm256_madd_epi16(x.b, y.b)};
  }
};

#endif

}  // namespace octavo
