#include "octavo/matrix.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

namespace octavo {

DType parse_dtype(std::string_view name) {
  if (name == "float32") return DType::kFloat32;
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "int8") return DType::kInt8;
  if (name == "int16") return DType::kInt16;
  throw std::invalid_argument("dtype is '" + std::string(name) + "'; allowed: float32, bfloat16, int8, int16");
}

Storage parse_storage(std::string_view name) {
  if (name == "plain") return Storage::kPlain;
  if (name == "blocks") return Storage::kBlocks;
  if (name == "int8") return Storage::kInt8;
  if (name == "int4") return Storage::kInt4;
  if (name == "int8_row") return Storage::kInt8Row;
  throw std::invalid_argument("storage is '" + std::string(name) + "'; allowed: plain, blocks, int8, int4, int8_row");
}

namespace {

constexpr int64_t kColumns = Matrix::kPanelColumns;

// Scratch of one packing thread: the rows of a panel, as floats and as codes.
struct PanelRows {
  float* values;   // [32][padded columns]
  CodedRow coded;  // [32][groups][32] codes; [32][groups * kScales] scales; [32][groups] minimums
};

PanelRows panel_rows(int64_t padded_columns) {
  struct Values;
  struct Codes;
  struct Scales;
  struct Minimums;
  const int64_t groups = divide_up(padded_columns, kGroup);
  return {scratch<Values, float>(kColumns * padded_columns),
          {scratch<Codes, uint8_t>(kColumns * groups * kGroup), scratch<Scales, float>(kColumns * groups * 2),
           scratch<Minimums, float>(kColumns * groups)}};
}

// Calls fill(p, rows) for every panel, spread over the pool: panels are handed out one by one, since decoding takes
// unequal time.
template <class Fill>
void for_each_panel(ThreadPool& pool, int64_t num_panels, int64_t padded_columns, Fill fill) {
  std::atomic<int64_t> next{0};
  pool.run([&](int) {
    const PanelRows rows = panel_rows(padded_columns);
    for (int64_t p; (p = next.fetch_add(1)) < num_panels;) fill(p, rows);
  });
}

int64_t total_rows(const std::vector<MatrixSource>& sources) {
  int64_t n = 0;
  for (const auto& source : sources) n += source.rows;
  return n;
}

// A well-mixed function of the counter (splitmix64): random values that need no state.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

void random_row(uint64_t seed, int64_t n, int64_t columns, float scale, float* out) {
  for (int64_t k = 0; k < columns; ++k) {
    const uint64_t bits = mix(mix(seed) + static_cast<uint64_t>(n * columns + k)) >> 40;  // 24 of them
    out[k] = (static_cast<float>(bits) * 0x1p-23f - 1.0f) * scale;
  }
}

CodedRow row_of_panel(const CodedRow& coded, int64_t c, int64_t groups, int64_t scales) {
  return {coded.codes + c * groups * kGroup, coded.scales + c * groups * scales, coded.minimums + c * groups};
}

int64_t num_scales(SourceType type) {
  return with_block_format(type, [](auto f) -> int64_t { return f.kScales; });
}

}  // namespace

Matrix::Matrix(int64_t rows, int64_t columns, DType dtype, std::vector<float> bias)
    : rows_(rows), columns_(columns), dtype_(dtype), bias_(std::move(bias)) {}

// Decides what block types the panels have. False: plain ones.
bool Matrix::make_sections(const std::vector<MatrixSource>& sources, Storage storage) {
  int64_t first = 0;
  for (const auto& source : sources) {
    const SourceType type = storage == Storage::kInt8   ? SourceType::kQ8_0
                            : storage == Storage::kInt4 ? SourceType::kQ4_1
                                                        : source.type;
    if (storage == Storage::kPlain || storage == Storage::kInt8Row || !is_block_type(type)) return false;
    if (sections_.empty() || sections_.back().type != type) {
      if (first % kColumns) return false;  // the types change within a panel
      sections_.push_back({first / kColumns, 0, type, 0, 0});
    }
    first += source.rows;
    sections_.back().end_panel = divide_up(first, kColumns);
  }
  return true;
}

