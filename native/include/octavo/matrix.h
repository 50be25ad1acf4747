// A weight matrix [N, K] (N outputs, K inputs), packed once at load for the multiply tiles. Owns the layout:
//
//   panel p (32 columns of the product):  [step 0: cols 0-15 | cols 16-31] [step 1: ...] ...
//
// so that a multiply reads strictly ascending addresses. Columns beyond N are zero.
//
// Plain panels hold values in the matrix's dtype; their steps are padded with zeros to whole blocks of 16 (64 bytes of
// packed activations, and the depth of an AMX tile):
//   float32: a step is 1 k, a vector [16 columns];   bfloat16: 2 k, [16 columns][2 k];   int8: 4 k, [16 columns][4 k]
// A float32 matrix whose sources are all BF16 is narrow: its panels hold them as they are, in the bfloat16 layout.
// Panels in the bfloat16 layout are compact (octavo/compact.h) where few of their values are exceptions; behind the
// panels then stands where each one's exceptions begin, and all of these. A line before the panels tells.
// Behind the codes of an int8 panel stand the scales of its columns and the sums of their codes (Int8Columns).
// Block panels keep the integers of a block type. A step is a group of 32 k: first the codes, as the products want them
// (see CodePlace), then for each scale of a group [32] scales, then [32] minimums where the type has them. What stands
// beyond K is finite; activations are zero there. Panels in half precision (octavo/halves.h) have their scales and
// minimums in halves, in an order of their own, and behind the groups [32] floats, by which sums are multiplied.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "octavo/blocks.h"
#include "octavo/compact.h"
#include "octavo/decode.h"
#include "octavo/halves.h"
#include "octavo/memory.h"
#include "octavo/thread_pool.h"
#include "octavo/types.h"

namespace octavo {

// `rows` rows of K values of a checkpoint tensor; row i of the matrix is row `row_order[i]` of the data.
struct MatrixSource {
  const uint8_t* data;
  SourceType type;
  int64_t rows;
  const int32_t* row_order;  // null: the identity

  const uint8_t* row(int64_t i, int64_t columns) const {
    return data + (row_order ? row_order[i] : i) * row_bytes(type, columns);
  }
};

// How the values are kept.
enum class Storage {
  kPlain,    // in the matrix's dtype
  kBlocks,   // sources of block types as they are; plain where one is not, or where types change within a panel
  kInt8,     // quantised at load, to Q8_0
  kInt4,     // quantised at load, to Q4_1
  kInt8Row,  // quantised at load, to plain panels of int8: one scale for a whole row of the matrix
};

Storage parse_storage(std::string_view name);  // throws std::invalid_argument

// Where in a group of a block panel the code of column c and k = i stands: a dword, and by how many bits the code is
// turned left in it.
//
// For int8 activations, in dwords of four k, as vpdpbusd takes them: vector pair j holds k = 4j … 4j + 3 of its 32
// columns; with 4-bit codes in the low halves of its bytes, k = 4(j + 4) … in the high ones.
// For bfloat16, in the order of the pairs into which they are unpacked: lanes are [8 columns][2 k], a dword holds the
// codes of 8 (or, of 8 bits, 4) steps of 2 k.
// For bfloat16 in half precision, the same with 16 bits: lanes are [16 columns][2 k], a dword holds two of them, each
// with 4 (or 2) steps. Codes of 4 bits stand from bit 6 and bit 2 on of a lane, and then from where turning the dword
// by 8 bits brings the others there.
struct CodePlace {
  int64_t dword;
  int turn;

  static CodePlace in_dwords(int bits, int64_t c, int64_t i) {
    const int64_t j = bits == 4 ? i / 4 % 4 : i / 4;
    return {j * 32 + c, static_cast<int>(i % 4 * 8) + (bits == 4 && i >= 16 ? 4 : 0)};
  }
  static CodePlace in_pairs(int bits, int64_t c, int64_t i) {
    const int64_t steps = 32 / bits, step = i / 2, lane = c % 8 * 2 + i % 2;
    const int64_t vector = (c / 16 * (16 / steps) + step / steps) * 2 + c / 8 % 2;
    return {vector * 16 + lane, static_cast<int>(step % steps) * bits};
  }
  static CodePlace in_halves(int bits, int64_t c, int64_t i) {
    const int64_t steps = 16 / bits, step = i / 2, vector = step / steps * 2 + c / 16;
    const int s = static_cast<int>(step % steps), lane = static_cast<int>(i % 2) * 16;
    return {vector * 16 + c % 16, lane + (bits == 4 ? s / 2 * 8 + (s % 2 ? 2 : 6) : s * 8)};
  }
  static CodePlace of(DType activations, int bits, int64_t c, int64_t i) {
    if (activations == DType::kInt8) return in_dwords(bits, c, i);
    return kUnpacksInHalves ? in_halves(bits, c, i) : in_pairs(bits, c, i);
  }
};

template <class Format>
struct PanelGroup {
  static constexpr int64_t kColumns = 32;
  static constexpr int64_t kVectors = Format::kBits == 4 ? 4 : 8;  // pairs of vectors of codes
  static constexpr int64_t kCodeBytes = kColumns * kGroup * Format::kBits / 8;
  static constexpr int64_t kScaleBytes = kColumns * Format::kScales * sizeof(typename Format::Scale);
  static constexpr int64_t kMinimumBytes = Format::kMinimum ? kColumns * sizeof(typename Format::Scale) : 0;
  static constexpr int64_t kBytes = kCodeBytes + kScaleBytes + kMinimumBytes;
};

class Matrix {
 public:
  static constexpr int64_t kPanelColumns = 32;
  static constexpr int64_t kBlockSteps = 16;
  // Sums of products of bytes over so many k fit 32 bits, and in their upper half a carry from the lower.
  static constexpr int64_t kMaxInt8Columns = 1 << 17;

