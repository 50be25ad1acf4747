// From a block of a compact panel (octavo/compact.h) to sixteen steps of a plain one: the upper bytes are looked up,
// and interleaved with the lower ones. Some five vector operations for 64 values.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "octavo/matrix.h"

namespace octavo {

// Unpacks the blocks of panel p in ascending order, from `first` on. Every line that is read is followed by a fetch of
// the one `ahead` bytes behind it.
class CompactUnpacker {
 public:
  CompactUnpacker(const Matrix& weight, int64_t p, int64_t first, int64_t ahead)
      : blocks_(weight.panel<uint8_t>(p) + CompactBlock::kTableBytes), ahead_(ahead), upper_(weight.panel<uint8_t>(p)) {
    const auto exceptions = weight.exceptions(p);
    next_ = exceptions.data();
    end_ = next_ + exceptions.size();
    next_ = std::partition_point(next_, end_, [&](auto e) { return e.value() < first * CompactBlock::kValues; });
  }

  // out [16 steps][32 columns][2], aligned to lines.
  [[gnu::always_inline]] void operator()(int64_t block, bf16* out) {
    const uint8_t* in = blocks_ + block * CompactBlock::kBytes;
#pragma GCC unroll 8
    for (int64_t i = 0; i < CompactBlock::kBytes; i += CompactBlock::kPairBytes) {
      // Not __builtin_prefetch: in loops of vectors gcc takes it for without effect, and deletes it.
      for (int64_t line = 0; line < CompactBlock::kPairBytes; line += 64)
        asm volatile("prefetcht1 %0" ::"m"(in[i + ahead_ + line]));
      upper_.unpack(in + i, out + i / CompactBlock::kPairBytes * CompactBlock::kPairValues);
    }
    for (; next_ != end_ && next_->value() < (block + 1) * CompactBlock::kValues; ++next_)
      next_->restore(out[next_->value() - block * CompactBlock::kValues]);
  }

 private:
  struct UpperBytes {
    __m512i table;  // four times the same
    explicit UpperBytes(const uint8_t* at)
        : table(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)))) {}
    // Two steps: 192 bytes to 128 values.
    void unpack(const uint8_t* in, bf16* out) const {
      const __m512i codes = _mm512_load_si512(in + 128), low_half = _mm512_set1_epi8(15);
      unpack_step(_mm512_load_si512(in), _mm512_and_si512(codes, low_half), out);
      unpack_step(_mm512_load_si512(in + 64), _mm512_and_si512(_mm512_srli_epi16(codes, 4), low_half), out + 64);
    }
    void unpack_step(__m512i lower, __m512i codes, bf16* out) const {
      const __m512i upper = _mm512_shuffle_epi8(table, codes);
      _mm512_store_si512(out, _mm512_unpacklo_epi8(lower, upper));
      _mm512_store_si512(out + 32, _mm512_unpackhi_epi8(lower, upper));
    }
  };

  const uint8_t* blocks_;
  int64_t ahead_;
  UpperBytes upper_;
  const CompactException *next_, *end_;
};

}  // namespace octavo