// Decides what stands where; the bytes of it all.
size_t Matrix::lay_out(const std::vector<MatrixSource>& sources, Storage storage) {
  if (!make_sections(sources, storage)) sections_.clear();
  narrow_ = dtype_ == DType::kFloat32 && !has_blocks() &&
            std::ranges::all_of(sources, [](const auto& source) { return source.type == SourceType::kBF16; });
  if ((dtype_ == DType::kInt16) != (storage == Storage::kInt8Row))
    throw std::invalid_argument("dtype int16 and storage int8_row go together");
  if (dtype_ == DType::kInt16 && columns_ > kMaxInt8Columns)
    throw std::invalid_argument("a matrix has " + std::to_string(columns_) + " columns; int16 activations allow " +
                                std::to_string(kMaxInt8Columns));
  if (dtype_ == DType::kInt8 && !has_blocks()) dtype_ = DType::kBFloat16;
  size_t bytes = 0;
  for (Section& s : sections_) {
    const int64_t group_bytes = with_format(s.type, [](auto f) -> int64_t { return PanelGroup<decltype(f)>::kBytes; });
    s.panel_bytes = static_cast<size_t>(group_bytes * num_groups()) + (in_halves() ? kColumnScaleBytes : 0);
    s.offset = bytes;
    bytes += static_cast<size_t>(s.end_panel - s.first_panel) * s.panel_bytes;
  }
  if (!has_blocks()) bytes = (has_header() ? sizeof(Header) : 0) + static_cast<size_t>(num_panels() * panel_bytes());
  if (dtype_ == DType::kInt16) bytes += static_cast<size_t>(num_steps() * step()) * sizeof(float);
  return bytes;
}

// Packs all panels. read(n, values, coded) gives row n: its values, or (`reads_values` false) its codes.
template <class Read>
void Matrix::pack(ThreadPool& pool, Arena& arena, bool reads_values, Read read) {
  if (dtype_ == DType::kInt16) choose_channel_scales(read);
  constexpr size_t kLeastValues = 256;  // for one exception: four bytes, and a moment of every product
  compact_ = has_header() && num_values() > 0 && num_values() <= CompactException::kMaxValues;
  const auto panels = static_cast<size_t>(num_panels());
  Exceptions exceptions{panels * static_cast<size_t>(num_values()) / kLeastValues, {}};
  if (compact_) exceptions.of_panel.resize(panels);
  pack_panels(pool, reads_values, read, exceptions);
  if (!compact_) return;
  if (exceptions.count <= exceptions.most) {
    keep(exceptions);
    return arena.shrink(memory_, compact_bytes());
  }
  exceptions.of_panel = {};
  compact_ = false;
  pack_panels(pool, reads_values, read, exceptions);
}

template <class Read>
void Matrix::pack_panels(ThreadPool& pool, bool reads_values, Read read, Exceptions& exceptions) {
  const int64_t padded = num_steps() * step();
  for_each_panel(pool, num_panels(), padded, [&](int64_t p, const PanelRows& rows) {
    if (!has_blocks()) std::memset(rows.values, 0, static_cast<size_t>(kColumns * padded) * sizeof(float));
    const int64_t scales = has_blocks() ? num_scales(block_type(p)) : 0;
    for (int64_t c = 0; c < kColumns && p * kColumns + c < rows_; ++c) {
      float* values = rows.values + c * padded;
      const CodedRow coded = row_of_panel(rows.coded, c, num_groups(), scales);
      read(p * kColumns + c, values, coded);
      if (has_blocks() && reads_values) quantise_row(block_type(p), values, columns_, coded);
    }
    if (has_blocks())
      pack_block_panel(p, rows.coded);
    else if (dtype_ == DType::kInt16)
      pack_int8_panel(p, rows.values);
    else if (compact_)
      pack_compact(p, rows.values, exceptions);
    else
      pack_panel(p, rows.values);
  });
}

