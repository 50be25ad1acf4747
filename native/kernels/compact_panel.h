// A block of rows times a compact panel (octavo/compact.h), on the vector units: values are made in the registers that
// the products read, so that nothing but the packed bytes comes from memory. For the blocks that follow they can be
// kept.
#pragma once

#include <utility>

#include "octavo/matrix.h"
#include "tiles/tile.h"
#include "tiles/unpack.h"

namespace octavo {

#ifdef __AVX512BF16__

// Blocks [begin, end) of a panel, the operands of a block of rows for them, and the sums of these rows, [rows][32],
// which begin with zero where `begin` does. Where values are kept: `kept` [end - begin][16 steps][32][2], and what to
// fetch with each step.
struct CompactChunk {
  CompactUnpacker panel;
  int64_t begin, end;
  const PairOperand* operands;
  bf16* kept;
  float* out;
  Prefetch prefetch;
};

template <int R, bool kKeeps>
void multiply_compact(CompactChunk chunk) {
  constexpr int64_t kColumns = Matrix::kPanelColumns, kStepValues = kColumns * 2;
  Vec acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v)
      acc[r][v] = chunk.begin == 0 ? Vec::zero() : Vec::load(chunk.out + r * kColumns + v * 16);
  const PairOperand* operands = chunk.operands;
  alignas(64) bf16 irregular[CompactBlock::kValues];
  bf16* values = kKeeps ? chunk.kept : irregular;
  for (int64_t block = chunk.begin; block < chunk.end; ++block, operands += R * kBlockSteps) {
    const auto add = [&](int64_t step, __m512i first, __m512i second) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        acc[r][0] = dot(acc[r][0], Pairs{first}, operands + r * kBlockSteps + step);
        acc[r][1] = dot(acc[r][1], Pairs{second}, operands + r * kBlockSteps + step);
      }
    };
    if (chunk.panel.is_regular(block)) {
      chunk.panel.for_each_step(block, [&](int64_t step, __m512i first, __m512i second) __attribute__((always_inline)) {
        if constexpr (kKeeps) {
          chunk.prefetch.step((block - chunk.begin) * kBlockSteps + step);
          _mm512_store_si512(values + step * kStepValues, first);
          _mm512_store_si512(values + step * kStepValues + 32, second);
        }
        add(step, first, second);
      });
    } else {
      chunk.panel(block, values);
      for (int64_t step = 0; step < kBlockSteps; ++step)
        add(step, _mm512_load_si512(values + step * kStepValues), _mm512_load_si512(values + step * kStepValues + 32));
    }
    if constexpr (kKeeps) values += CompactBlock::kValues;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) acc[r][v].store(chunk.out + r * kColumns + v * 16);
}

// The same for up to kTileRows rows.
template <bool kKeeps, size_t... R>
void multiply_compact_rows(const CompactChunk& chunk, int64_t rows, std::index_sequence<R...>) {
  using Function = void (*)(CompactChunk);
  static constexpr Function table[] = {multiply_compact<R + 1, kKeeps>...};
  table[rows - 1](chunk);
}

#endif

}  // namespace octavo
