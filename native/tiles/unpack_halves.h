// The way of octavo/halves.h from codes to bfloat16, 32 values an instruction. Half precision needs half of the
// operations of float32 here, and three cheap ones (multiply-add, shift with rounding, mask) do what conversions take
// some six for: 24 ns instead of 56 for a group of 32 columns.
#pragma once

#include <immintrin.h>

#include "octavo/halves.h"
#include "octavo/matrix.h"
#include "tiles/tile.h"

namespace octavo {

// Inputs of products with what is unpacked here.
struct BlockInputTile : BFloat16Tile {
  static void store_operands(Operand* out, Vec x) {
    BFloat16Tile::store_operands(out, x * Vec::set1(HalfScaling::kInputFactor));
  }
};

// Of formats with scales in halves.
template <class Format>
struct HalfUnpacker {
  using Group = PanelGroup<Format>;
  static constexpr int64_t kStep = Group::kColumns * 2;  // bf16 of a step

  // out [16 steps][32 columns][2], aligned to lines. Every line that is read is followed by a fetch of the one `ahead`
  // bytes behind it.
  static void unpack(const uint8_t* group, int64_t ahead, bf16* out) {
    const Scales scales(group + Group::kCodeBytes);
    for (int64_t line = Group::kCodeBytes; line < Group::kBytes; line += 64) fetch(group + ahead + line);
#pragma GCC unroll 16
    for (int64_t j = 0; j < Group::kCodeBytes / 64; ++j) {
      const __m512i codes = _mm512_load_si512(group + 64 * j);
      fetch(group + ahead + 64 * j);
      const int64_t v = j % 2, s = j / 2 * kSteps;
      store_steps(codes, scales, v, s, out + s * kStep + v * 32);
    }
  }

 private:
  static constexpr int64_t kSteps = 16 / Format::kBits;  // of a vector of codes
  static constexpr int64_t kMinimums = Format::kMinimum ? 1 : Format::kScales;

  // Each column's twice, for two k: of the two vectors of columns.
  struct Scales {
    __m512h scale[2][Format::kScales], offset[2][kMinimums];

    explicit Scales(const uint8_t* at) {
#pragma GCC unroll 2
      for (int i = 0; i < Format::kScales; ++i) {
        load_twice(at + 64 * i, scale[0][i], scale[1][i]);
        if (Format::kMinimum) continue;
        // scale * (code - zero) = scale * code - scale * zero
        const __m512h zero = splat(static_cast<float>(-Format::kZero) * unit());
        for (int v = 0; v < 2; ++v) offset[v][i] = _mm512_mul_ph(scale[v][i], zero);
      }
      if (Format::kMinimum) load_twice(at + 64 * Format::kScales, offset[0][0], offset[1][0]);
    }
    static void load_twice(const uint8_t* at, __m512h& low, __m512h& high) {
      const __m512i x = _mm512_load_si512(at);
      low = _mm512_castsi512_ph(_mm512_unpacklo_epi16(x, x));
      high = _mm512_castsi512_ph(_mm512_unpackhi_epi16(x, x));
    }
  };

  // The steps from s on of vector v: they stand in `codes` as CodePlace::in_halves says.
  static void store_steps(__m512i codes, const Scales& scales, int64_t v, int64_t s, bf16* out) {
    const int64_t i = s * Format::kScales / 16;
    const __m512h scale = scales.scale[v][i], offset = scales.offset[v][Format::kMinimum ? 0 : i];
    if constexpr (Format::kBits == 4) {
      // Four of the bits that are read are worth 16 times the others.
      const __m512h less = _mm512_mul_ph(scale, splat(1.0f / 16));
      const __m512i upper = _mm512_set1_epi16(0x3c0), lower = _mm512_set1_epi16(0x3c);
      const __m512i turned = _mm512_ror_epi32(codes, 8);
      store(out, _mm512_and_si512(codes, upper), less, offset);
      store(out + kStep, _mm512_and_si512(codes, lower), scale, offset);
      store(out + 2 * kStep, _mm512_and_si512(turned, upper), less, offset);
      store(out + 3 * kStep, _mm512_and_si512(turned, lower), scale, offset);
    } else {
      store(out, _mm512_and_si512(codes, _mm512_set1_epi16(0xff)), scale, offset);
      store(out + kStep, _mm512_srli_epi16(codes, 8), scale, offset);
    }
  }

  static void store(bf16* out, __m512i codes, __m512h scale, __m512h offset) {
    const __m512h value = _mm512_fmadd_ph(_mm512_castsi512_ph(codes), scale, offset);
    // (x + 4) >> 3, which spreads the sign over the four highest bits.
    const __m512i rounded = _mm512_mulhrs_epi16(_mm512_castph_si512(value), _mm512_set1_epi16(1 << 12));
    _mm512_store_si512(out, _mm512_and_si512(rounded, _mm512_set1_epi16(static_cast<int16_t>(0x8fff))));
  }

  static float unit() { return std::ldexp(1.0f, HalfScaling::unit(Format::kBits)); }
  static __m512h splat(float x) { return _mm512_set1_ph(static_cast<half>(x)); }
  // Not __builtin_prefetch: in loops of vectors gcc takes it for without effect, and deletes it.
  static void fetch(const uint8_t* line) { asm volatile("prefetcht1 %0" ::"m"(*line)); }
};

}  // namespace octavo