Matrix::Matrix(ThreadPool& pool, Arena& arena, const std::vector<MatrixSource>& sources, int64_t columns, DType dtype,
               Storage storage, std::vector<float> bias)
    : Matrix(total_rows(sources), columns, dtype, std::move(bias)) {
  memory_ = arena.allocate(lay_out(sources, storage));
  const bool splits = storage == Storage::kBlocks && has_blocks();
  pack(pool, arena, !splits, [&](int64_t n, float* values, const CodedRow& coded) {
    auto source = sources.begin();
    for (; n >= source->rows; ++source) n -= source->rows;
    const uint8_t* row = source->row(n, columns);
    splits ? split_row(source->type, row, columns, coded) : decode_row(source->type, row, values, columns);
  });
}

Matrix Matrix::packed(std::shared_ptr<const Memory> memory, size_t offset, const std::vector<MatrixSource>& sources,
                      int64_t columns, DType dtype, Storage storage, std::vector<float> bias) {
  Matrix matrix(total_rows(sources), columns, dtype, std::move(bias));
  const size_t left = memory->bytes() - std::min(offset, memory->bytes());
  const auto checked = [&](size_t bytes) {
    if (bytes > left) throw std::invalid_argument("the packed weights end before this matrix does");
    return bytes;
  };
  size_t bytes = matrix.lay_out(sources, storage);
  matrix.memory_ = {memory, memory->as<uint8_t>() + offset, 0};
  if (matrix.has_header() && checked(sizeof(Header)) && matrix.data<Header>()->compact) {
    matrix.compact_ = true;
    checked(matrix.bytes_before_exceptions());
    bytes = matrix.compact_bytes();
  }
  matrix.memory_.bytes = checked(bytes);
  return matrix;
}

Matrix Matrix::random(ThreadPool& pool, Arena& arena, int64_t rows, int64_t columns, DType dtype, Storage storage,
                      uint64_t seed, float scale) {
  Matrix matrix(rows, columns, dtype, {});
  matrix.memory_ = arena.allocate(matrix.lay_out({{nullptr, SourceType::kF32, rows, nullptr}}, storage));
  matrix.pack(pool, arena, true,
              [&](int64_t n, float* values, const CodedRow&) { random_row(seed, n, columns, scale, values); });
  return matrix;
}

void Matrix::pack_panel(int64_t p, const float* rows) {
  if (holds_float32()) {
    const int64_t padded = num_steps() * step();
    float* out = const_cast<float*>(panel<float>(p));
    for (int64_t k = 0; k < padded; ++k)
      for (int64_t c = 0; c < kColumns; ++c) *out++ = rows[c * padded + k];
    return;
  }
  interleave_pairs(rows, const_cast<bf16*>(panel<bf16>(p)));
}

// Rounds first, in one straight loop; then interleaves pairs.
void Matrix::interleave_pairs(const float* rows, bf16* out) const {
  const int64_t steps = num_steps(), padded = 2 * steps;
  struct RoundScratch;
  bf16* rounded = scratch<RoundScratch, bf16>(kColumns * padded);
  for (int64_t i = 0; i < kColumns * padded; ++i) rounded[i] = to_bf16(rows[i]);
  for (int64_t s = 0; s < steps; ++s)
    for (int64_t c = 0; c < kColumns; ++c, out += 2) std::memcpy(out, rounded + c * padded + 2 * s, 2 * sizeof(bf16));
}

