// Quantisation at load: rows of floats to codes, scales and minimums (see octavo/blocks.h).
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "octavo/blocks.h"

namespace octavo {
namespace {

float to_half_and_back(float x) { return static_cast<float>(static_cast<half>(x)); }

// The code whose value is nearest to x; ties go to the even one. A scale of zero (a group of equal values, or of values
// too small for a half) makes all codes `zero`.
uint8_t nearest_code(float x, float scale, int zero, int low, int high) {
  const float steps = scale == 0.0f ? 0.0f : std::nearbyint(x / scale);
  return static_cast<uint8_t>(std::clamp(static_cast<int>(steps) + zero, low, high));
}

void quantise_symmetric(const float* x, int64_t count, uint8_t* codes, float* scale) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(x[i]));
  *scale = to_half_and_back(largest / 127);
  for (int64_t i = 0; i < count; ++i) codes[i] = nearest_code(x[i], *scale, 128, 1, 255);
}

void quantise_between(const float* x, int64_t count, uint8_t* codes, float* scale, float* minimum) {
  const auto [low, high] = std::minmax_element(x, x + count);
  *scale = to_half_and_back((*high - *low) / 15);
  *minimum = to_half_and_back(*low);
  for (int64_t i = 0; i < count; ++i) codes[i] = nearest_code(x[i] - *minimum, *scale, 0, 0, 15);
}

}  // namespace

void quantise_row(SourceType type, const float* row, int64_t columns, CodedRow out) {
  if (type != SourceType::kQ8_0 && type != SourceType::kQ4_1)
    throw std::invalid_argument("floats can be quantised to Q8_0 and Q4_1 only");
  for (int64_t group = 0; group * kGroup < columns; ++group) {
    const float* x = row + group * kGroup;
    const int64_t count = std::min(kGroup, columns - group * kGroup);
    uint8_t* codes = out.codes + group * kGroup;
    out.minimums[group] = 0.0f;
    if (type == SourceType::kQ8_0) {
      quantise_symmetric(x, count, codes, out.scales + group);
      std::fill(codes + count, codes + kGroup, uint8_t{128});
    } else {
      quantise_between(x, count, codes, out.scales + group, out.minimums + group);
      std::fill(codes + count, codes + kGroup, uint8_t{0});
    }
  }
}

}  // namespace octavo
