// Products of int8 weights, a scale for each row of the matrix, with activations quantised to int16, a scale for each
// of their rows:
//
//   y = (sum of code * code, an exact integer, rounded once to float32) * (scale_a * scale_w)
//
// Sixteen bits are enough for rows with a few large channels, and for the scales of the weights' channels, by which
// activations are multiplied first.
#pragma once

#include "kernels/linear_finish.h"
#include "octavo/kernels.h"

namespace octavo {

size_t int16_shared_bytes(int64_t rows, int64_t columns);

template <class Finish>
void linear_int16(View x, const Matrix& weight, Worker::Range panels, int64_t panel_stride, const Finish& finish,
                  const Team& team);

extern template void linear_int16(View, const Matrix&, Worker::Range, int64_t, const StoreTile&, const Team&);
extern template void linear_int16(View, const Matrix&, Worker::Range, int64_t, const StoreLogits&, const Team&);
extern template void linear_int16(View, const Matrix&, Worker::Range, int64_t, const SiluMulTiles&, const Team&);

}  // namespace octavo
