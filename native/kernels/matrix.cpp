#include "octavo/matrix.h"

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

namespace octavo {

DType parse_dtype(std::string_view name) {
  if (name == "float32") return DType::kFloat32;
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "int8") return DType::kInt8;
  throw std::invalid_argument("dtype is '" + std::string(name) + "'; allowed: float32, bfloat16, int8");
}

namespace {

constexpr int64_t kColumns = Matrix::kPanelColumns;

struct PackScratch;

// Calls fill(p, rows [32][padded columns]) for every panel, spread over the pool: panels are handed out one by one,
// since decoding takes unequal time.
template <class Fill>
void for_each_panel(ThreadPool& pool, int64_t num_panels, int64_t padded, Fill fill) {
  std::atomic<int64_t> next{0};
  pool.run([&](int) {
    float* rows = scratch<PackScratch, float>(kColumns * padded);
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
  const int64_t padded = num_steps() * step();
  for_each_panel(pool, num_panels(), padded, [&](int64_t p, float* rows) {
    std::memset(rows, 0, static_cast<size_t>(kColumns * padded) * sizeof(float));
    for (int64_t c = 0; c < kColumns && p * kColumns + c < rows_; ++c) {
      int64_t n = p * kColumns + c;
      auto source = sources.begin();
      for (; n >= source->rows; ++source) n -= source->rows;
      const int64_t row = source->row_order ? source->row_order[n] : n;
      decode_row(source->type, source->data + row * row_bytes(source->type, columns), rows + c * padded, columns);
    }
    pack_panel(p, rows);
  });
}

Matrix Matrix::random(ThreadPool& pool, Arena& arena, int64_t rows, int64_t columns, DType dtype, uint64_t seed,
                      float scale) {
  Matrix matrix(arena, rows, columns, dtype, {});
  const int64_t padded = matrix.num_steps() * matrix.step();
  for_each_panel(pool, matrix.num_panels(), padded, [&](int64_t p, float* values) {
    std::memset(values, 0, static_cast<size_t>(kColumns * padded) * sizeof(float));
    for (int64_t c = 0; c < kColumns && p * kColumns + c < rows; ++c) {
      const int64_t n = p * kColumns + c;
      for (int64_t k = 0; k < columns; ++k) {
        const uint64_t bits = mix(mix(seed) + static_cast<uint64_t>(n * columns + k)) >> 40;  // 24 of them
        values[c * padded + k] = (static_cast<float>(bits) * 0x1p-23f - 1.0f) * scale;
      }
    }
    matrix.pack_panel(p, values);
  });
  return matrix;
}

void Matrix::pack_panel(int64_t p, const float* rows) {
  const int64_t steps = num_steps(), padded = steps * step();
  if (dtype_ == DType::kFloat32) {
    float* out = data<float>() + p * padded * kColumns;
    for (int64_t k = 0; k < padded; ++k)
      for (int64_t c = 0; c < kColumns; ++c) *out++ = rows[c * padded + k];
    return;
  }
  // Round first, in one straight loop; then interleave pairs.
  struct RoundScratch;
  bf16* rounded = scratch<RoundScratch, bf16>(kColumns * padded);
  for (int64_t i = 0; i < kColumns * padded; ++i) rounded[i] = to_bf16(rows[i]);
  bf16* out = data<bf16>() + p * padded * kColumns;
  for (int64_t s = 0; s < steps; ++s)
    for (int64_t c = 0; c < kColumns; ++c, out += 2) std::memcpy(out, rounded + c * padded + 2 * s, 2 * sizeof(bf16));
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
