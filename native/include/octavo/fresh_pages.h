// Memory that is used from its beginning on, ever more of it. The kernel makes a page when it is first touched: that
// takes a tenth of a millisecond, or, where a hypervisor has yet to find the memory, several, in which all workers
// would wait for the one that touched it. So they make pages before they need them, each some of its own.
#pragma once

#include "octavo/memory.h"
#include "octavo/thread_pool.h"

namespace octavo {

class FreshPages {
 public:
  FreshPages() = default;
  explicit FreshPages(const Memory& memory) : made_(memory.as<char>()), end_(made_ + memory.bytes()) {}

  // Makes the pages before `end`, a pointer into the memory, and at most one more for each worker. What stands in them
  // stays.
  void make(ThreadPool& pool, const char* end);

 private:
  char *made_ = nullptr, *end_ = nullptr;  // all pages before made_ are made
};

}  // namespace octavo
