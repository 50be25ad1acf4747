// Products of block panels with activations quantised to int8, a scale for every 32, the two largest of a row exact:
//
//   y = sum over groups, ascending: scale_w * scale_a * (sum of code * code) [+ minimum * sum of scale_a * code]
//       + the two exact products in order of rank
//
// The sum of a group is an exact integer; the rest is float32 in one order. (Few channels of a language model are
// large in every token. They would set the scale of their group: taken out, the error falls to a third.)
#pragma once

#include "kernels/linear_finish.h"
#include "octavo/kernels.h"

namespace octavo {

size_t int8_shared_bytes(int64_t rows, int64_t columns);

template <class Finish>
void linear_int8(View x, const Matrix& weight, Worker::Range panels, int64_t panel_stride, const Finish& finish,
                 const Team& team);

extern template void linear_int8(View, const Matrix&, Worker::Range, int64_t, const StoreTile&, const Team&);
extern template void linear_int8(View, const Matrix&, Worker::Range, int64_t, const StoreLogits&, const Team&);
extern template void linear_int8(View, const Matrix&, Worker::Range, int64_t, const SiluMulTiles&, const Team&);

}  // namespace octavo
