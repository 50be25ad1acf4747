// Panels of bfloat16 in twelve bits a value, without loss. The upper byte of a bfloat16 is its sign and seven bits of
// its exponent, and nearly all values of a panel have one of sixteen upper bytes: of either sign, magnitudes within a
// factor of 2^16. A code of four bits says which; lower bytes stand as they are. What has another upper byte is an
// exception, and stands in a list.
//
// A compact panel: [its sixteen upper bytes, padded to a line] [block 0] [block 1] ..., a block being sixteen steps of
// the plain panel (octavo/matrix.h), 1,024 values:
//
//   for each two steps: [64 lower bytes of the first] [64 of the second] [64 codes, of the first in the low halves]
//
// in such an order (`CompactBlock::place`) that interleaving bytes within 128-bit lanes gives the values in theirs.
#pragma once

#include <cstdint>
#include <vector>

#include "octavo/types.h"

namespace octavo {

// Of this variant, and for the narrow matrices of float32 too. Where products of pairs are one instruction, unpacking
// is little beside waiting for memory; a tile unit has vectors to spare for it.
#ifdef __AVX512BF16__
inline constexpr bool kCompacts = true;
#else
inline constexpr bool kCompacts = false;
#endif
#ifdef __AMX_BF16__
inline constexpr bool kCompactsNarrow = true;
#else
inline constexpr bool kCompactsNarrow = false;
#endif

// A value of a panel and its upper byte. Values are counted as in the plain panel.
struct CompactException {
  uint32_t packed;

  static constexpr int64_t kMaxValues = int64_t{1} << 24;  // of a panel
  CompactException(int64_t value, uint8_t upper) : packed(static_cast<uint32_t>(value) << 8 | upper) {}
  int64_t value() const { return packed >> 8; }
  void restore(bf16& x) const { x.bits = static_cast<uint16_t>((x.bits & 0xff) | (packed & 0xff) << 8); }
};

struct CompactBlock {
  static constexpr int64_t kValues = 1024, kPairValues = 128;  // of a block, and of two steps
  static constexpr int64_t kPairBytes = 192, kBytes = kValues / kPairValues * kPairBytes;
  static constexpr int64_t kTableBytes = 64;  // before the blocks of a panel
  static constexpr int kUpperBytes = 16;

  // Where in the 64 bytes of a step those of its value i stand: the two vectors of a step by eights in turn.
  static constexpr int64_t place(int64_t i) { return i % 32 / 8 * 16 + i / 32 * 8 + i % 8; }
  static constexpr int64_t panel_bytes(int64_t num_values) { return kTableBytes + num_values / kValues * kBytes; }
};

// Writes a compact panel of `num_values`, in whole blocks. Returns what it has not: exceptions in order.
std::vector<CompactException> pack_compact_panel(const bf16* plain, int64_t num_values, uint8_t* out);

// The k values of column c of a compact panel, as they stand in it: exceptions have an upper byte that is not theirs.
void unpack_compact_column(const uint8_t* panel, int64_t c, int64_t k, bf16* out);

}  // namespace octavo
