// Plain loops that the compiler vectorises. The bit layouts are described in src/octavo/ops/decode.py, which defines
// them. Products and sums are rounded one by one, never fused, so that every variant gives the bits of NumPy.
#include "octavo/decode.h"

#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "octavo/blocks.h"

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

// 16 bytes of nibbles: code i in the low half of byte i, code i + 16 in its high half; `fifth` holds bit 4 of code i as
// its bit i.
void split_nibbles(const uint8_t* nibbles, uint32_t fifth, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = static_cast<uint8_t>((nibbles[i] & 15) | (fifth >> i & 1) << 4);
    codes[i + 16] = static_cast<uint8_t>(nibbles[i] >> 4 | (fifth >> (i + 16) & 1) << 4);
  }
}

// A type with blocks of 32: half d, half m where it has a minimum, four bytes of fifth bits where it has them, nibbles.
void split_legacy(const uint8_t* block, bool minimum, bool fifth, CodedRow out) {
  *out.scales = f16_at(block);
  *out.minimums = minimum ? f16_at(block + 2) : 0.0f;
  const uint8_t* rest = block + (minimum ? 4 : 2);
  split_nibbles(rest + (fifth ? 4 : 0), fifth ? load<uint32_t>(rest) : 0, out.codes);
}

void split_q8_0(const uint8_t* block, CodedRow out) {
  *out.scales = f16_at(block);
  *out.minimums = 0.0f;
  for (int i = 0; i < 32; ++i) out.codes[i] = static_cast<uint8_t>(block[2 + i] ^ 0x80);  // + 128
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
void split_q45_k(const uint8_t* block, const uint8_t* fifth, const uint8_t* nibbles, CodedRow out) {
  const float d = f16_at(block), dmin = f16_at(block + 2);
  for (int j = 0; j < 8; ++j) {
    const auto [scale, min] = k_scale_min(block + 4, j);
    out.scales[j] = d * scale;
    out.minimums[j] = -(dmin * min);
    const uint8_t* bytes = nibbles + j / 2 * 32;
    const int shift = j % 2 * 4;
    for (int i = 0; i < 32; ++i) {
      const int high = fifth ? fifth[i] >> j & 1 : 0;
      out.codes[32 * j + i] = static_cast<uint8_t>((bytes[i] >> shift & 15) | high << 4);
    }
  }
}

// Two halves of 128 values: 64 bytes of nibbles, 32 bytes of bit pairs, 8 scales each.
void split_q6_k(const uint8_t* block, CodedRow out) {
  const float d = f16_at(block + 208);
  for (int group = 0; group < 8; ++group) {
    const int half = group / 4, quarter = group % 4;
    const uint8_t* low = block + half * 64 + quarter % 2 * 32;
    const uint8_t* high = block + 128 + half * 32;
    const int low_shift = quarter / 2 * 4, high_shift = quarter * 2;
    for (int i = 0; i < 2; ++i)
      out.scales[2 * group + i] = d * static_cast<float>(static_cast<int8_t>(block[192 + group * 2 + i]));
    out.minimums[group] = 0.0f;
    for (int i = 0; i < 32; ++i)
      out.codes[32 * group + i] = static_cast<uint8_t>((low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4);
  }
}

void split_block(SourceType type, const uint8_t* block, CodedRow out) {
  switch (type) {
    case SourceType::kQ4_0:
      return split_legacy(block, false, false, out);
    case SourceType::kQ4_1:
      return split_legacy(block, true, false, out);
    case SourceType::kQ5_0:
      return split_legacy(block, false, true, out);
    case SourceType::kQ5_1:
      return split_legacy(block, true, true, out);
    case SourceType::kQ8_0:
      return split_q8_0(block, out);
    case SourceType::kQ4_K:
      return split_q45_k(block, nullptr, block + 16, out);
    case SourceType::kQ5_K:
      return split_q45_k(block, block + 16, block + 48, out);
    default:
      return split_q6_k(block, out);
  }
}

constexpr int64_t kMaxBlock = 256;  // values

template <class Format>
void decode_blocks(Format, SourceType type, const uint8_t* row, float* out, int64_t columns) {
  const auto& f = format(type);
  uint8_t codes[kMaxBlock];
  float scales[kMaxBlock / 16], minimums[kMaxBlock / kGroup];
  constexpr int64_t kPart = kGroup / Format::kScales;
  for (int64_t b = 0; b < columns / f.values; ++b, out += f.values) {
    split_block(type, row + b * f.bytes, {codes, scales, minimums});
    for (int64_t part = 0; part < f.values / kPart; ++part) {
      for (int64_t i = part * kPart; i < (part + 1) * kPart; ++i) {
        const float scaled = scales[part] * static_cast<float>(codes[i] - Format::kZero);
        out[i] = Format::kMinimum ? scaled + minimums[part] : scaled;
      }
    }
  }
}

}  // namespace

SourceType source_type(std::string_view name) {
  for (size_t i = 0; i < std::size(kFormats); ++i) {
    if (kFormats[i].name == name) return static_cast<SourceType>(i);
  }
  throw std::invalid_argument("unknown tensor type " + std::string(name));
}

std::string_view type_name(SourceType type) { return format(type).name; }

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
    default:
      with_block_format(type, [&](auto blocks) { decode_blocks(blocks, type, row, out, columns); });
  }
}

void split_row(SourceType type, const uint8_t* row, int64_t columns, CodedRow out) {
  const Format& f = format(type);
  const int64_t scales = with_block_format(type, [](auto blocks) { return int64_t{decltype(blocks)::kScales}; });
  for (int64_t b = 0; b < columns / f.values; ++b) {
    const int64_t group = b * f.values / kGroup;
    split_block(type, row + b * f.bytes, {out.codes + b * f.values, out.scales + group * scales, out.minimums + group});
  }
}

}  // namespace octavo
