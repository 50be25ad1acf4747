// Activations quantised to int8, the operands of linear_int8: packed in blocks of rows, by all workers together.
#pragma once

#include <algorithm>
#include <bit>
#include <utility>

#include "kernels/row_blocks.h"
#include "octavo/matrix.h"
#include "octavo/memory.h"
#include "tiles/vec.h"

namespace octavo {

// Rows of a block. With AVX-512 twelve integer and twelve float accumulators, codes, and a broadcast fill the
// registers.
#ifdef __AVX512F__
inline constexpr int kInt8Rows = 6;
#else
inline constexpr int kInt8Rows = 2;
#endif

// The largest |x| of a row keep their float32 values and are left out of the groups.
inline constexpr int kOutliers = 2;

struct Outlier {
  int32_t k;
  float value;
};

// Where the parts of one block of `rows` rows lie.
struct Int8Rows {
  int64_t rows;
  int8_t* codes;      // [group][row][32]
  float* scales;      // [group][row]
  float* sums;        // [group][row]: scale times the sum of the group's codes
  int32_t* halves;    // [group][2][row]: the sum of sixteen codes
  Outlier* outliers;  // [row][kOutliers], largest first

  static int64_t bytes_per_row(int64_t groups) { return groups * (kGroup + 4 * 4) + kOutliers * sizeof(Outlier); }

  // The block that begins with row `begin` of a packing.
  Int8Rows(void* packing, int64_t begin, int64_t rows_, int64_t groups) : rows(rows_) {
    auto* at = static_cast<int8_t*>(packing) + begin * bytes_per_row(groups);
    codes = at;
    scales = reinterpret_cast<float*>(at += rows * groups * kGroup);
    sums = scales + rows * groups;
    halves = reinterpret_cast<int32_t*>(sums + rows * groups);
    outliers = reinterpret_cast<Outlier*>(halves + 2 * rows * groups);
  }

  // Row r from x [columns]. `scratch`: room for the row in whole groups.
  void pack(const float* x, int64_t columns, int64_t r, float* scratch) const {
    const int64_t padded = round_up(columns, kGroup), groups = padded / kGroup;
    take_outliers(x, columns, padded, outliers + r * kOutliers, scratch);
    int64_t g = 0;
    for (; g + 16 <= groups; g += 16) pack_groups<16>(scratch + g * kGroup, g, r);
    for (; g + 4 <= groups; g += 4) pack_groups<4>(scratch + g * kGroup, g, r);
    for (; g < groups; ++g) pack_groups<1>(scratch + g * kGroup, g, r);
  }

 private:
  // Copies x to `rest`, the two largest |x| (the first of equals) to `outliers`, and leaves zeros there.
  static void take_outliers(const float* x, int64_t columns, int64_t padded, Outlier* outliers, float* rest) {
    static_assert(kOutliers == 2);
    Vec first = Vec::zero(), second = Vec::zero();  // of each lane
    const auto read = [&](int64_t k, Vec values) {
      values.store(rest + k);
      second = max(second, min(first, abs(values)));
      first = max(first, abs(values));
    };
    const int64_t whole = columns / 16 * 16;
    for (int64_t k = 0; k < whole; k += 16) read(k, Vec::load(x + k));
    for (int64_t k = whole; k < padded; k += 16)
      read(k, k < columns ? Vec::load(x + k, static_cast<int>(columns - k)) : Vec::zero());
    outliers[0] = take(rest, padded, largest(first));
    float candidates[16], others[16];
    first.store(candidates);
    second.store(others);
    const int64_t lane = outliers[0].k % 16;
    candidates[lane] = others[lane];
    outliers[1] = take(rest, padded, largest(Vec::load(candidates)));
  }

