#include "octavo/fresh_pages.h"

#include <sys/mman.h>

#include <algorithm>

#include "octavo/types.h"

namespace octavo {

void FreshPages::make(ThreadPool& pool, const char* end) {
#ifdef MADV_POPULATE_WRITE
  constexpr int64_t kHugePage = int64_t{2} << 20;
  if (end <= made_) return;
  const int64_t round = kHugePage * pool.size();  // each worker one page
  const int64_t bytes = std::min(round_up(end - made_, round), static_cast<int64_t>(end_ - made_));
  pool.run([&](int index) {
    for (int64_t begin = index * kHugePage; begin < bytes; begin += round)
      // Only sooner: where the kernel cannot do it, or has no memory left, the pages are made when they are touched.
      (void)madvise(made_ + begin, static_cast<size_t>(std::min(kHugePage, bytes - begin)), MADV_POPULATE_WRITE);
  });
  made_ += bytes;
#endif
}

}  // namespace octavo
