#include "octavo/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <new>
#include <system_error>

#include "octavo/types.h"

namespace octavo {
namespace {

constexpr size_t kPage = size_t{4} << 10, kHugePage = size_t{2} << 20;
// Of an arena. Pages of a chunk that no piece has touched are not there.
constexpr size_t kChunk = size_t{64} << 20;

size_t round_up_to(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Address space of `bytes` (whole pages) at a 2 MB boundary. Throws std::bad_alloc.
char* reserve_aligned(size_t bytes, int protection) {
  const size_t mapped = bytes + kHugePage;
  void* start = mmap(nullptr, mapped, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) throw std::bad_alloc();
  // Give back what stands before the first 2 MB boundary, and what is too much behind.
  char* const begin = static_cast<char*>(start);
  const size_t address = reinterpret_cast<uintptr_t>(start), before = round_up_to(address, kHugePage) - address;
  if (before > 0) munmap(begin, before);
  if (before < kHugePage) munmap(begin + before + bytes, kHugePage - before);
  return begin + before;
}

}  // namespace

Memory::Memory(size_t bytes) {
  if (bytes == 0) return;
  bytes_ = round_up_to(bytes, kPage);
  if (bytes_ < kHugePage) {
    void* start = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) throw std::bad_alloc();
    data_ = start;
    return;
  }
  data_ = reserve_aligned(bytes_, PROT_READ | PROT_WRITE);
  (void)madvise(data_, bytes_, MADV_HUGEPAGE);  // only a hint: without it all is right, and slower
}

Memory Memory::map(int file, size_t bytes) {
  Memory memory;
  memory.bytes_ = round_up_to(bytes, kPage);
  memory.data_ = reserve_aligned(memory.bytes_, PROT_NONE);
  if (mmap(memory.data_, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
    throw std::system_error(errno, std::generic_category(), "mmap");
  // Hints again. The second gets all pages at once instead of one fault for a few of them (Linux 5.14). The third keeps
  // an idle engine's weights where they are while others read large files; few users may ask for it.
  (void)madvise(memory.data_, bytes, MADV_HUGEPAGE);
#ifdef MADV_POPULATE_READ
  (void)madvise(memory.data_, bytes, MADV_POPULATE_READ);
#endif
  (void)mlock(memory.data_, bytes);
  return memory;
}

Arena::Piece Arena::allocate(size_t bytes) {
  const size_t size = round_up_to(bytes, 64);
  if (!chunk_ || used_ + size > chunk_->bytes()) {
    chunk_ = std::make_shared<const Memory>(std::max(size, kChunk));
    used_ = 0;
  }
  Piece piece{chunk_, chunk_->as<char>() + used_, bytes};
  used_ += size;
  return piece;
}

Memory::~Memory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace octavo