  // The first of x whose magnitude is as wanted, leaving a zero there.
  static Outlier take(float* x, int64_t padded, float magnitude) {
    const Vec wanted = Vec::set1(magnitude);
    int32_t k = 0;  // where it is not a number: so will be the product
    for (int64_t begin = 0; begin < padded; begin += 16)
      if (const uint32_t found = equal(abs(Vec::load(x + begin)), wanted)) {
        k = static_cast<int32_t>(begin + std::countr_zero(found));
        break;
      }
    return {k, std::exchange(x[k], 0.0f)};
  }

  // Groups [g, g + count), at most sixteen, of row r: what is made of a whole group is made for all of them at once.
  template <int count>
  [[gnu::always_inline]] void pack_groups(const float* x, int64_t g, int64_t r) const {
    Vec magnitudes[16], low_codes[16], high_codes[16];
    for (int64_t i = 0; i < 16; ++i) magnitudes[i] = low_codes[i] = high_codes[i] = Vec::zero();
    for (int64_t i = 0; i < count; ++i)
      magnitudes[i] = max(abs(Vec::load(x + i * kGroup)), abs(Vec::load(x + i * kGroup + 16)));
    const Vec highest = largest_of_each(magnitudes), limit = Vec::set1(127.0f);
    float highest_of[16], inverses[16];
    highest.store(highest_of);
    (limit / highest).store(inverses);
    for (int64_t i = 0; i < count; ++i) {
      const Vec inverse = Vec::set1(highest_of[i] > 0 ? inverses[i] : 0.0f);
      low_codes[i] = round(Vec::load(x + i * kGroup) * inverse);
      high_codes[i] = round(Vec::load(x + i * kGroup + 16) * inverse);
      int8_t* to = codes + ((g + i) * rows + r) * kGroup;
      low_codes[i].store_int8(to);
      high_codes[i].store_int8(to + 16);
    }
    const Vec low_sums = sum_of_each(low_codes), high_sums = sum_of_each(high_codes), total = low_sums + high_sums;
    const Vec scale = highest / limit + (total - total);  // what is not a number is not lost in a code
    float scales_of[16], sums_of[16], lows_of[16], highs_of[16];
    scale.store(scales_of);
    (scale * total).store(sums_of);
    low_sums.store(lows_of);
    high_sums.store(highs_of);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = (g + i) * rows + r;
      scales[at] = scales_of[i];
      sums[at] = sums_of[i];
      halves[at * 2 - r] = code_sum(lows_of[i]);
      halves[at * 2 - r + rows] = code_sum(highs_of[i]);
    }
  }

  // As an integer; anything, where it is not a number.
  static int32_t code_sum(float sum) { return static_cast<int32_t>(std::max(-kMaxSum, std::min(sum, kMaxSum))); }
  static constexpr float kMaxSum = 127 * kGroup / 2;
};

// The operands of some rows, block by block.
struct Int8Packing {
  RowBlocks blocks;
  int64_t groups;
  void* memory;

  // Of `rows` that are packed already: those of `blocks`.
  static Int8Packing of(View rows, const RowBlocks& blocks) {
    const int64_t groups = divide_up(rows.columns, kGroup);
    return {blocks, groups, reinterpret_cast<char*>(rows.data) + blocks.first * Int8Rows::bytes_per_row(groups)};
  }
  // Of all of `rows`, which are to be packed one by one.
  static Int8Packing of(View rows) { return of(rows, {0, rows.rows, block_height(rows.rows, kInt8Rows)}); }

  void pack(int64_t row, const float* x, int64_t columns) const {
    struct OneRow;
    const int64_t b = row / blocks.block_rows;
    block(b).pack(x, columns, row - blocks.begin(b), scratch<OneRow, float>(groups * kGroup));
  }
  Int8Rows block(int64_t b) const { return {memory, blocks.begin(b), blocks.height(b), groups}; }

  // This worker's share of the rows of x.
  void fill(View x, Worker worker) const {
    blocks.share_out(worker, [&](int64_t b, int64_t r) {
      const int64_t row = blocks.begin(b) + r;
      pack(row, x.row(blocks.first + row), x.columns);
    });
  }
};

