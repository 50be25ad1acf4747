// From a block of a compact panel (octavo/compact.h) to sixteen steps of a plain one: the upper bytes are looked up,
// and interleaved with the lower ones. Some five vector operations for 64 values.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "octavo/matrix.h"

namespace octavo {

// Unpacks the blocks of panel p in ascending order, from `first` on. Every line that is read is followed by a fetch of
// the one `ahead` bytes behind it, if that is not zero.
class CompactUnpacker {
 public:
  CompactUnpacker(const Matrix& weight, int64_t p, int64_t first, int64_t ahead)
      : blocks_(weight.panel<uint8_t>(p) + CompactBlock::kTableBytes),
        ahead_(ahead),
        upper_(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(weight.panel<uint8_t>(p))))) {
    const auto exceptions = weight.exceptions(p);
    next_ = exceptions.data();
    end_ = next_ + exceptions.size();
    next_ = std::partition_point(next_, end_, [&](auto e) { return e.value() < first * CompactBlock::kValues; });
  }

  // out [16 steps][32 columns][2], aligned to lines.
  [[gnu::always_inline]] void operator()(int64_t block, bf16* out) {
    for_each_step(block, [&](int64_t step, __m512i first, __m512i second) __attribute__((always_inline)) {
      _mm512_store_si512(out + step * 64, first);
      _mm512_store_si512(out + step * 64 + 32, second);
    });
    for (; next_ != end_ && next_->value() < (block + 1) * CompactBlock::kValues; ++next_)
      next_->restore(out[next_->value() - block * CompactBlock::kValues]);
  }

  // Whether the next block, `block`, has no exceptions, so that for_each_step gives its values.
  bool is_regular(int64_t block) const {
    return next_ == end_ || next_->value() >= (block + 1) * CompactBlock::kValues;
  }
  // Calls f(step, first, second) for each of its sixteen steps: [16 columns][2] of the first columns and of the second.
  template <class F>
  [[gnu::always_inline]] void for_each_step(int64_t block, F f) const {
    const uint8_t* in = blocks_ + block * CompactBlock::kBytes;
    const __m512i low_half = _mm512_set1_epi8(15);
#pragma GCC unroll 8
    for (int64_t step = 0; step < 16; step += 2, in += CompactBlock::kPairBytes) {
      // Not __builtin_prefetch: in loops of vectors gcc takes it for without effect, and deletes it.
      for (int64_t line = 0; ahead_ > 0 && line < CompactBlock::kPairBytes; line += 64)
        asm volatile("prefetcht1 %0" ::"m"(in[ahead_ + line]));
      const __m512i codes = _mm512_load_si512(in + 128);
      const auto values = [&](int64_t s, __m512i lower, __m512i code) __attribute__((always_inline)) {
        const __m512i upper = _mm512_shuffle_epi8(upper_, code);
        f(s, _mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper));
      };
      values(step, _mm512_load_si512(in), _mm512_and_si512(codes, low_half));
      values(step + 1, _mm512_load_si512(in + 64), _mm512_and_si512(_mm512_srli_epi16(codes, 4), low_half));
    }
  }

 private:
  const uint8_t* blocks_;
  int64_t ahead_;
  __m512i upper_;  // the sixteen upper bytes, four times
  const CompactException *next_, *end_;
};

}  // namespace octavo
