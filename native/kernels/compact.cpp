#include "octavo/compact.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

namespace octavo {
namespace {

using Table = std::array<uint8_t, CompactBlock::kUpperBytes>;

constexpr int kTables = 4;  // counters of one byte's values are apart: equal bytes follow each other often

// The sixteen most frequent upper bytes, of equals the lower ones.
Table most_frequent(const bf16* values, int64_t n) {
  uint32_t counts[kTables][256] = {};
  for (int64_t i = 0; i < n; i += kTables)
    for (int t = 0; t < kTables; ++t) ++counts[t][values[i + t].bits >> 8];
  std::array<uint8_t, 256> bytes;
  std::iota(bytes.begin(), bytes.end(), uint8_t{0});
  const auto count = [&](uint8_t b) { return counts[0][b] + counts[1][b] + counts[2][b] + counts[3][b]; };
  Table most;
  std::partial_sort_copy(bytes.begin(), bytes.end(), most.begin(), most.end(),
                         [&](uint8_t a, uint8_t b) { return count(a) != count(b) ? count(a) > count(b) : a < b; });
  return most;
}

// Two steps in bytes. Every loop over them is one that compilers make vectors of.
using PairBytes = std::array<uint8_t, CompactBlock::kPairValues>;

constexpr uint8_t kNoCode = 255;

PairBytes codes_of(const PairBytes& upper, const Table& most) {
  PairBytes codes;
  codes.fill(kNoCode);
  for (size_t code = 0; code < most.size(); ++code)
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = upper[i] == most[code] ? static_cast<uint8_t>(code) : codes[i];
  return codes;
}

// The bytes of both steps, each where CompactBlock::place says: eight at a time.
void put_in_place(const PairBytes& in, uint8_t* out) {
  for (int64_t i = 0; i < CompactBlock::kPairValues; i += 8)
    std::memcpy(out + i / 64 * 64 + CompactBlock::place(i % 64), in.data() + i, 8);
}

}  // namespace

std::vector<CompactException> pack_compact_panel(const bf16* plain, int64_t num_values, uint8_t* out) {
  const Table most = most_frequent(plain, num_values);
  std::ranges::copy(most, out);
  out += CompactBlock::kTableBytes;
  std::vector<CompactException> exceptions;
  for (int64_t first = 0; first < num_values; first += CompactBlock::kPairValues, out += CompactBlock::kPairBytes) {
    PairBytes upper, lower, codes_in_place;
    for (size_t i = 0; i < upper.size(); ++i) {
      upper[i] = static_cast<uint8_t>(plain[first + static_cast<int64_t>(i)].bits >> 8);
      lower[i] = static_cast<uint8_t>(plain[first + static_cast<int64_t>(i)].bits);
    }
    PairBytes codes = codes_of(upper, most);
    if (std::ranges::max(codes) == kNoCode)
      for (size_t i = 0; i < codes.size(); ++i) {
        if (codes[i] != kNoCode) continue;
        exceptions.emplace_back(first + static_cast<int64_t>(i), upper[i]);
        codes[i] = 0;
      }
    put_in_place(lower, out);
    put_in_place(codes, codes_in_place.data());
    for (size_t i = 0; i < 64; ++i)
      out[CompactBlock::kPairValues + i] = static_cast<uint8_t>(codes_in_place[i] | codes_in_place[64 + i] << 4);
  }
  return exceptions;
}

void unpack_compact_column(const uint8_t* panel, int64_t c, int64_t k, bf16* out) {
  using Block = CompactBlock;
  const int64_t place = Block::place(2 * c);
  const uint8_t* at = panel + Block::kTableBytes + place;
  for (int64_t i = 0; i < k; i += 4, at += Block::kPairBytes) {
    const uint8_t* codes = at + Block::kPairValues;
    for (int64_t j = 0; j < std::min<int64_t>(4, k - i); ++j) {
      const int code = codes[j % 2] >> j / 2 * 4 & 15;
      out[i + j].bits = static_cast<uint16_t>(panel[code] << 8 | at[j / 2 * 64 + j % 2]);
    }
  }
}

}  // namespace octavo
