// The number formats of checkpoint tensors: one row of raw bytes to float32, the same bits as src/octavo/ops/decode.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace octavo {

enum class SourceType { kF32, kF16, kBF16, kF64, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K };

// Throws std::invalid_argument for an unknown name.
SourceType source_type(std::string_view name);
std::string_view type_name(SourceType type);

// Bytes of a row. Throws std::invalid_argument unless it is a whole number of blocks.
size_t row_bytes(SourceType type, int64_t columns);

// `row` may lie at any address; `columns` is a whole number of blocks.
void decode_row(SourceType type, const uint8_t* row, float* out, int64_t columns);

}  // namespace octavo
