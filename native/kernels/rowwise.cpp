// The kernels that see one row at a time: threads share the rows.
#include <cmath>
#include <cstring>

#include "kernels/int16_rows.h"
#include "kernels/int8_rows.h"
#include "kernels/packed_rows.h"
#include "octavo/kernels.h"
#include "octavo/memory.h"
#include "tiles/vec.h"

namespace octavo {
namespace {

void normalise(const float* x, int64_t columns, const float* weight, float eps, float* out) {
  Vec squares = Vec::zero();
  for (int64_t k = 0; k < columns; k += 16) {
    const Vec v = Vec::load(x + k, static_cast<int>(std::min<int64_t>(16, columns - k)));
    squares = fma(v, v, squares);
  }
  const Vec scale = Vec::set1(1.0f / std::sqrt(sum(squares) / static_cast<float>(columns) + eps));
  for (int64_t k = 0; k < columns; k += 16) {
    const int n = static_cast<int>(std::min<int64_t>(16, columns - k));
    (Vec::load(x + k, n) * scale * Vec::load(weight + k, n)).store(out + k, n);
  }
}

}  // namespace

void embedding(const Matrix& table, const int32_t* token_ids, View out, Worker worker) {
  const auto rows = worker.share(out.rows);
  for (int64_t t = rows.begin; t < rows.end; ++t) {
    const int64_t id = token_ids[t];
    if (id >= 0 && id < table.rows())
      table.row(id, out.row(t));
    else
      std::memset(out.row(t), 0, out.columns * sizeof(float));
  }
}

void rms_norm(View x, const float* weight, float eps, View out, Worker worker) {
  const auto rows = worker.share(x.rows);
  if (!out.reader) {
    for (int64_t t = rows.begin; t < rows.end; ++t) normalise(x.row(t), x.columns, weight, eps, out.row(t));
    return;
  }
  struct NormScratch;
  float* const row = scratch<NormScratch, float>(x.columns);
  const auto pack_rows = [&](auto pack) {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      normalise(x.row(t), x.columns, weight, eps, row);
      pack(t);
    }
  };
  switch (out.reader->dtype()) {
    case DType::kInt8:
      return pack_rows([&, packed = Int8Packing::of(out)](int64_t t) { packed.pack(t, row, out.columns); });
    case DType::kInt16:
      return pack_rows([&, packed = Int16Rows(out)](int64_t t) { packed.pack(t, row); });
    default:
      return pack_rows([&, packed = PackedRows(out)](int64_t t) { packed.pack(t, row); });
  }
}

void rope(View x, const int32_t* positions, const float* table, int64_t rotary_dim, int64_t head_dim, View out,
          Worker worker) {
  const auto rows = worker.share(x.rows);
  const int64_t half = rotary_dim / 2;
  for (int64_t t = rows.begin; t < rows.end; ++t) {
    const float *cos = table + positions[t] * rotary_dim, *sin = cos + half;
    for (int64_t head = 0; head < x.columns; head += head_dim) {
      const float* in = x.row(t) + head;
      float* to = out.row(t) + head;
      for (int64_t i = 0; i < half; i += 16) {
        const int n = static_cast<int>(std::min<int64_t>(16, half - i));
        // Read before written: `out` may be `x`.
        const Vec a = Vec::load(in + i, n), b = Vec::load(in + half + i, n);
        const Vec c = Vec::load(cos + i, n), s = Vec::load(sin + i, n);
        (a * c - b * s).store(to + i, n);
        (b * c + a * s).store(to + half + i, n);
      }
      if (to != in) std::memcpy(to + rotary_dim, in + rotary_dim, (head_dim - rotary_dim) * sizeof(float));
    }
  }
}

void silu_mul(View gate_up, View out, Worker worker) {
  const auto rows = worker.share(out.rows);
  for (int64_t t = rows.begin; t < rows.end; ++t) {
    const float *gate = gate_up.row(t), *up = gate + out.columns;
    for (int64_t k = 0; k < out.columns; k += 16) {
      const int n = static_cast<int>(std::min<int64_t>(16, out.columns - k));
      (silu(Vec::load(gate + k, n)) * Vec::load(up + k, n)).store(out.row(t) + k, n);
    }
  }
}

void add(View x, View y, View out, Worker worker) {
  const auto rows = worker.share(out.rows);
  for (int64_t t = rows.begin; t < rows.end; ++t)
    for (int64_t k = 0; k < out.columns; ++k) out.row(t)[k] = x.row(t)[k] + y.row(t)[k];
}

void take_rows(View x, const int32_t* rows_taken, View out, Worker worker) {
  const auto rows = worker.share(out.rows);
  for (int64_t i = rows.begin; i < rows.end; ++i)
    std::memcpy(out.row(i), x.row(rows_taken[i]), out.columns * sizeof(float));
}

}  // namespace octavo
