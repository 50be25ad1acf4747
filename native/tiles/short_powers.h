// Powers of two as products in bfloat16 need them: thirty-two at once, in integers of 16 bits. A float32 power has
// three times the operations, most of them on the one port that the tile unit leaves to multiplications.
#pragma once

#include <immintrin.h>

#include "tiles/vec.h"

namespace octavo {

// 2^x in bfloat16, for x that come multiplied by kUnit. Up to a factor that all have in common the relative error is
// that of rounding to bfloat16 (2^-9) and one of 2^-10 that comes before; what is below 2^-32 is 2^-32. A NaN counts
// as that, too.
struct ShortPowers {
  static constexpr float kUnit = 1024;
  __m512i words;  // in order

  // With x = n + f: 2^f = 1 + f - f (1 - f) (0.305 + 0.078 f), so n + f less that correction, in units of the last
  // place, is the bfloat16 number but for the bias of its exponent.
  static ShortPowers of(Vec first, Vec second) {
    const __m512i x = _mm512_packs_epi32(_mm512_cvtps_epi32(first.v), _mm512_cvtps_epi32(second.v));
    const __m512i f = _mm512_slli_epi16(x, 6), rest = _mm512_sub_epi16(_mm512_setzero_si512(), f);
    const __m512i slope = _mm512_add_epi16(_mm512_mulhi_epu16(f, _mm512_set1_epi16(80)), _mm512_set1_epi16(312));
    const __m512i correction = _mm512_mulhi_epu16(_mm512_mulhi_epu16(f, rest), slope);
    const __m512i places =
        _mm512_srai_epi16(_mm512_add_epi16(_mm512_sub_epi16(x, correction), _mm512_set1_epi16(4)), 3);
    const __m512i powers = _mm512_add_epi16(places, _mm512_set1_epi16(127 << 7));
    return {_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), powers)};
  }
  // Zeros behind the first n.
  ShortPowers first(int64_t n) const { return {_mm512_maskz_mov_epi16(n >= 32 ? 0xffffffff : (1u << n) - 1, words)}; }
  void store(PairOperand* out) const { _mm512_storeu_si512(out, words); }
  // Each even one plus the next.
  Vec pair_sums() const {
    const Vec even{_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))};
    return even + Vec{_mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
  }
};

}  // namespace octavo
