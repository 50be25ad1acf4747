// Vec: sixteen floats, in whatever registers the variant has; Pairs: sixteen pairs of bf16. Kernels are written once,
// against these. Sums are made lane by lane and folded in one fixed tree, so that all widths give the same bits.
#pragma once

#ifdef __AVX512F__
#include "tiles/vec_avx512.h"
#else
#include "tiles/vec_avx2.h"
#endif

namespace octavo {

// e^x with a relative error below 2e-7 for x in [-87, 88], clamped outside (so that e^-inf is 1e-38, which vanishes in
// any sum): x = n ln 2 + r with |r| <= ln 2 / 2, and a polynomial in r (Cody and Waite's reduction, a minimax fit).
inline Vec exp(Vec x) {
  x = min(max(x, Vec::set1(-87.0f)), Vec::set1(88.0f));
  const Vec n = round(x * Vec::set1(1.44269504f));
  Vec r = fma(n, Vec::set1(-0.693359375f), x);
  r = fma(n, Vec::set1(2.12194440e-4f), r);
  Vec p = Vec::set1(1.9875691500e-4f);
  p = fma(p, r, Vec::set1(1.3981999507e-3f));
  p = fma(p, r, Vec::set1(8.3334519073e-3f));
  p = fma(p, r, Vec::set1(4.1665795894e-2f));
  p = fma(p, r, Vec::set1(1.6666665459e-1f));
  p = fma(p, r, Vec::set1(5.0000001201e-1f));
  return scale2(fma(p, r * r, r + Vec::set1(1.0f)), n);
}

// 2^x with a relative error below 1.5e-7 for x < 128, exact for integers; below 2^-126 it is subnormal or zero. x = n +
// r with 0 <= r < 1, and a minimax polynomial in r.
inline Vec exp2(Vec x) {
  const Vec r = fraction(x);
  Vec p = Vec::set1(1.867130079e-3f);
  p = fma(p, r, Vec::set1(9.017030296e-3f));
  p = fma(p, r, Vec::set1(5.579991313e-2f));
  p = fma(p, r, Vec::set1(2.401644501e-1f));
  p = fma(p, r, Vec::set1(6.931513118e-1f));
  return scale2(fma(p, r, Vec::set1(1.0f)), x);
}

inline Vec silu(Vec x) { return x / (Vec::set1(1.0f) + exp(Vec::zero() - x)); }

}  // namespace octavo
