// The multiply tile of a narrow matrix: float32 activations times weights that are exact in bfloat16, products and sums
// in float32.
#pragma once

#include <limits>

#include "tiles/tile.h"
#ifdef __AMX_BF16__
#include "tiles/amx.h"
#endif

namespace octavo {

#ifdef __AMX_BF16__

// A float is the sum of three bfloat16 numbers, of eight significant bits each, so its product with a weight is the sum
// of three products that the tile unit computes exactly. A row becomes three rows of operands: [block][plane][row][16].
// What is subnormal counts as zero, as in every product of this unit.
struct NarrowTile {
  using Weight = bf16;
  using Operand = PairOperand;
  static constexpr int kStep = 2, kPlanes = 3;

  // 32 activations; their parts `plane` operands apart, the highest first.
  static void store_operands(Operand* out, int64_t plane, Vec first, Vec second) {
    for (int i = 0; i < kPlanes; ++i, out += plane) {
      const Vec a = upper_half(first), b = upper_half(second);
      _mm512_storeu_si512(out, upper_halves(a, b));
      first = rest(first, a);
      second = rest(second, b);
    }
  }

  // The accumulators of AmxAccumulators += operands [blocks][plane][rows][16 steps] * weights [blocks][16 steps][32
  // columns]. The three parts of a block of activations meet a block of weights one after the other, so that it is
  // loaded once. Otherwise as AmxAccumulators::add.
  static void add(int64_t rows, const Operand* operands, const Weight* weights, int64_t num_blocks, Prefetch prefetch,
                  bool once) {
    using Sums = AmxAccumulators;
    constexpr int kRowBytes = kBlockSteps * sizeof(Operand);
    static_assert(kRowBytes == 64);
    asm volatile("" ::: "memory");
    for (int64_t b = 0; b < num_blocks; ++b, weights += Sums::kBlockBytes / sizeof(Weight)) {
      prefetch.quarter(b, 0);
      Sums::load_left(weights, once);
      Sums::load_right(weights, once);
      for (int plane = 0; plane < kPlanes; ++plane, operands += rows * kBlockSteps) {
        _tile_loadd(4, operands, kRowBytes);
        prefetch.quarter(b, plane + 1);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (rows <= 16) continue;
        _tile_loadd(5, operands + 16 * kBlockSteps, kRowBytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }

 private:
  // Cut, not rounded: no finite value becomes infinite. A NaN stays one.
  static Vec upper_half(Vec x) {
    const __m512i cut = _mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(static_cast<int>(0xffff0000)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    return {_mm512_castsi512_ps(_mm512_mask_mov_epi32(cut, nan, _mm512_set1_epi32(0x7fc00000)))};
  }
  // What the upper half leaves of x, exactly; nothing where x is not finite.
  static Vec rest(Vec x, Vec upper) {
    const __mmask16 finite =
        _mm512_cmp_ps_mask(abs(x).v, _mm512_set1_ps(std::numeric_limits<float>::infinity()), _CMP_LT_OQ);
    return {_mm512_maskz_sub_ps(finite, x.v, upper.v)};
  }
  static __m512i upper_halves(Vec first, Vec second) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    // Words 1, 3, 5 … 63 of both.
    const __m512i even = _mm512_add_epi32(_mm512_slli_epi32(lane, 2), _mm512_set1_epi32(1));
    const __m512i order = _mm512_or_si512(even, _mm512_slli_epi32(_mm512_add_epi32(even, _mm512_set1_epi32(2)), 16));
    return _mm512_permutex2var_epi16(_mm512_castps_si512(first.v), order, _mm512_castps_si512(second.v));
  }
};

template <>
inline int64_t num_operands<NarrowTile>(int64_t rows, int64_t columns) {
  return NarrowTile::kPlanes * num_operands<BFloat16Tile>(rows, columns);
}

template <>
inline void pack_row<NarrowTile>(const float* x, int64_t columns, int64_t rows, PairOperand* out) {
  const auto load = [&](int64_t k) {
    const int n = static_cast<int>(std::clamp<int64_t>(columns - k, 0, 16));
    return Vec::load(x + (n ? k : 0), n);
  };
  for (int64_t k = 0; k < columns; k += 32, out += NarrowTile::kPlanes * rows * kBlockSteps)
    NarrowTile::store_operands(out, rows * kBlockSteps, load(k), load(k + 16));
}

#else

// Weights are widened as they are loaded: the bits of a matrix that is kept in float32.
struct NarrowTile {
  using Weight = bf16;
  struct Operand {
    float even, odd;
  };
  struct Weights {
    Vec even, odd;
  };
  using Sum = Vec;
  static constexpr int kStep = 2;

  static Weights load(const Weight* w) {
    const Pairs pairs = Pairs::load(w);
    return {pairs.even(), pairs.odd()};
  }
  static Vec multiply_add(Vec acc, Weights w, const Operand* a) {
    return fma(w.odd, Vec::set1(a->odd), fma(w.even, Vec::set1(a->even), acc));
  }
  static void store_operands(Operand* out, Vec x) { x.store(&out->even); }
};

#endif

}  // namespace octavo