// One scale serves a whole row, so the largest of its values take the resolution of all others, and they mostly belong
// to a few channels. Activations, in sixteen bits, have resolution to spare: values are divided and activations
// multiplied by a scale of their channel. Channels then add most evenly to the error where that is the square root of
// what they are large: with mean square m, m^(1/4). Some of the rows say enough about m.
template <class Read>
void Matrix::choose_channel_scales(Read read) {
  constexpr int64_t kSampledRows = 256;
  constexpr double kLeastShare = 1.0 / 65536;  // of the largest mean square: scales differ, but not without bounds
  const int64_t sampled = std::min(rows_, kSampledRows);
  std::vector<float> row(static_cast<size_t>(num_steps() * step()));
  std::vector<double> squares(static_cast<size_t>(columns_));
  for (int64_t i = 0; i < sampled; ++i) {
    read(i * rows_ / sampled, row.data(), CodedRow{});
    for (int64_t k = 0; k < columns_; ++k) squares[k] += static_cast<double>(row[k]) * row[k];
  }
  const double least = *std::max_element(squares.begin(), squares.end()) * kLeastShare;
  auto* scales = const_cast<float*>(channel_scales());
  std::fill(scales, scales + row.size(), 1.0f);
  if (!(least > 0)) return;
  for (int64_t k = 0; k < columns_; ++k)
    scales[k] = static_cast<float>(std::sqrt(std::sqrt(std::max(squares[k], least) / static_cast<double>(sampled))));
}

void Matrix::pack_int8_panel(int64_t p, float* rows) {
  const int64_t padded = num_steps() * step();
  const float* channels = channel_scales();
  struct Codes;
  int8_t* codes = scratch<Codes, int8_t>(padded);
  auto* out = const_cast<int8_t*>(panel<int8_t>(p));
  auto& ends = const_cast<Int8Columns&>(int8_columns(p));
  for (int64_t c = 0; c < kColumns; ++c) {
    float* row = rows + c * padded;
    for (int64_t k = 0; k < padded; ++k) row[k] /= channels[k];
    ends.scales[c] = quantise_row(row, padded, codes);
    ends.sums[c] = std::accumulate(codes, codes + padded, int32_t{0});
    for (int64_t k = 0; k < padded; k += 4) std::memcpy(out + (k / 4 * kColumns + c) * 4, codes + k, 4);
  }
}

namespace {

// The codes of column c, into groups of zeros.
template <class Group>
void pack_codes(uint8_t* group, const uint8_t* codes, int64_t groups, int64_t c, DType dtype, int bits) {
  CodePlace places[kGroup];  // of column 0; another column's dwords are all as far from these
  for (int64_t i = 0; i < kGroup; ++i) places[i] = CodePlace::of(dtype, bits, 0, i);
  const int64_t column = CodePlace::of(dtype, bits, c, 0).dword;
  for (int64_t g = 0; g < groups; ++g, group += Group::kBytes, codes += kGroup) {
    auto* dwords = reinterpret_cast<uint32_t*>(group) + column;
    for (int64_t i = 0; i < kGroup; ++i) dwords[places[i].dword] |= std::rotl(uint32_t{codes[i]}, places[i].turn);
  }
}

float largest_magnitude(const float* values, int64_t n) {
  float largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (std::isnan(values[i])) return values[i];
    largest = std::max(largest, std::abs(values[i]));
  }
  return largest;
}

}  // namespace

