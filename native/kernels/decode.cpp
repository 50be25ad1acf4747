// Plain loops that the compiler vectorises. The bit layouts are described in src/octavo/ops/decode.py, which defines
// them. Products and sums are rounded one by one, never fused, so that every variant gives the bits of NumPy.
#include "octavo/decode.h"

#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

struct Format {
  std::string_view name;
  int64_t values, bytes;  // of a block
};

// In the order of SourceType.
constexpr Format kFormats[] = {
    {"F32", 1, 4},    {"F16", 1, 2},    {"BF16", 1, 2},   {"F64", 1, 8},      {"Q4_0", 32, 18},   {"Q4_1", 32, 20},
    {"Q5_0", 32, 22}, {"Q5_1", 32, 24}, {"Q8_0", 32, 34}, {"Q4_K", 256, 144}, {"Q5_K", 256, 176}, {"Q6_K", 256, 210},
};

const Format& format(SourceType type) { return kFormats[static_cast<int>(type)]; }

template <typename T>
T load(const uint8_t* data) {
  T value;
  std::memcpy(&value, data, sizeof value);
  return value;
}

// A half has 5 exponent bits (bias 15) and 10 mantissa bits. Shifted to float32's places, a normal number needs only
// the difference of the biases; a subnormal one is set right by a subtraction of 2^-14, which is exact.
float from_f16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  const uint32_t exponent = magnitude & 0x0f800000;
  const uint32_t normal = magnitude + ((127 - 15) << 23);
  const uint32_t special = magnitude | 0x7f800000;  // infinity or NaN
  const float subnormal = std::bit_cast<float>(magnitude + ((127 - 14) << 23)) - 0x1p-14f;
  const uint32_t bits = exponent == 0x0f800000 ? special : exponent == 0 ? std::bit_cast<uint32_t>(subnormal) : normal;
  return std::bit_cast<float>(bits | sign);
}

float f16_at(const uint8_t* data) { return from_f16(load<uint16_t>(data)); }

void decode_f16(const uint8_t* data, float* out, int64_t columns) {
  for (int64_t i = 0; i < columns; ++i) out[i] = f16_at(data + 2 * i);
}

void decode_bf16(const uint8_t* data, float* out, int64_t columns) {
  for (int64_t i = 0; i < columns; ++i) {
    out[i] = std::bit_cast<float>(static_cast<uint32_t>(load<uint16_t>(data + 2 * i)) << 16);
  }
}

void decode_f64(const uint8_t* data, float* out, int64_t columns) {
  for (int64_t i = 0; i < columns; ++i) out[i] = static_cast<float>(load<double>(data + 8 * i));
}

// 16 bytes of nibbles: value i in the low half of byte i, value i + 16 in its high half; `fifth` holds bit i of value
// i.
void decode_legacy(const uint8_t* nibbles, uint32_t fifth, int offset, float d, float m, float* out) {
  for (int i = 0; i < 16; ++i) {
    const int low = (nibbles[i] & 15) | (fifth >> i & 1) << 4;
    const int high = nibbles[i] >> 4 | (fifth >> (i + 16) & 1) << 4;
    out[i] = d * static_cast<float>(low - offset) + m;
    out[i + 16] = d * static_cast<float>(high - offset) + m;
  }
}

void decode_q8_0(const uint8_t* block, float* out) {
  const float d = f16_at(block);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(static_cast<int8_t>(block[2 + i]));
}

struct ScaleMin {
  float scale, min;
};

// Group j of eight: its 6-bit scale and minimum in 12 packed bytes.
ScaleMin k_scale_min(const uint8_t* packed, int j) {
  if (j < 4) return {static_cast<float>(packed[j] & 63), static_cast<float>(packed[j + 4] & 63)};
  return {static_cast<float>((packed[j + 4] & 15) | packed[j - 4] >> 6 << 4),
          static_cast<float>(packed[j + 4] >> 4 | packed[j] >> 6 << 4)};
}

