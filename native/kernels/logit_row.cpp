#include "kernels/logit_row.h"

#include <algorithm>
#include <array>
#include <functional>

#include "tiles/vec.h"

namespace octavo {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t kPanel = Matrix::kPanelColumns;
constexpr float kLargestFinite = std::numeric_limits<float>::max();
constexpr float kSmallestWeight = 1e-37f;  // exp() ends at e^-87, 1.6e-38: what it gives there means 0

double sum_block(const float* w) {
  double lane[16] = {};
  for (int j = 0; j < kBlock; j += 16)
    for (int i = 0; i < 16; ++i) lane[i] += static_cast<double>(w[j + i]);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

}  // namespace

float maximum(const float* x, int32_t count) {
  Vec top = Vec::set1(-kInfinity);
  for (int32_t j = 0; j < count; j += 16) {
    const int rest = count - j;
    top = max(top, rest >= 16 ? Vec::load(x + j) : first(Vec::load(x + j, rest), rest, -kInfinity));
  }
  int32_t not_finite = 0;
  for (int32_t j = 0; j < count; ++j) not_finite |= !(x[j] <= kLargestFinite);
  return not_finite ? kNaN : largest(top);
}

bool RowScan::read(const float* x, int32_t size, const float* panel_maxima) {
  x_ = x;
  size_ = size;
  top_ = -kInfinity;
  block_max_.clear();
  bool finite = true;
  for (int32_t begin = 0; begin < size; begin += kBlock) {
    const int32_t count = std::min(kBlock, size - begin);
    const bool known = panel_maxima != nullptr && count == kBlock;
    const float top = known ? maximum(panel_maxima + begin / kPanel, kBlock / kPanel) : maximum(x + begin, count);
    finite = finite && top == top;
    block_max_.push_back(top);
    top_ = std::max(top_, top);
  }
  return finite;
}

int32_t RowScan::argmax() const {
  const auto block = std::find(block_max_.begin(), block_max_.end(), top_) - block_max_.begin();
  return static_cast<int32_t>(std::find(x_ + block * kBlock, x_ + size_, top_) - x_);
}

float RowScan::threshold(int32_t count) {
  if (count > num_blocks()) return -kLargestFinite;
  sorted_ = block_max_;
  const auto nth = sorted_.begin() + (count - 1);
  std::nth_element(sorted_.begin(), nth, sorted_.end(), std::greater<>());
  return std::max(*nth, -kLargestFinite);
}

void RowScan::collect(float threshold, std::vector<Candidate>& out) const {
  out.clear();
  for (int32_t block = 0; block < num_blocks(); ++block) {
    if (block_max_[block] < threshold) continue;
    const int32_t end = std::min(size_, (block + 1) * kBlock);
    for (int32_t id = block * kBlock; id < end; ++id)
      if (x_[id] >= threshold) out.push_back({x_[id], id, 0});
  }
}

int32_t RowScan::rank(int32_t id) const {
  const float value = x_[id];
  int32_t before = 0;
  for (int32_t i = 0; i < size_; ++i) before += x_[i] > value;
  for (int32_t i = 0; i < id; ++i) before += x_[i] == value;
  return before + 1;
}

Softmax::Softmax(const RowScan& row, float temperature, float min_p)
    : row_(row), max_(row.top()), inverse_temperature_(1.0f / temperature), floor_(std::max(min_p, kSmallestWeight)) {}

void Softmax::weights(int32_t begin, int32_t count, float* w) const {
  const float* x = row_.data() + begin;
  const Vec max = Vec::set1(max_), scale = Vec::set1(inverse_temperature_);
  for (int32_t j = 0; j < count; j += 16) {
    const int rest = count - j;
    const Vec v = rest >= 16 ? Vec::load(x + j) : first(Vec::load(x + j, rest), rest, -kInfinity);
    exp((v - max) * scale).store(w + j);
  }
  std::fill(w + count, w + kBlock, 0.0f);
  for (int32_t j = 0; j < count; ++j) {
    const bool kept = x[j] > cutoff_.value || (x[j] == cutoff_.value && begin + j <= cutoff_.id);
    w[j] = kept && w[j] >= floor_ ? w[j] : 0;
  }
}

void Softmax::weigh(std::vector<Candidate>& candidates) const {
  const Vec max = Vec::set1(max_), scale = Vec::set1(inverse_temperature_);
  for (size_t begin = 0; begin < candidates.size(); begin += 16) {
    const size_t count = std::min<size_t>(16, candidates.size() - begin);
    float w[16] = {};
    for (size_t j = 0; j < count; ++j) w[j] = candidates[begin + j].value;
    exp((Vec::load(w) - max) * scale).store(w);
    for (size_t j = 0; j < count; ++j) candidates[begin + j].weight = w[j] >= floor_ ? w[j] : 0;
  }
}

double Softmax::sum(std::vector<double>& block_sums) const {
  float w[kBlock];
  double total = 0;
  block_sums.assign(row_.num_blocks(), 0.0);
  for (int32_t block = 0; block < row_.num_blocks(); ++block) {
    if (row_.block_max(block) < cutoff_.value) continue;
    const int32_t begin = block * kBlock, count = std::min(kBlock, row_.size() - begin);
    weights(begin, count, w);
    block_sums[block] = sum_block(w);
    total += block_sums[block];
  }
  return total;
}

Cutoff Softmax::cutoff_of_mass(double mass, std::vector<Candidate>& candidates) const {
  std::array<double, kNumBuckets> sums{};
  for (int32_t begin = 0; begin < row_.size(); begin += kBlock) {
    float w[kBlock];
    const int32_t count = std::min(kBlock, row_.size() - begin);
    weights(begin, count, w);
    for (int32_t j = 0; j < count; ++j)
      if (w[j] > 0) sums[bucket(row_.data()[begin + j])] += static_cast<double>(w[j]);
  }
  int32_t last = 0;  // the bucket in which the prefix ends
  for (int32_t i = 0; i < kNumBuckets && mass > 0; ++i) {
    if (sums[i] == 0) continue;
    last = i;
    if (sums[i] >= mass) break;
    mass -= sums[i];
  }
  candidates.clear();
  for (int32_t block = 0; block < row_.num_blocks(); ++block) {
    if (bucket(row_.block_max(block)) > last) continue;
    const int32_t end = std::min(row_.size(), (block + 1) * kBlock);
    for (int32_t id = block * kBlock; id < end; ++id)
      if (bucket(row_.data()[id]) == last) candidates.push_back({row_.data()[id], id, 0});
  }
  weigh(candidates);
  return prefix_of_mass(candidates, mass);
}

int32_t Softmax::draw(double u, double total, const std::vector<double>& block_sums) const {
  const double target = u * total;
  // Rounding can leave the target at or above the last running sum: then the last block, or id, with any weight is it.
  int32_t block = 0;
  double before = 0, running = 0;
  for (int32_t i = 0; i < row_.num_blocks() && running <= target; ++i) {
    if (block_sums[i] == 0) continue;
    block = i;
    before = running;
    running += block_sums[i];
  }
  float w[kBlock];
  const int32_t begin = block * kBlock, count = std::min(kBlock, row_.size() - begin);
  weights(begin, count, w);
  int32_t drawn = begin;
  running = before;
  for (int32_t j = 0; j < count && running <= target; ++j) {
    if (w[j] == 0) continue;
    drawn = begin + j;
    running += static_cast<double>(w[j]);
  }
  return drawn;
}

Cutoff prefix_of_mass(std::vector<Candidate>& candidates, double mass) {
  // Halve the range that holds the prefix's end: what lies before `first` is in, with its mass already taken off.
  auto first = candidates.begin(), last = candidates.end();
  while (last - first > 1) {
    const auto middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, in_order);
    double before = 0;
    for (auto c = first; c != middle; ++c) before += static_cast<double>(c->weight);
    if (before >= mass) {
      last = middle;
    } else {
      mass -= before;
      first = middle;
    }
  }
  return {first->value, first->id};
}

}  // namespace octavo
