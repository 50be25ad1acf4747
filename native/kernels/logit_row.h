// One row of logits: its maximum, its head (the most likely ids) and its softmax, without ever sorting it whole.
//
// "In order" means: larger logit first, then lower id. Truncation always keeps a prefix of that order, so that one
// element, the last kept (Cutoff), says it all.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "octavo/matrix.h"
#include "tiles/vec.h"

namespace octavo {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Ids are read in blocks. 128: the fold of a block's lanes is a small part of its work, and a vocabulary of 49 thousand
// has 384 block maxima, from which a threshold for the first 384 ids is read off.
constexpr int kBlock = 128;

struct Candidate {
  float value;
  int32_t id;
  float weight;
};
inline bool in_order(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// Keeps the ids up to (value, id) in order.
struct Cutoff {
  float value = -kInfinity;
  int32_t id = std::numeric_limits<int32_t>::max();
};

// The largest of `count` logits; NaN where one of them is NaN or positive infinity.
float maximum(const float* x, int32_t count);
inline float maximum(Vec first, Vec second) {  // of 32
  const Vec limit = Vec::set1(std::numeric_limits<float>::max());
  const bool finite = (not_up_to(first, limit) | not_up_to(second, limit)) == 0;
  return finite ? largest(max(first, second)) : std::numeric_limits<float>::quiet_NaN();
}

// The maximum of a row and of each of its blocks.
class RowScan {
 public:
  // Reads `size` logits at `x`, which must outlive the scan. False: there is a NaN or a positive infinity.
  // `panel_maxima`: what `maximum` says of each whole panel of them, where that is known; they need not be read then.
  bool read(const float* x, int32_t size, const float* panel_maxima = nullptr);

  const float* data() const { return x_; }
  int32_t size() const { return size_; }
  float top() const { return top_; }
  int32_t argmax() const;  // ties go to the lowest id

  // A value that at least `count` logits reach, and not many more; the lowest finite value where that is not known.
  float threshold(int32_t count);

  // The ids whose logits are at least `threshold` (finite), by id; their weights are left 0.
  void collect(float threshold, std::vector<Candidate>& out) const;

  // The place of `id` in order, from 1.
  int32_t rank(int32_t id) const;

  float block_max(int32_t block) const { return block_max_[block]; }
  int32_t num_blocks() const { return static_cast<int32_t>(block_max_.size()); }

 private:
  const float* x_ = nullptr;
  int32_t size_ = 0;
  float top_ = -kInfinity;
  std::vector<float> block_max_, sorted_;
};

// The weights exp((x - max) / temperature) of a row, and the draw from them. The largest weight is 1. A weight below
// `min_p` (or 1e-37, where the exponential ends) or beyond the cutoff is 0.
class Softmax {
 public:
  Softmax(const RowScan& row, float temperature, float min_p);

  void set_cutoff(Cutoff cutoff) { cutoff_ = cutoff; }

  // w[j] = weight of id begin + j for j < count; then zeros up to kBlock.
  void weights(int32_t begin, int32_t count, float* w) const;

  void weigh(std::vector<Candidate>& candidates) const;

  // Sum over all ids, in double; keeps the sums of the blocks for draw().
  double sum(std::vector<double>& block_sums) const;

  // The end of the shortest prefix, in order, whose weights sum to at least `mass`: the same as prefix_of_mass() of all
  // ids, by way of a histogram. Overwrites `candidates`.
  Cutoff cutoff_of_mass(double mass, std::vector<Candidate>& candidates) const;

  // The first id at which the running sum of weights, by id, exceeds u * total.
  int32_t draw(double u, double total, const std::vector<double>& block_sums) const;

 private:
  // Ids of equal weight share a bucket, of larger weight one before; an octave of weights is 5.5 buckets.
  static constexpr int32_t kNumBuckets = 704;
  int32_t bucket(float x) const {
    const float place = (max_ - x) * inverse_temperature_ * 8;
    return place < kNumBuckets ? static_cast<int32_t>(place) : kNumBuckets - 1;
  }

  const RowScan& row_;
  float max_, inverse_temperature_, floor_;
  Cutoff cutoff_;
};

// The shortest prefix, in order, of the candidates whose weights sum to at least `mass` (all of them, if they do not):
// its last element. Reorders the candidates; linear time.
Cutoff prefix_of_mass(std::vector<Candidate>& candidates, double mass);

}  // namespace octavo
