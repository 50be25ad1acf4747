#include "octavo/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>

#include "octavo/types.h"

namespace octavo {
namespace {

constexpr size_t kPage = size_t{4} << 10, kHugePage = size_t{2} << 20;
// Of an arena. Pages of a chunk that no piece has touched are not there.
constexpr size_t kChunk = size_t{64} << 20;

size_t round_up_to(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Address space of `bytes` (whole pages) at a 2 MB boundary. Throws std::bad_alloc.
char* reserve_aligned(size_t bytes) {
  const size_t mapped = bytes + kHugePage;
  void* start = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
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
  data_ = reserve_aligned(bytes_);
  (void)madvise(data_, bytes_, MADV_HUGEPAGE);  // only a hint: without it all is right, and slower
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

void Arena::shrink(Piece& piece, size_t bytes) {
  used_ -= round_up_to(piece.bytes, 64) - round_up_to(bytes, 64);
  piece.bytes = bytes;
}

Memory::~Memory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace octavo