// Q4_K, and Q5_K where `fifth` is not null: groups 2c and 2c + 1 share 32 bytes of nibbles.
void decode_q45_k(const uint8_t* block, const uint8_t* fifth, const uint8_t* nibbles, float* out) {
  const float d = f16_at(block), dmin = f16_at(block + 2);
  for (int j = 0; j < 8; ++j) {
    const auto [scale, min] = k_scale_min(block + 4, j);
    const float group_d = d * scale, group_min = dmin * min;
    const uint8_t* bytes = nibbles + j / 2 * 32;
    const int shift = j % 2 * 4;
    for (int i = 0; i < 32; ++i) {
      const int high = fifth ? fifth[i] >> j & 1 : 0;
      out[32 * j + i] = group_d * static_cast<float>((bytes[i] >> shift & 15) | high << 4) - group_min;
    }
  }
}

// Two halves of 128 values: 64 bytes of nibbles, 32 bytes of bit pairs, 8 scales each.
void decode_q6_k(const uint8_t* block, float* out) {
  const float d = f16_at(block + 208);
  for (int group = 0; group < 8; ++group) {
    const int half = group / 4, quarter = group % 4;
    const uint8_t* low = block + half * 64 + quarter % 2 * 32;
    const uint8_t* high = block + 128 + half * 32;
    const int low_shift = quarter / 2 * 4, high_shift = quarter * 2;
    for (int i = 0; i < 32; ++i) {
      const float scale = d * static_cast<float>(static_cast<int8_t>(block[192 + group * 2 + i / 16]));
      const int q = (low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4;
      out[32 * group + i] = scale * static_cast<float>(q - 32);
    }
  }
}

void decode_block(SourceType type, const uint8_t* block, float* out) {
  switch (type) {
    case SourceType::kQ4_0:
      return decode_legacy(block + 2, 0, 8, f16_at(block), -0.0f, out);
    case SourceType::kQ4_1:
      return decode_legacy(block + 4, 0, 0, f16_at(block), f16_at(block + 2), out);
    case SourceType::kQ5_0:
      return decode_legacy(block + 6, load<uint32_t>(block + 2), 16, f16_at(block), -0.0f, out);
    case SourceType::kQ5_1:
      return decode_legacy(block + 8, load<uint32_t>(block + 4), 0, f16_at(block), f16_at(block + 2), out);
    case SourceType::kQ8_0:
      return decode_q8_0(block, out);
    case SourceType::kQ4_K:
      return decode_q45_k(block, nullptr, block + 16, out);
    case SourceType::kQ5_K:
      return decode_q45_k(block, block + 16, block + 48, out);
    default:
      return decode_q6_k(block, out);
  }
}

}  // namespace

SourceType source_type(std::string_view name) {
  for (size_t i = 0; i < std::size(kFormats); ++i) {
    if (kFormats[i].name == name) return static_cast<SourceType>(i);
  }
  throw std::invalid_argument("unknown tensor type " + std::string(name));
}

size_t row_bytes(SourceType type, int64_t columns) {
  const Format& f = format(type);
  if (columns % f.values) {
    throw std::invalid_argument("a row of " + std::to_string(columns) + " values is not a whole number of " +
                                std::string(f.name) + " blocks");
  }
  return static_cast<size_t>(columns / f.values * f.bytes);
}

void decode_row(SourceType type, const uint8_t* row, float* out, int64_t columns) {
  switch (type) {
    case SourceType::kF32:
      std::memcpy(out, row, sizeof(float) * columns);
      return;
    case SourceType::kF16:
      return decode_f16(row, out, columns);
    case SourceType::kBF16:
      return decode_bf16(row, out, columns);
    case SourceType::kF64:
      return decode_f64(row, out, columns);
    default: {
      const Format& f = format(type);
      for (int64_t i = 0; i < columns / f.values; ++i) decode_block(type, row + i * f.bytes, out + i * f.values);
    }
  }
}

}  // namespace octavo
