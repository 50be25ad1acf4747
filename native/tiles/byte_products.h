// Products of bytes as fast as the instruction set makes them, and nothing else: the yardstick of limits.cpp.
#pragma once

#include <cstdint>

#include "tiles/vec.h"
#ifdef __AMX_INT8__
#include "tiles/amx.h"
#endif

namespace octavo {

// As many bytes as lie in the first cache together with as many others.
inline constexpr int64_t kByteOperands = 16384;

// Adds up products of `columns` and `rows` (kByteOperands each), over and over, in `steps` steps; the sums go to `out`
// (kByteSums). Returns how many products there were.
inline constexpr int64_t kByteSums = 4096;
#if defined(__AMX_INT8__)

inline int64_t multiply_bytes(const uint8_t* rows, const uint8_t* columns, int64_t steps, uint8_t* out) {
  constexpr int kTile = 1024, kRow = 64;
  const AmxSession session;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t at = step * 2 * kTile % kByteOperands;
    _tile_loadd(4, rows + at, kRow);
    _tile_loadd(5, rows + at + kTile, kRow);
    _tile_loadd(6, columns + at, kRow);
    _tile_loadd(7, columns + at + kTile, kRow);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_stored(0, out, kRow);
  _tile_stored(1, out + kTile, kRow);
  _tile_stored(2, out + 2 * kTile, kRow);
  _tile_stored(3, out + 3 * kTile, kRow);
  return steps * 4 * 16 * 16 * 64;
}

#else

#if defined(__AVX512BW__)
using ByteLanes = __m512i;
inline ByteLanes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(uint8_t* p, ByteLanes x) { _mm512_storeu_si512(p, x); }
inline ByteLanes repeat_dword(const uint8_t* p) { return _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(p)); }
#if defined(__AVX512VNNI__)
inline ByteLanes add_products(ByteLanes sum, ByteLanes x, ByteLanes y) { return _mm512_dpbusd_epi32(sum, x, y); }
#else
inline ByteLanes add_products(ByteLanes sum, ByteLanes x, ByteLanes y) {
  return _mm512_add_epi16(sum, _mm512_maddubs_epi16(x, y));
}
#endif
#else
using ByteLanes = __m256i;
inline ByteLanes load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store_bytes(uint8_t* p, ByteLanes x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
inline ByteLanes repeat_dword(const uint8_t* p) { return _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(p)); }
inline ByteLanes add_products(ByteLanes sum, ByteLanes x, ByteLanes y) {
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(x, y));
}
#endif

inline int64_t multiply_bytes(const uint8_t* rows, const uint8_t* columns, int64_t steps, uint8_t* out) {
  constexpr int kRows = 4, kVectors = sizeof(ByteLanes) == 64 ? 4 : 2;  // sums that fit the registers
  constexpr int64_t kStep = kVectors * sizeof(ByteLanes), kStepsOfPass = kByteOperands / kStep;
  const int64_t passes = steps / kStepsOfPass;
  ByteLanes sums[kRows][kVectors] = {};
  for (int64_t pass = 0; pass < passes; ++pass) {
#pragma GCC unroll 8
    for (int64_t at = 0; at < kByteOperands; at += kStep) {
      ByteLanes weights[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) weights[v] = load_bytes(columns + at + v * sizeof(ByteLanes));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const ByteLanes row = repeat_dword(rows + at + 4 * r);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] = add_products(sums[r][v], weights[v], row);
      }
    }
  }
  // Unrolled too: otherwise the sums live in memory.
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store_bytes(out + (r * kVectors + v) * sizeof(ByteLanes), sums[r][v]);
  return passes * kStepsOfPass * kRows * kVectors * static_cast<int64_t>(sizeof(ByteLanes));
}

#endif

}  // namespace octavo