// What the sums of a format's groups begin with: minus its zero, times the sum of the activations that will come.
class GroupStarts {
 public:
  explicit GroupStarts(const Int8Packing& packing) : packing_(packing) {
    struct Starts;
    starts_ = scratch<Starts, int32_t>(2 * packing.blocks.rows * packing.groups);
  }

  // Makes them for formats with this zero and so many scales in a group.
  void make(int zero, int num_scales) {
    if (zero == zero_ && num_scales == num_scales_) return;
    zero_ = zero, num_scales_ = num_scales;
    for (int64_t b = 0; b < packing_.blocks.num_blocks; ++b) {
      const Int8Rows x = packing_.block(b);
      int32_t* out = starts_ + packing_.blocks.begin(b) * packing_.groups * num_scales;
      const int32_t* halves = x.halves;
      if (num_scales == 2) {
        for (int64_t i = 0; i < 2 * packing_.groups * x.rows; ++i) out[i] = -zero * halves[i];
        continue;
      }
      for (int64_t g = 0; g < packing_.groups; ++g, out += x.rows, halves += 2 * x.rows)
        for (int64_t r = 0; r < x.rows; ++r) out[r] = -zero * (halves[r] + halves[x.rows + r]);
    }
  }
  // Of block b: [group][scale of it][row].
  const int32_t* block(int64_t b) const { return starts_ + packing_.blocks.begin(b) * packing_.groups * num_scales_; }

 private:
  const Int8Packing& packing_;
  int32_t* starts_;
  int zero_ = 0, num_scales_ = 1;
};

// The outlier channels of a packing, each once: rows mostly agree on them, so that a panel's weights there are unpacked
// once for all rows.
class OutlierChannels {
 public:
  explicit OutlierChannels(const Int8Packing& packing) {
    struct Slots;
    struct Known;
    struct Channels;
    const int64_t columns = packing.groups * kGroup;
    slots_ = scratch<Slots, int32_t>(packing.blocks.rows * kOutliers);
    channels_ = scratch<Channels, int32_t>(packing.blocks.rows * kOutliers);
    int32_t* known = scratch<Known, int32_t>(columns);  // channel -> its slot + 1
    std::fill(known, known + columns, 0);
    int32_t* slot = slots_;
    for (int64_t b = 0; b < packing.blocks.num_blocks; ++b) {
      const Int8Rows rows = packing.block(b);
      for (const Outlier* o = rows.outliers; o < rows.outliers + rows.rows * kOutliers; ++o) {
        if (!known[o->k]) {
          channels_[count_++] = o->k;
          known[o->k] = static_cast<int32_t>(count_);
        }
        *slot++ = known[o->k] - 1;
      }
    }
  }

  int64_t count() const { return count_; }
  int32_t channel(int64_t slot) const { return channels_[slot]; }

  // out [rows][32] gains the exact products of a block that begins with row `begin`; `weights`: [slot][32].
  void add(const Int8Rows& x, int64_t begin, const float* weights, float* out) const {
    constexpr int64_t kColumns = Matrix::kPanelColumns;
    const int32_t* slots = slots_ + begin * kOutliers;
    const Outlier* outlier = x.outliers;
    for (int64_t r = 0; r < x.rows; ++r, out += kColumns, slots += kOutliers, outlier += kOutliers) {
      Vec first = Vec::load(out), second = Vec::load(out + 16);
#pragma GCC unroll 2
      for (int i = 0; i < kOutliers; ++i) {
        const float* w = weights + slots[i] * kColumns;
        const Vec value = Vec::set1(outlier[i].value);
        first = fma(Vec::load(w), value, first);
        second = fma(Vec::load(w + 16), value, second);
      }
      first.store(out);
      second.store(out + 16);
    }
  }

 private:
  int32_t *slots_, *channels_;  // [row][kOutliers]; [slot]
  int64_t count_ = 0;
};

}  // namespace octavo
