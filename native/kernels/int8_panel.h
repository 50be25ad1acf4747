// A block of int8 rows times a block panel, on the vector units.
#pragma once

#include <utility>

#include "kernels/int8_rows.h"
#include "tiles/dot_int8.h"
#include "tiles/tile.h"

namespace octavo {

#ifdef __AVX512F__
inline constexpr int kInt8Vectors = 2;
#else
inline constexpr int kInt8Vectors = 1;
#endif

// R rows times V vectors of columns, from vector `first` on, of one panel.
template <class Format, int R, int V>
struct Int8Tile {
  using Group = PanelGroup<Format>;
  using Scale = typename Format::Scale;
  using Sum = GroupSum<Format::kBits, Format::kZero>;
  static constexpr int64_t kColumns = Matrix::kPanelColumns;
  static constexpr int kVectorsOfPart = Group::kVectors / Format::kScales;

  const Int8Rows& x;
  const int32_t* starts;  // [group][scale of it][row], as Sum has them
  int64_t first;
  Vec acc[R][V];

  // Vectors [part * kVectorsOfPart, …) of the codes times the activations of the same k.
  [[gnu::always_inline]] void add_part(const uint8_t* group, int64_t g, int part) {
    const int8_t* a = x.codes + g * R * kGroup;
    Sum sums[R][V];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sums[r][v].start(starts + (g * Format::kScales + part) * R + r);
#pragma GCC unroll 8
    for (int i = 0; i < kVectorsOfPart; ++i) {
      const int j = part * kVectorsOfPart + i;
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        const Codes codes = Codes::load(group + (j * kColumns + (first + v) * 16) * 4);
        const Codes low = Format::kBits == 4 ? codes.low() : codes;
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) sums[r][v].add(low, a + r * kGroup + 4 * j);
        if constexpr (Format::kBits == 4) {
          const Codes high = codes.high();
#pragma GCC unroll 6
          for (int r = 0; r < R; ++r) sums[r][v].add(high, a + r * kGroup + 4 * (j + 4));
        }
      }
    }
    const auto* scales = reinterpret_cast<const Scale*>(group + Group::kCodeBytes) + part * kColumns + first * 16;
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const Vec scale = Vec::load(scales + v * 16);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r)
        acc[r][v] = fma(sums[r][v].value(), scale * Vec::set1(x.scales[g * R + r]), acc[r][v]);
    }
  }

  [[gnu::always_inline]] void add_minimum(const uint8_t* group, int64_t g) {
    const auto* minimums = reinterpret_cast<const Scale*>(group + Group::kCodeBytes + Group::kScaleBytes) + first * 16;
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const Vec minimum = Vec::load(minimums + v * 16);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) acc[r][v] = fma(minimum, Vec::set1(x.sums[g * R + r]), acc[r][v]);
    }
  }
};

// out [R][32] = rows times a panel. `prefetch` counts a group as a step.
template <class Format, int R>
void multiply_int8(const Int8Rows& x, const int32_t* starts, const uint8_t* panel, int64_t groups, Prefetch prefetch,
                   float* out) {
  using Tile = Int8Tile<Format, R, kInt8Vectors>;
  constexpr int64_t kColumns = Matrix::kPanelColumns;
  for (int first = 0; first < kColumns / 16; first += kInt8Vectors) {
    Tile tile{x, starts, first, {}};
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kInt8Vectors; ++v) tile.acc[r][v] = Vec::zero();
    const uint8_t* group = panel;
    for (int64_t g = 0; g < groups; ++g, group += Tile::Group::kBytes) {
      prefetch.step(g);
#pragma GCC unroll 2
      for (int part = 0; part < Format::kScales; ++part) tile.add_part(group, g, part);
      if constexpr (Format::kMinimum) tile.add_minimum(group, g);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kInt8Vectors; ++v) tile.acc[r][v].store(out + r * kColumns + (first + v) * 16);
  }
}

// The same for up to kInt8Rows rows.
template <class Format, size_t... R>
void multiply_int8_rows(const Int8Rows& x, const int32_t* starts, const uint8_t* panel, int64_t groups,
                        Prefetch prefetch, float* out, std::index_sequence<R...>) {
  using Function = void (*)(const Int8Rows&, const int32_t*, const uint8_t*, int64_t, Prefetch, float*);
  static constexpr Function table[] = {multiply_int8<Format, R + 1>...};
  table[x.rows - 1](x, starts, panel, groups, prefetch, out);
}

// Row k of a panel, unpacked: the weights of its 32 columns.
template <class Format>
void unpack_channel(const uint8_t* panel, int64_t k, float* out) {
  using Group = PanelGroup<Format>;
  using Scale = typename Format::Scale;
  constexpr int64_t kColumns = Matrix::kPanelColumns;
  const uint8_t* group = panel + k / kGroup * Group::kBytes;
  const int64_t i = k % kGroup, j = i / 4 % Group::kVectors;
  const int shift = static_cast<int>(i % 4 * 8 + (Format::kBits == 4 && i >= 16 ? 4 : 0));
  const auto* scales = reinterpret_cast<const Scale*>(group + Group::kCodeBytes);
  for (int64_t column = 0; column < kColumns; column += 16) {
    const Vec code = Codes::load(group + (j * kColumns + column) * 4).bits(shift, (1 << Format::kBits) - 1);
    const Vec scale = Vec::load(scales + i * Format::kScales / kGroup * kColumns + column);
    const Vec offset = Format::kMinimum ? Vec::load(scales + Format::kScales * kColumns + column)
                                        : scale * Vec::set1(static_cast<float>(-Format::kZero));
    fma(code, scale, offset).store(out + column);
  }
}

}  // namespace octavo
