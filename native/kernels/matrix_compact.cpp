// What a matrix does with compact panels (octavo/compact.h).
#include <algorithm>

#include "octavo/matrix.h"

namespace octavo {

std::vector<CompactException> Matrix::pack_compact(int64_t p, const float* rows) {
  struct Plain;
  bf16* plain = scratch<Plain, bf16>(num_values());
  interleave_pairs(rows, plain);
  return pack_compact_panel(plain, num_values(), const_cast<uint8_t*>(compact_panel(p)));
}

// Puts the exceptions behind compact panels. False: they are too many, or there is no room for them.
bool Matrix::keep(const Exceptions& exceptions) {
  constexpr int64_t kLeastValues = 256;  // for one exception: four bytes, and a moment of every product
  auto* starts = const_cast<uint32_t*>(exception_starts());
  if (bytes_before_exceptions() > memory_.bytes) return false;
  starts[0] = 0;
  for (size_t p = 0; p < exceptions.size(); ++p)
    starts[p + 1] = starts[p] + static_cast<uint32_t>(exceptions[p].size());
  const int64_t most = num_panels() * num_values() / kLeastValues;
  if (starts[num_panels()] > most || compact_bytes() > memory_.bytes) return false;
  auto* out = const_cast<CompactException*>(all_exceptions());
  for (const auto& of_panel : exceptions) out = std::ranges::copy(of_panel, out).out;
  const_cast<Header*>(data<Header>())->compact = 1;
  return true;
}

void Matrix::compact_row(int64_t p, int64_t c, float* out) const {
  struct Column;
  bf16* column = scratch<Column, bf16>(num_steps() * 2);
  unpack_compact_column(compact_panel(p), c, columns_, column);
  for (const CompactException& exception : exceptions(p)) {
    const int64_t i = exception.value();
    if (i / 2 % kPanelColumns == c) {
      bf16& value = column[i / 2 / kPanelColumns * 2 + i % 2];
      value.bits = static_cast<uint16_t>((value.bits & 0xff) | exception.upper() << 8);
    }
  }
  for (int64_t k = 0; k < columns_; ++k) out[k] = to_float(column[k]);
}

}  // namespace octavo