  // Stacks the sources along N. `dtype`: the type to which activations are rounded; int8 becomes bfloat16 where the
  // panels are plain. int16 and kInt8Row go together, std::invalid_argument otherwise.
  // `bias`: N floats, or empty.
  Matrix(ThreadPool& pool, Arena& arena, const std::vector<MatrixSource>& sources, int64_t columns, DType dtype,
         Storage storage, std::vector<float> bias);
  // What the matrix of these sources, whose data is not read, was packed to before, by the same build: from `offset` of
  // `memory` on, a multiple of 64. Throws std::invalid_argument where that ends before it;
  // what stands there is trusted.
  static Matrix packed(std::shared_ptr<const Memory> memory, size_t offset, const std::vector<MatrixSource>& sources,
                       int64_t columns, DType dtype, Storage storage, std::vector<float> bias);
  // Uniform random values in [-scale, scale], the same for the same seed whatever the number of threads.
  static Matrix random(ThreadPool& pool, Arena& arena, int64_t rows, int64_t columns, DType dtype, Storage storage,
                       uint64_t seed, float scale);

  int64_t rows() const { return rows_; }        // N
  int64_t columns() const { return columns_; }  // K
  DType dtype() const { return dtype_; }
  size_t bytes() const { return memory_.bytes; }
  const uint8_t* packed() const { return data<const uint8_t>(); }  // all panels, and what stands before and behind
  const float* bias() const { return bias_.empty() ? nullptr : bias_.data(); }

  // The values of a float32 matrix are all bfloat16's, and kept as such.
  bool is_narrow() const { return narrow_; }
  bool is_compact() const { return compact_; }
  // Whether products with bfloat16 must unpack panels to plain ones.
  bool needs_unpacking() const { return compact_ || has_blocks(); }

  int64_t num_panels() const { return divide_up(rows_, kPanelColumns); }
  // Of plain panels, and of block panels unpacked to bfloat16; a step is so many k, four bytes of a column.
  int64_t num_steps() const { return round_up(divide_up(columns_, step()), kBlockSteps); }
  int64_t step() const { return holds_float32() ? 1 : dtype_ == DType::kInt16 ? 4 : 2; }
  int64_t num_groups() const { return divide_up(columns_, kGroup); }

  bool has_blocks() const { return !sections_.empty(); }
  SourceType block_type(int64_t p) const { return section(p).type; }
  const uint8_t* block_panel(int64_t p) const {
    const Section& s = section(p);
    return data<uint8_t>() + s.offset + (p - s.first_panel) * s.panel_bytes;
  }
  // A block type as the panels hold it: f(BlockFormat<...>()).
  template <class F>
  decltype(auto) with_format(SourceType type, F&& f) const {
    return with_block_format(type, [&]<class Format>(Format) {
      if constexpr (kUnpacksInHalves)
        if (in_halves()) return f(InHalves<Format>());
      return f(Format());
    });
  }
  // [32]: what sums of a panel's columns are multiplied by.
  const float* column_scales(int64_t p) const {
    static constexpr auto kOnes = [] {
      std::array<float, kPanelColumns> ones;
      ones.fill(1.0f);
      return ones;
    }();
    if (!in_halves()) return kOnes.data();
    return reinterpret_cast<const float*>(block_panel(p) + section(p).panel_bytes - kColumnScaleBytes);
  }
  // What inputs of products are multiplied by before they are rounded to bfloat16; column_scales undo it.
  float input_factor() const { return in_halves() ? HalfScaling::kInputFactor : 1; }
  template <class T>
  const T* panel(int64_t p) const {  // a plain or compact one
    return reinterpret_cast<const T*>(panels() + p * panel_bytes());
  }
  std::span<const CompactException> exceptions(int64_t p) const {  // of a compact panel
    const uint32_t* starts = exception_starts();
    return {all_exceptions() + starts[p], starts[p + 1] - starts[p]};
  }
  // Of an int8 panel: value = scale * code * that of the channel. `sums`: of all codes of a column.
  struct Int8Columns {
    float scales[kPanelColumns];
    int32_t sums[kPanelColumns];
  };
  const Int8Columns& int8_columns(int64_t p) const {
    return *reinterpret_cast<const Int8Columns*>(panel<uint8_t>(p) + code_bytes());
  }
  // Of each k of int8 panels, to whole steps: by which activations are multiplied before they are rounded.
  const float* channel_scales() const {
    return reinterpret_cast<const float*>(data<uint8_t>() + num_panels() * panel_bytes());
  }
  // Of a plain or compact panel.
  int64_t panel_bytes() const {
    if (compact_) return CompactBlock::panel_bytes(num_values());
    return code_bytes() + (dtype_ == DType::kInt16 ? static_cast<int64_t>(sizeof(Int8Columns)) : 0);
  }
  // Row n (K floats) as it was packed: the embedding of token n, where the matrix is an embedding table.
  void row(int64_t n, float* out) const;
  // How the values are kept, for people: bfloat16, int8, Q4_1, Q4_K+Q6_K …
  std::string format() const;

