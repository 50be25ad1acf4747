// Few rows times a compact panel (octavo/compact.h), on the vector units: values are made in the registers that the
// products read, so that nothing but the packed bytes comes from memory.
#pragma once

#include <utility>

#include "octavo/matrix.h"
#include "tiles/tile.h"
#include "tiles/unpack.h"

namespace octavo {

#ifdef __AVX512BF16__

// out [R][32] = operands [block][R][16] times a panel of `depth` blocks.
template <int R>
void multiply_compact(CompactUnpacker panel, const PairOperand* operands, int64_t depth, float* out) {
  Vec acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = Vec::zero();
  for (int64_t block = 0; block < depth; ++block, operands += R * kBlockSteps) {
    const auto add = [&](int64_t step, __m512i first, __m512i second) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        acc[r][0] = dot(acc[r][0], Pairs{first}, operands + r * kBlockSteps + step);
        acc[r][1] = dot(acc[r][1], Pairs{second}, operands + r * kBlockSteps + step);
      }
    };
    if (panel.is_regular(block)) {
      panel.for_each_step(block, add);
      continue;
    }
    alignas(64) bf16 values[CompactBlock::kValues];
    panel(block, values);
    for (int64_t step = 0; step < kBlockSteps; ++step)
      add(step, _mm512_load_si512(values + step * 64), _mm512_load_si512(values + step * 64 + 32));
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    acc[r][0].store(out + r * Matrix::kPanelColumns);
    acc[r][1].store(out + r * Matrix::kPanelColumns + 16);
  }
}

// The same for up to kTileRows rows.
template <size_t... R>
void multiply_compact_rows(const Matrix& weight, int64_t p, int64_t ahead, const PairOperand* operands, int64_t rows,
                           float* out, std::index_sequence<R...>) {
  using Function = void (*)(CompactUnpacker, const PairOperand*, int64_t, float*);
  static constexpr Function table[] = {multiply_compact<R + 1>...};
  table[rows - 1](CompactUnpacker(weight, p, 0, ahead), operands, weight.num_steps() / kBlockSteps, out);
}

#endif

}  // namespace octavo
