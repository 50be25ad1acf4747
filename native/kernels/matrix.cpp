#include "octavo/matrix.h"

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

namespace octavo {

DType parse_dtype(std::string_view name) {
  if (name == "float32") return DType::kFloat32;
  if (name == "bfloat16") return DType::kBFloat16;
  throw std::invalid_argument("dtype is '" + std::string(name) + "'; allowed: float32, bfloat16");
}

namespace {

constexpr int64_t kColumns = Matrix::kPanelColumns;

struct PackScratch;

// Calls pack(p, rows [32][K] to fill) for every panel, spread over the pool: panels are handed out one by one, since
// decoding takes unequal time.
template <class Fill>
void for_each_panel(ThreadPool& pool, int64_t num_panels, int64_t columns, Fill fill) {
  std::atomic<int64_t> next{0};
  pool.run([&](int) {
    float* rows = scratch<PackScratch, float>(kColumns * columns);
    for (int64_t p; (p = next.fetch_add(1)) < num_panels;) fill(p, rows);
  });
}

int64_t total_rows(const std::vector<MatrixSource>& sources) {
  int64_t n = 0;
  for (const auto& source : sources) n += source.rows;
  return n;
}

// A well-mixed function of the counter (splitmix64): random values that need no state.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

}  // namespace

Matrix::Matrix(Arena& arena, int64_t rows, int64_t columns, DType dtype, std::vector<float> bias)
    : rows_(rows), columns_(columns), dtype_(dtype), bias_(std::move(bias)) {
  const size_t element = dtype == DType::kBFloat16 ? sizeof(bf16) : sizeof(float);
  memory_ = arena.allocate(static_cast<size_t>(num_panels() * kColumns * num_steps() * step()) * element);
}

Matrix::Matrix(ThreadPool& pool, Arena& arena, const std::vector<MatrixSource>& sources, int64_t columns, DType dtype,
               std::vector<float> bias)
    : Matrix(arena, total_rows(sources), columns, dtype, std::move(bias)) {
  for_each_panel(pool, num_panels(), columns, [&](int64_t p, float* rows) {
    for (int64_t c = 0; c < kColumns; ++c) {
      float* out = rows + c * columns;
      int64_t n = p * kColumns + c;
      if (n >= rows_) {
        std::memset(out, 0, columns * sizeof(float));
        continue;
      }
      auto source = sources.begin();
      for (; n >= source->rows; ++source) n -= source->rows;
      const int64_t row = source->row_order ? source->row_order[n] : n;
      decode_row(source->type, source->data + row * row_bytes(source->type, columns), out, columns);
    }
    pack_panel(p, rows);
  });
}

Matrix Matrix::random(ThreadPool& pool, Arena& arena, int64_t rows, int64_t columns, DType dtype, uint64_t seed,
                      float scale) {
  Matrix matrix(arena, rows, columns, dtype, {});
  for_each_panel(pool, matrix.num_panels(), columns, [&](int64_t p, float* values) {
    for (int64_t c = 0; c < kColumns; ++c) {
      const int64_t n = p * kColumns + c;
      for (int64_t k = 0; k < columns; ++k) {
        const uint64_t bits = mix(mix(seed) + static_cast<uint64_t>(n * columns + k)) >> 40;  // 24 of them
        values[c * columns + k] = n < rows ? (static_cast<float>(bits) * 0x1p-23f - 1.0f) * scale : 0.0f;
      }
    }
    matrix.pack_panel(p, values);
  });
  return matrix;
}

void Matrix::pack_panel(int64_t p, const float* rows) {
  const auto value = [&](int64_t c, int64_t k) { return k < columns_ ? rows[c * columns_ + k] : 0.0f; };
  const int64_t padded = num_steps() * step();
  if (dtype_ == DType::kFloat32) {
    float* out = data<float>() + p * padded * kColumns;
    for (int64_t k = 0; k < padded; ++k)
      for (int64_t c = 0; c < kColumns; ++c) *out++ = value(c, k);
    return;
  }
  bf16* out = data<bf16>() + p * padded * kColumns;
  for (int64_t k = 0; k < padded; k += 2) {
    for (int64_t c = 0; c < kColumns; ++c) {
      *out++ = to_bf16(value(c, k));
      *out++ = to_bf16(value(c, k + 1));
    }
  }
}

void Matrix::row(int64_t n, float* out) const {
  const int64_t p = n / kColumns, c = n % kColumns;
  if (dtype_ == DType::kFloat32) {
    const float* in = panel<float>(p) + c;
    for (int64_t k = 0; k < columns_; ++k) out[k] = in[k * kColumns];
    return;
  }
  const bf16* in = panel<bf16>(p) + 2 * c;
  for (int64_t k = 0; k < columns_; ++k) out[k] = to_float(in[k / 2 * kColumns * 2 + k % 2]);
}

}  // namespace octavo
