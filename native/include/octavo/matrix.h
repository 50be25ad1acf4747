// A weight matrix [N, K] (N outputs, K inputs), packed once at load for the multiply tiles. Owns the layout.
//
//   panel p (32 columns of the product):  [step 0: cols 0-15 | cols 16-31] [step 1: ...] ...
//   bfloat16: a step is 2 k, a vector [16 columns][2 k];   float32: a step is 1 k, a vector [16 columns]
//
// so that a multiply reads strictly ascending addresses. The steps are padded to whole blocks of 16 (64 bytes of packed
// activations, and the depth of an AMX tile). Columns beyond N and a k beyond K are zero.
#pragma once

#include <string_view>
#include <vector>

#include "octavo/decode.h"
#include "octavo/memory.h"
#include "octavo/thread_pool.h"
#include "octavo/types.h"

namespace octavo {

// `rows` rows of K values of a checkpoint tensor; row i of the matrix is row `row_order[i]` of the data.
struct MatrixSource {
  const uint8_t* data;
  SourceType type;
  int64_t rows;
  const int32_t* row_order;  // null: the identity
};

class Matrix {
 public:
  static constexpr int64_t kPanelColumns = 32;
  static constexpr int64_t kBlockSteps = 16;

  // Stacks the sources along N. `bias`: N floats, or empty.
  Matrix(ThreadPool& pool, Arena& arena, const std::vector<MatrixSource>& sources, int64_t columns, DType dtype,
         std::vector<float> bias);
  // Uniform random values in [-scale, scale], the same for the same seed whatever the number of threads.
  static Matrix random(ThreadPool& pool, Arena& arena, int64_t rows, int64_t columns, DType dtype, uint64_t seed,
                       float scale);

  int64_t rows() const { return rows_; }        // N
  int64_t columns() const { return columns_; }  // K
  DType dtype() const { return dtype_; }
  size_t bytes() const { return memory_.bytes; }
  const float* bias() const { return bias_.empty() ? nullptr : bias_.data(); }

  int64_t num_panels() const { return divide_up(rows_, kPanelColumns); }
  int64_t num_steps() const { return round_up(divide_up(columns_, step()), kBlockSteps); }
  int64_t step() const { return dtype_ == DType::kBFloat16 ? 2 : 1; }
  template <class T>
  const T* panel(int64_t p) const {
    return data<T>() + p * num_steps() * kPanelColumns * step();
  }
  // Row n (K floats) as it was packed: the embedding of token n, where the matrix is an embedding table.
  void row(int64_t n, float* out) const;

 private:
  Matrix(Arena& arena, int64_t rows, int64_t columns, DType dtype, std::vector<float> bias);
  template <class T>
  T* data() const {
    return static_cast<T*>(memory_.data);
  }
  void pack_panel(int64_t p, const float* rows_of_panel);

  int64_t rows_, columns_;
  DType dtype_;
  std::vector<float> bias_;
  Arena::Piece memory_;
};

}  // namespace octavo