 private:
  // Panels of one block type.
  struct Section {
    int64_t first_panel, end_panel;
    SourceType type;
    size_t offset, panel_bytes;
  };

  Matrix(int64_t rows, int64_t columns, DType dtype, std::vector<float> bias);
  static constexpr size_t kColumnScaleBytes = kPanelColumns * sizeof(float);
  bool in_halves() const { return kUnpacksInHalves && has_blocks() && dtype_ == DType::kBFloat16; }
  // Of column c, among the scales of a group.
  int64_t scale_place(int64_t c) const { return in_halves() ? HalfScaling::place(c) : c; }
  bool holds_float32() const { return dtype_ == DType::kFloat32 && !narrow_; }
  bool holds_bfloat16() const { return !has_blocks() && (dtype_ == DType::kBFloat16 || narrow_); }
  int64_t num_values() const { return num_steps() * step() * kPanelColumns; }  // of a plain panel
  // Before the panels of a matrix that may be compact.
  struct alignas(64) Header {
    uint64_t compact;  // 0: plain
  };
  bool has_header() const { return (narrow_ ? kCompactsNarrow : kCompacts) && holds_bfloat16(); }
  const uint8_t* panels() const { return data<uint8_t>() + (has_header() ? sizeof(Header) : 0); }
  const uint32_t* exception_starts() const {  // [panels + 1], padded to lines
    return panel<uint32_t>(num_panels());
  }
  const CompactException* all_exceptions() const {
    return reinterpret_cast<const CompactException*>(exception_starts() + round_up(num_panels() + 1, 16));
  }
  size_t bytes_before_exceptions() const {
    return static_cast<size_t>(reinterpret_cast<const uint8_t*>(all_exceptions()) - packed());
  }
  size_t compact_bytes() const {
    return bytes_before_exceptions() + exception_starts()[num_panels()] * sizeof(CompactException);
  }
  size_t lay_out(const std::vector<MatrixSource>& sources, Storage storage);
  int64_t code_bytes() const { return num_steps() * kPanelColumns * 4; }
  bool make_sections(const std::vector<MatrixSource>& sources, Storage storage);
  const Section& section(int64_t p) const {
    const Section* s = sections_.data();
    while (p >= s->end_panel) ++s;
    return *s;
  }
  template <class T>
  T* data() const {
    return static_cast<T*>(memory_.data);
  }
  // Those of each panel; panels are packed as long as there are not too many.
  struct Exceptions {
    size_t most;
    std::vector<std::vector<CompactException>> of_panel;
    std::atomic<size_t> count{0};
  };
  template <class Read>
  void pack(ThreadPool& pool, Arena& arena, bool reads_values, Read read);
  template <class Read>
  void pack_panels(ThreadPool& pool, bool reads_values, Read read, Exceptions& exceptions);
  void pack_panel(int64_t p, const float* rows_of_panel);
  void interleave_pairs(const float* rows_of_panel, bf16* plain_panel) const;
  void pack_compact(int64_t p, const float* rows_of_panel, Exceptions& exceptions);
  void keep(const Exceptions& exceptions);
  template <class Read>
  void choose_channel_scales(Read read);
  void pack_int8_panel(int64_t p, float* rows_of_panel);
  void pack_block_panel(int64_t p, const CodedRow& coded_rows);
  void compact_row(int64_t p, int64_t c, float* out) const;

  int64_t rows_, columns_;
  DType dtype_;
  bool narrow_ = false, compact_ = false;
  std::vector<float> bias_;
  std::vector<Section> sections_;  // empty: plain
  Arena::Piece memory_;
};

}  // namespace octavo
