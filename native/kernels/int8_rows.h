// Activations quantised to int8, the operands of linear_int8: packed in blocks of rows, by all workers together.
#pragma once

#include <bit>
#include <limits>

#include "kernels/row_blocks.h"
#include "octavo/matrix.h"
#include "octavo/memory.h"
#include "tiles/vec.h"

namespace octavo {

// The largest |x| of a row keep their float32 values and are left out of the groups.
inline constexpr int64_t kOutliers = 2;

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
    const int64_t padded = round_up(columns, kGroup);
    for (int64_t k = 0; k < padded; k += 16) {
      const int n = static_cast<int>(std::clamp<int64_t>(columns - k, 0, 16));
      Vec::load(x + (n ? k : 0), n).store(scratch + k);
    }
    for (int64_t i = 0; i < kOutliers; ++i) {
      const int32_t k = find_largest(scratch, padded);
      outliers[r * kOutliers + i] = {k, scratch[k]};
      scratch[k] = 0.0f;
    }
    for (int64_t g = 0; g < padded / kGroup; ++g) pack_group(scratch + g * kGroup, g, r);
  }

 private:
  // The index of the largest |x|, the lowest of equals.
  static int32_t find_largest(const float* x, int64_t padded) {
    Vec highest = Vec::zero();
    for (int64_t k = 0; k < padded; k += 16) highest = max(highest, abs(Vec::load(x + k)));
    const Vec wanted = Vec::set1(largest(highest));
    for (int64_t k = 0; k < padded; k += 16)
      if (const uint32_t found = equal(abs(Vec::load(x + k)), wanted))
        return static_cast<int32_t>(k + std::countr_zero(found));
    return 0;  // not a number anywhere: so will be the product
  }

  void pack_group(const float* x, int64_t g, int64_t r) const {
    const Vec low = Vec::load(x), high = Vec::load(x + 16);
    const float highest = largest(max(abs(low), abs(high)));
    const Vec inverse = Vec::set1(highest > 0 ? 127.0f / highest : 0.0f);
    const Vec low_codes = round(low * inverse), high_codes = round(high * inverse);
    int8_t* to = codes + (g * rows + r) * kGroup;
    low_codes.store_int8(to);
    high_codes.store_int8(to + 16);
    // What is not a number is not lost in a code.
    const bool numbers = (equal(low, low) & equal(high, high)) == 0xffff;
    const float scale = numbers ? highest / 127.0f : std::numeric_limits<float>::quiet_NaN();
    const int32_t low_sum = integer_sum(low_codes), high_sum = integer_sum(high_codes);
    scales[g * rows + r] = scale;
    sums[g * rows + r] = scale * static_cast<float>(low_sum + high_sum);
    halves[2 * g * rows + r] = low_sum;
    halves[(2 * g + 1) * rows + r] = high_sum;
  }
};

// The operands of some rows, block by block.
struct Int8Packing {
  RowBlocks blocks;
  int64_t groups;
  void* memory;

  Int8Rows block(int64_t b) const { return {memory, blocks.begin(b), blocks.height(b), groups}; }

  // This worker's share of the rows of x.
  void fill(View x, Worker worker) const {
    struct OneRow;
    float* one_row = scratch<OneRow, float>(groups * kGroup);
    blocks.share_out(worker, [&](int64_t b, int64_t r) {
      block(b).pack(x.row(blocks.first + blocks.begin(b) + r), x.columns, r, one_row);
    });
  }
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
    for (int64_t r = 0; r < x.rows; ++r, out += kColumns) {
      for (int64_t v = 0; v < kColumns / 16; ++v) {
        Vec acc = Vec::load(out + v * 16);
        for (int64_t i = r * kOutliers; i < (r + 1) * kOutliers; ++i) {
          const float* w = weights + slots_[begin * kOutliers + i] * kColumns + v * 16;
          acc = fma(Vec::load(w), Vec::set1(x.outliers[i].value), acc);
        }
        acc.store(out + v * 16);
      }
    }
  }

 private:
  int32_t *slots_, *channels_;  // [row][kOutliers]; [slot]
  int64_t count_ = 0;
};

}  // namespace octavo
