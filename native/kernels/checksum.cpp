// Plain loops: 64 sums side by side, which the compiler keeps in vectors.
#include "octavo/checksum.h"

#include <algorithm>
#include <cstring>

namespace octavo {
namespace {

constexpr size_t kLanes = 64;

}  // namespace

uint64_t checksum(const uint8_t* data, size_t bytes) {
  // A step takes a word to a sum, and for each word it is one-to-one in the sum: what has differed differs until
  // another difference happens to cancel it. The shift brings high bits down, which a product alone leaves where they
  // are.
  uint32_t sums[kLanes];
  for (size_t i = 0; i < kLanes; ++i) sums[i] = static_cast<uint32_t>(i) * 0x9e3779b9u;
  for (size_t at = 0; at < bytes; at += sizeof sums) {
    uint32_t words[kLanes] = {};
    std::memcpy(words, data + at, std::min(sizeof words, bytes - at));
    for (size_t i = 0; i < kLanes; ++i) {
      const uint32_t mixed = (sums[i] ^ words[i]) * 0x85ebca6bu;
      sums[i] = mixed ^ mixed >> 15;
    }
  }
  uint64_t all = bytes;
  for (const uint32_t sum : sums) {
    all = (all ^ sum) * 0x9e3779b97f4a7c15u;
    all ^= all >> 32;
  }
  return all;
}

}  // namespace octavo
