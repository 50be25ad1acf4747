// The kernels but attention. All take views and scalars, and a Worker that says which share is theirs; api.py defines
// them.
#pragma once

#include "octavo/matrix.h"
#include "octavo/thread_pool.h"
#include "octavo/types.h"

namespace octavo {

// out[t] = table row token_ids[t], or zeros for an id outside the table (the caller has checked: this is the last
// wall).
void embedding(const Matrix& table, const int32_t* token_ids, View out, Worker worker);

// `out` may be packed.
void rms_norm(View x, const float* weight, float eps, View out, Worker worker);

// A worker of a kernel in which all workers of `pool` meet. `shared`: memory that all of them see.
struct Team {
  ThreadPool& pool;
  Worker worker;
  void* shared;
};

// From so many rows of each worker on, workers do better with rows of their own than with panels of their own: inputs
// are packed where they are multiplied, and do not go from one core's cache to another's. Every worker then reads all
// weights, which pays the sooner the longer it computes on them.
int64_t rows_worth_sharing(const Matrix& weight);

// What Team::shared must hold for a product of `rows` rows.
size_t linear_shared_bytes(const Matrix& weight, int64_t rows);

// A product with this matrix reads rows that are packed for the other's. With itself: it reads packed rows.
bool reads_rows_of(const Matrix& weight, const Matrix& other);

// out = x @ weightᵀ + bias; with `residual` (may be `out` itself): out = residual + that.
void linear(View x, const Matrix& weight, const View* residual, View out, const Team& team);

// out = linear(x, weight); maxima [rows, panels of the matrix]: the largest of each panel's columns of a row of it, or
// NaN where one of them is NaN or positive infinity.
void linear_logits(View x, const Matrix& weight, View out, View maxima, const Team& team);

// out = silu_mul(linear(x, weight)), to the bit, without writing the product. Both halves of the matrix must be whole
// panels: can_fuse_silu_mul. `out` may be packed for readers with the same blocks of rows:
// leaves_packed_silu_mul.
bool can_fuse_silu_mul(const Matrix& weight);
bool leaves_packed_silu_mul(const Matrix& weight, const Matrix& reader);
void linear_silu_mul(View x, const Matrix& weight, View out, const Team& team);

// In place where out.data == x.data. `table`: [max_positions, rotary_dim].
void rope(View x, const int32_t* positions, const float* table, int64_t rotary_dim, int64_t head_dim, View out,
          Worker worker);

void silu_mul(View gate_up, View out, Worker worker);

void add(View x, View y, View out, Worker worker);

void take_rows(View x, const int32_t* rows, View out, Worker worker);

}  // namespace octavo