// The arena gives zeros, into which codes are set; columns beyond N stay so.
void Matrix::pack_block_panel(int64_t p, const CodedRow& coded_rows) {
  with_format(block_type(p), [&]<class Format>(Format) {
    using Group = PanelGroup<Format>;
    using Scale = typename Format::Scale;
    const int64_t groups = num_groups();
    for (int64_t c = 0; c < kColumns && p * kColumns + c < rows_; ++c) {
      const CodedRow row = row_of_panel(coded_rows, c, groups, Format::kScales);
      uint8_t* group = const_cast<uint8_t*>(block_panel(p));
      pack_codes<Group>(group, row.codes, groups, c, dtype_, Format::kBits);
      HalfScaling by{1, 1, 1};
      if (in_halves()) {
        by = HalfScaling::of_column(Format::kBits, largest_magnitude(row.scales, groups * Format::kScales),
                                    Format::kMinimum ? largest_magnitude(row.minimums, groups) : 0.0f);
        const_cast<float*>(column_scales(p))[c] = by.of_sums;
      }
      for (int64_t g = 0; g < groups; ++g, group += Group::kBytes) {
        Scale* scales = reinterpret_cast<Scale*>(group + Group::kCodeBytes) + scale_place(c);
        for (int64_t i = 0; i < Format::kScales; ++i)
          scales[i * kColumns] = static_cast<Scale>(row.scales[g * Format::kScales + i] * by.of_scales);
        if (Format::kMinimum) scales[Format::kScales * kColumns] = static_cast<Scale>(row.minimums[g] * by.of_minimums);
      }
    }
  });
}

namespace {

// Value k of a column of a block panel, whose code stands at `place` and its first scale at `scale_place`; of a panel
// in halves, multiplied as HalfScaling says.
template <class Format>
float block_value(const uint8_t* panel, int64_t scale_place, int64_t k, CodePlace place, const HalfScaling& by) {
  using Group = PanelGroup<Format>;
  using Scale = typename Format::Scale;
  const uint8_t* group = panel + k / kGroup * Group::kBytes;
  const uint32_t dword = reinterpret_cast<const uint32_t*>(group)[place.dword];
  const int code = static_cast<int>(std::rotr(dword, place.turn) & ((1u << Format::kBits) - 1));
  const Scale* scales = reinterpret_cast<const Scale*>(group + Group::kCodeBytes) + scale_place;
  const float scale = static_cast<float>(scales[k % kGroup * Format::kScales / kGroup * kColumns]) * by.of_scales;
  const float value = scale * static_cast<float>(code - Format::kZero);
  if (!Format::kMinimum) return value;
  return value + static_cast<float>(scales[Format::kScales * kColumns]) * by.of_minimums;
}

}  // namespace

void Matrix::row(int64_t n, float* out) const {
  const int64_t p = n / kColumns, c = n % kColumns;
  if (has_blocks()) {
    with_format(block_type(p), [&]<class Format>(Format) {
      HalfScaling by{1, 1, 1};
      if (in_halves()) by = HalfScaling::back(Format::kBits, column_scales(p)[c]);
      for (int64_t k = 0; k < columns_; ++k)
        out[k] = block_value<Format>(block_panel(p), scale_place(c), k,
                                     CodePlace::of(dtype_, Format::kBits, c, k % kGroup), by);
    });
  } else if (holds_float32()) {
    const float* in = panel<float>(p) + c;
    for (int64_t k = 0; k < columns_; ++k) out[k] = in[k * kColumns];
  } else if (dtype_ == DType::kInt16) {
    const int8_t* in = panel<int8_t>(p) + 4 * c;
    const float scale = int8_columns(p).scales[c];
    for (int64_t k = 0; k < columns_; ++k)
      out[k] = scale * static_cast<float>(in[k / 4 * kColumns * 4 + k % 4]) * channel_scales()[k];
  } else if (is_compact()) {
    compact_row(p, c, out);
  } else {
    const bf16* in = panel<bf16>(p) + 2 * c;
    for (int64_t k = 0; k < columns_; ++k) out[k] = to_float(in[k / 2 * kColumns * 2 + k % 2]);
  }
}

std::string Matrix::format() const {
  if (!has_blocks()) return holds_float32() ? "float32" : dtype_ == DType::kInt16 ? "int8" : "bfloat16";
  std::string names;
  for (const Section& s : sections_) {
    const std::string name(type_name(s.type));
    if (names.find(name) == std::string::npos) names += (names.empty() ? "" : "+") + name;
  }
  return names;
}

}  // namespace octavo
