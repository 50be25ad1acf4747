// From a group of a block panel (octavo/matrix.h) to sixteen steps of a plain bfloat16 panel: the bits that the matrix
// would have had, had it been unpacked at load. Packed weights are thus read at a quarter or half of the bytes and then
// multiplied by the same tiles.
#pragma once

#include "octavo/matrix.h"
#include "tiles/vec.h"

namespace octavo {

template <class Format>
struct GroupUnpacker {
  using Group = PanelGroup<Format>;
  using Scale = typename Format::Scale;
  static constexpr int64_t kColumns = Group::kColumns;
  static constexpr int64_t kStep = kColumns * 2;  // bf16 of a step

  // out [16 steps][32 columns][2].
  static void unpack(const uint8_t* group, bf16* out) {
#pragma GCC unroll 2
    for (int64_t v = 0; v < kColumns / 16; ++v) unpack_vector(group, v, out + v * 32);
  }

 private:
  static void unpack_vector(const uint8_t* group, int64_t v, bf16* out) {
    const auto* scales = reinterpret_cast<const Scale*>(group + Group::kCodeBytes) + v * 16;
    Vec scale[Format::kScales], offset[Format::kScales];
#pragma GCC unroll 2
    for (int i = 0; i < Format::kScales; ++i) {
      scale[i] = Vec::load(scales + i * kColumns);
      // scale * (code - zero) = scale * code - scale * zero: the products are exact, the sum is rounded once.
      offset[i] = Format::kMinimum ? Vec::load(scales + (i + Format::kScales) * kColumns)
                                   : scale[i] * Vec::set1(static_cast<float>(-Format::kZero));
    }
#pragma GCC unroll 8
    for (int64_t j = 0; j < Group::kVectors; ++j) {
      const Codes codes = Codes::load(group + (j * kColumns + v * 16) * 4);
      const auto store = [&](int64_t step, Vec even, Vec odd) __attribute__((always_inline)) {
        const int64_t i = step * Format::kScales / 16;
        store_interleaved(out + step * kStep, fma(even, scale[i], offset[i]), fma(odd, scale[i], offset[i]));
      };
      if constexpr (Format::kBits == 4) {
        store(2 * j, codes.nibble<0>(), codes.nibble<8>());
        store(2 * j + 1, codes.nibble<16>(), codes.nibble<24>());
        store(2 * j + 8, codes.nibble<4>(), codes.nibble<12>());
        store(2 * j + 9, codes.nibble<20>(), codes.nibble<28>());
      } else {
        store(2 * j, codes.byte<0>(), codes.byte<8>());
        store(2 * j + 1, codes.byte<16>(), codes.byte<24>());
      }
    }
  }
};

// Groups [begin, end) of panel p; `ahead`: bytes by which to fetch the stream early.
inline void unpack_groups(const Matrix& weight, int64_t p, int64_t begin, int64_t end, int64_t ahead, bf16* out) {
  with_block_format(weight.block_type(p), [&]<class Format>(Format) {
    using Unpacker = GroupUnpacker<Format>;
    constexpr int64_t kBytes = PanelGroup<Format>::kBytes;
    const uint8_t* group = weight.block_panel(p) + begin * kBytes;
    for (int64_t g = begin; g < end; ++g, group += kBytes, out += 16 * Unpacker::kStep) {
      for (int64_t line = 0; line < kBytes; line += 64) __builtin_prefetch(group + ahead + line, 0, 3);
      Unpacker::unpack(group, out);
    }
  });
}

}  // namespace octavo
