// What this machine can do at best, measured with the same vectors that the kernels use: the yardstick of a profile.
#pragma once

#include <cstddef>

#include "octavo/thread_pool.h"
#include "octavo/types.h"

namespace octavo {

double measure_bandwidth(ThreadPool& pool, size_t bytes);  // bytes read per second, over `bytes` of memory
double measure_flops(ThreadPool& pool, DType dtype);       // operations per second of the multiply tile, all in cache
// How much all threads together get done at once, in a unit of its own; takes some four milliseconds. The best of
// several tries: others on the machine only take away.
double measure_work(ThreadPool& pool);

}  // namespace octavo
