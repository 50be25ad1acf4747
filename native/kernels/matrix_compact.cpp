// What a matrix does with compact panels (octavo/compact.h).
#include <algorithm>

#include "octavo/matrix.h"

namespace octavo {

void Matrix::pack_compact(int64_t p, const float* rows, Exceptions& exceptions) {
  if (exceptions.count > exceptions.most) return;  // the matrix will be plain
  struct Plain;
  bf16* plain = scratch<Plain, bf16>(num_values());
  interleave_pairs(rows, plain);
  auto& of_panel = exceptions.of_panel[static_cast<size_t>(p)];
  of_panel = pack_compact_panel(plain, num_values(), const_cast<uint8_t*>(panel<uint8_t>(p)));
  exceptions.count += of_panel.size();
}

// Puts the exceptions behind the panels. There is room: a plain block takes 2,048 bytes, a compact one 1,536 and its
// exceptions 16 at most. What that leaves is enough for a panel's table and the place where its exceptions begin.
void Matrix::keep(const Exceptions& exceptions) {
  auto* start = const_cast<uint32_t*>(exception_starts());
  auto* out = const_cast<CompactException*>(all_exceptions());
  *start = 0;
  for (const auto& of_panel : exceptions.of_panel) {
    out = std::ranges::copy(of_panel, out).out;
    start[1] = start[0] + static_cast<uint32_t>(of_panel.size());
    ++start;
  }
  data<Header>()->compact = 1;
}

void Matrix::compact_row(int64_t p, int64_t c, float* out) const {
  struct Column;
  bf16* column = scratch<Column, bf16>(num_steps() * 2);
  unpack_compact_column(panel<uint8_t>(p), c, columns_, column);
  for (const CompactException& exception : exceptions(p)) {
    const int64_t i = exception.value();
    if (i / 2 % kPanelColumns == c) exception.restore(column[i / 2 / kPanelColumns * 2 + i % 2]);
  }
  for (int64_t k = 0; k < columns_; ++k) out[k] = to_float(column[k]);
}

}  // namespace octavo
