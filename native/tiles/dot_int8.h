// Integer dot products of a group: sixteen columns of codes (bytes, unsigned) times one row's eight dwords of int8
// activations. The sums are exact integers, so that every variant, however it makes them, has the same bits.
#pragma once

#include <cstring>

#include "tiles/vec.h"

namespace octavo {

inline int32_t load_dword(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

#if defined(__AVX512VNNI__)

// Sum over k of (code - kZero) * activation, for sixteen columns. `start(from)`: where kStarts, `from` points to -kZero
// times the sum of the activations that will come.
template <int kBits, int kZero>
struct GroupSum {
  static constexpr bool kStarts = kZero != 0;
  __m512i v;
  void start(const int32_t* from) { v = kStarts ? _mm512_set1_epi32(*from) : _mm512_setzero_si512(); }
  void add(Codes bytes, const int8_t* four) {
    v = _mm512_dpbusd_epi32(v, bytes.v, _mm512_set1_epi32(load_dword(four)));
  }
  Vec value() const { return {_mm512_cvtepi32_ps(v)}; }
};

#else

// vpmaddubsw multiplies unsigned by signed bytes and adds pairs with saturation. Codes of at most 63 never reach it;
// those of eight bits are multiplied as sign and magnitude. Sixteen-bit sums of 4-bit codes hold a whole group.
#if defined(__AVX512F__)
struct Lanes {
  __m512i v;
  static Lanes zero() { return {_mm512_setzero_si512()}; }
  static Lanes of(Codes codes) { return {codes.v}; }
  static Lanes set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
  friend Lanes add16(Lanes a, Lanes b) { return {_mm512_add_epi16(a.v, b.v)}; }
  friend Lanes add32(Lanes a, Lanes b) { return {_mm512_add_epi32(a.v, b.v)}; }
  friend Lanes pair_products(Lanes codes, Lanes a) { return {_mm512_maddubs_epi16(codes.v, a.v)}; }
  friend Lanes add_pairs(Lanes x) { return {_mm512_madd_epi16(x.v, _mm512_set1_epi16(1))}; }
  friend Lanes toggle(Lanes x) { return {_mm512_xor_si512(x.v, _mm512_set1_epi8(static_cast<char>(0x80)))}; }
  friend Lanes magnitude(Lanes x) { return {_mm512_abs_epi8(x.v)}; }
  friend Lanes with_sign(Lanes a, Lanes sign) {
    return {_mm512_mask_sub_epi8(a.v, _mm512_movepi8_mask(sign.v), _mm512_setzero_si512(), a.v)};
  }
  Vec to_float() const { return {_mm512_cvtepi32_ps(v)}; }
};
#else
struct Lanes {
  __m256i a, b;
  static Lanes zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static Lanes of(Codes codes) { return {codes.a, codes.b}; }
  static Lanes set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  friend Lanes add16(Lanes x, Lanes y) { return {_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)}; }
  friend Lanes add32(Lanes x, Lanes y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
  friend Lanes pair_products(Lanes codes, Lanes y) {
    return {_mm256_maddubs_epi16(codes.a, y.a), _mm256_maddubs_epi16(codes.b, y.b)};
  }
  friend Lanes add_pairs(Lanes x) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(x.a, ones), _mm256_madd_epi16(x.b, ones)};
  }
  friend Lanes toggle(Lanes x) {
    const __m256i top = _mm256_set1_epi8(static_cast<char>(0x80));
    return {_mm256_xor_si256(x.a, top), _mm256_xor_si256(x.b, top)};
  }
  friend Lanes magnitude(Lanes x) { return {_mm256_abs_epi8(x.a), _mm256_abs_epi8(x.b)}; }
  friend Lanes with_sign(Lanes x, Lanes sign) { return {_mm256_sign_epi8(x.a, sign.a), _mm256_sign_epi8(x.b, sign.b)}; }
  Vec to_float() const { return {_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)}; }
};
#endif

template <int kBits, int kZero>
struct GroupSum {
  static constexpr bool kSigned = kZero == 128, kStarts = kZero && !kSigned;
  Lanes sum16, sum32;
  void start(const int32_t* from) {
    if (kBits == 4) sum16 = Lanes::zero();
    sum32 = kStarts ? Lanes::set1(*from) : Lanes::zero();
  }
  void add(Codes bytes, const int8_t* four) {
    const Lanes a = Lanes::set1(load_dword(four));
    if (kSigned) {
      const Lanes w = toggle(Lanes::of(bytes));
      sum32 = add32(sum32, add_pairs(pair_products(magnitude(w), with_sign(a, w))));
    } else if (kBits == 4) {
      sum16 = add16(sum16, pair_products(Lanes::of(bytes), a));
    } else {
      sum32 = add32(sum32, add_pairs(pair_products(Lanes::of(bytes), a)));
    }
  }
  Vec value() const { return (kBits == 4 ? add32(sum32, add_pairs(sum16)) : sum32).to_float(); }
};

#endif

}  // namespace octavo
