// Quantisation at load: rows of floats to codes, scales and minimums (see octavo/blocks.h).
#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "octavo/blocks.h"
#include "tiles/vec.h"

namespace octavo {
namespace {

constexpr int64_t kVectors = kGroup / 16;

float to_half_and_back(float x) { return static_cast<float>(static_cast<half>(x)); }

// Codes of x / scale, to the nearest (ties to even) within [low, high]. A scale of zero (a group of equal values, or of
// values too small for a half) makes them all zero.
void write_codes(const Vec (&x)[kVectors], float scale, float low, float high, uint8_t* codes) {
  const Vec divisor = Vec::set1(scale == 0.0f ? std::numeric_limits<float>::infinity() : scale);
  for (int64_t v = 0; v < kVectors; ++v)
    min(max(round(x[v] / divisor), Vec::set1(low)), Vec::set1(high))
        .store_int8(reinterpret_cast<int8_t*>(codes) + v * 16);
}

void quantise_symmetric(const Vec (&x)[kVectors], uint8_t* codes, float* scale) {
  *scale = to_half_and_back(largest(max(abs(x[0]), abs(x[1]))) / 127.0f);
  write_codes(x, *scale, -127.0f, 127.0f, codes);
  for (int64_t i = 0; i < kGroup; ++i) codes[i] ^= 0x80;  // + 128
}

void quantise_between(const Vec (&x)[kVectors], uint8_t* codes, float* scale, float* minimum) {
  const float high = largest(max(x[0], x[1])), low = -largest(Vec::zero() - min(x[0], x[1]));
  *scale = to_half_and_back((high - low) / 15.0f);
  *minimum = to_half_and_back(low);
  const Vec above[kVectors] = {x[0] - Vec::set1(*minimum), x[1] - Vec::set1(*minimum)};
  write_codes(above, *scale, 0.0f, 15.0f, codes);
}

}  // namespace

float quantise_row(const float* row, int64_t columns, int8_t* codes) {
  Vec highest = Vec::zero();
  for (int64_t k = 0; k < columns; k += 16) highest = max(highest, abs(Vec::load(row + k)));
  const float scale = largest(highest) / 127.0f;
  for (int64_t k = 0; k < columns; k += kGroup)
    write_codes({Vec::load(row + k), Vec::load(row + k + 16)}, scale, -127.0f, 127.0f,
                reinterpret_cast<uint8_t*>(codes) + k);
  return scale;
}

void quantise_row(SourceType type, const float* row, int64_t columns, CodedRow out) {
  if (type != SourceType::kQ8_0 && type != SourceType::kQ4_1)
    throw std::invalid_argument("floats can be quantised to Q8_0 and Q4_1 only");
  for (int64_t group = 0; group * kGroup < columns; ++group) {
    float values[kGroup];  // what the last group lacks repeats its last value
    const int64_t count = std::min(kGroup, columns - group * kGroup);
    std::memcpy(values, row + group * kGroup, count * sizeof(float));
    std::fill(values + count, values + kGroup, values[count - 1]);
    const Vec x[kVectors] = {Vec::load(values), Vec::load(values + 16)};
    out.minimums[group] = 0.0f;
    if (type == SourceType::kQ8_0)
      quantise_symmetric(x, out.codes + group * kGroup, out.scales + group);
    else
      quantise_between(x, out.codes + group * kGroup, out.scales + group, out.minimums + group);
  }
}

}  // namespace octavo
