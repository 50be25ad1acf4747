// A checksum of much memory at the speed of reading it. It finds damage, not forgery.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// Of `bytes` bytes (a multiple of 4). Any change within four of them (at an offset that is a multiple of 4) changes it;
// another change goes unseen with a probability of 2^-32 at most. The same on all instruction sets.
uint64_t checksum(const uint8_t* data, size_t bytes);

}  // namespace octavo
