// From a group of a block panel (octavo/matrix.h), or a block of a compact one, to sixteen steps of a plain bfloat16
// panel. Packed weights are thus read at a quarter to three quarters of the bytes and then multiplied by the same
// tiles. Codes become values in half precision where the variant has that; else in float32, which gives the bits that
// the matrix would have had, had it been unpacked at load. Compact blocks give the plain panel's bits.
#pragma once

#include <utility>

#include "octavo/matrix.h"
#include "tiles/tile.h"
#ifdef __AVX512FP16__
#include "tiles/unpack_halves.h"
#endif
#ifdef __AVX512BF16__
#include "tiles/unpack_compact.h"
#endif

namespace octavo {

#ifdef __AVX512FP16__

template <class Format>
using GroupUnpacker = HalfUnpacker<InHalves<Format>>;

#else

// Inputs of products with what is unpacked here.
using BlockInputTile = BFloat16Tile;

template <class Format>
struct GroupUnpacker {
  using Group = PanelGroup<Format>;
  using Scale = typename Format::Scale;
  static constexpr int64_t kStep = Group::kColumns * 2;  // bf16 of a step

  // out [16 steps][32 columns][2]. Every line that is read is followed by a fetch of the one `ahead` bytes behind it.
  static void unpack(const uint8_t* group, int64_t ahead, bf16* out) {
#pragma GCC unroll 2
    for (int64_t v = 0; v < 2; ++v) unpack_columns(group, v, ahead, out + v * 32);
    for (int64_t line = Group::kCodeBytes; line < Group::kBytes; line += 64)
      __builtin_prefetch(group + ahead + line, 0, 2);
  }

 private:
  // The columns of vector v of a step.
  static void unpack_columns(const uint8_t* group, int64_t v, int64_t ahead, bf16* out) {
    const auto* scales = reinterpret_cast<const Scale*>(group + Group::kCodeBytes) + v * 16;
    Vec scale[2][Format::kScales], offset[2][Format::kScales];  // of the first and the last eight columns
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h)
#pragma GCC unroll 2
      for (int i = 0; i < Format::kScales; ++i) {
        scale[h][i] = Vec::load_twice(scales + i * Group::kColumns + h * 8);
        // scale * (code - zero) = scale * code - scale * zero: the products are exact, the sum is rounded once.
        offset[h][i] = Format::kMinimum ? Vec::load_twice(scales + (i + Format::kScales) * Group::kColumns + h * 8)
                                        : scale[h][i] * Vec::set1(static_cast<float>(-Format::kZero));
      }
    constexpr int64_t kSteps = 32 / Format::kBits;  // of a dword of codes
#pragma GCC unroll 4
    for (int64_t j = 0; j < 16 / kSteps; ++j) {
      const uint8_t* vectors = group + (v * 16 / kSteps + j) * 128;
      const Codes first = Codes::load(vectors), second = Codes::load(vectors + 64);
      __builtin_prefetch(vectors + ahead, 0, 2);
      __builtin_prefetch(vectors + ahead + 64, 0, 2);
      const auto step = [&]<int kStepOfDword>() __attribute__((always_inline)) {
        const int64_t s = j * kSteps + kStepOfDword, i = s * Format::kScales / 16;
        store_both(out + s * kStep, fma(code<kStepOfDword>(first), scale[0][i], offset[0][i]),
                   fma(code<kStepOfDword>(second), scale[1][i], offset[1][i]));
      };
      [&]<int... S>(std::integer_sequence<int, S...>) __attribute__((always_inline)) {
        (step.template operator()<S>(), ...);
      }(std::make_integer_sequence<int, kSteps>());
    }
  }

  template <int kIndex>
  static Vec code(Codes codes) {
    if constexpr (Format::kBits == 4)
      return codes.template nibble<4 * kIndex>();
    else
      return codes.template byte<8 * kIndex>();
  }
};

#endif

// Calls f(unpack) where unpack(g, out) unpacks group g of panel p, in ascending order from `first` on; `ahead`: bytes
// by which to fetch the stream early.
template <class F>
void with_unpacker(const Matrix& weight, int64_t p, [[maybe_unused]] int64_t first, int64_t ahead, F&& f) {
#ifdef __AVX512BF16__
  if (weight.is_compact()) return f(CompactUnpacker(weight, p, first, ahead));
#endif
  with_block_format(weight.block_type(p), [&]<class Format>(Format) {
    using Unpacker = GroupUnpacker<Format>;
    f([panel = weight.block_panel(p), ahead](int64_t g, bf16* out)
          __attribute__((always_inline)) { Unpacker::unpack(panel + g * Unpacker::Group::kBytes, ahead, out); });
  });
}

// Groups [begin, end) of panel p.
inline void unpack_groups(const Matrix& weight, int64_t p, int64_t begin, int64_t end, int64_t ahead, bf16* out) {
  constexpr int64_t kSize = Matrix::kBlockSteps * Matrix::kPanelColumns * 2;
  with_unpacker(weight, p, begin, ahead, [&](auto unpack) {
    for (int64_t g = begin; g < end; ++g, out += kSize) unpack(g, out);
  });
}

}  // namespace octavo
