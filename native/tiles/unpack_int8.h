// Pairs of int8 codes as the bfloat16 that they are: what a product of pairs reads.
#pragma once

#include "tiles/vec.h"

namespace octavo {

// [2][16] codes -> [16][2]. Exact: an integer of eight bits leaves the lower half of its float32 empty.
inline void unpack_pairs(const int8_t* codes, bf16* out) {
#ifdef __AVX512F__
  const auto widen = [](const int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
  };
  _mm512_storeu_si512(out, _mm512_or_si512(_mm512_srli_epi32(widen(codes), 16), widen(codes + 16)));
#else
  const auto widen = [](const int8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
  };
  for (int i = 0; i < 16; i += 8)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 2 * i),
                        _mm256_or_si256(_mm256_srli_epi32(widen(codes + i), 16), widen(codes + 16 + i)));
#endif
}

}  // namespace octavo
