// Large memory straight from the kernel, zeroed: touched pages only count, and all of it goes back when freed.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

namespace octavo {

class Memory {
 public:
  Memory() = default;
  // Zeroed; from 2 MB on aligned to 2 MB, in pages of that size where the kernel has them. Throws std::bad_alloc.
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(Memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Carves memory for many long-lived objects out of large chunks, so that small ones lie in 2 MB pages too: a stream
// over 4 KB pages runs at half the speed. A chunk goes back when the last of its pieces does.
class Arena {
 public:
  struct Piece {
    std::shared_ptr<const Memory> chunk;
    void* data = nullptr;
    size_t bytes = 0;
  };
  Piece allocate(size_t bytes);  // zeroed, 64-byte aligned
  // Gives back the end of the piece that was allocated last, where nothing was written. One thread at a time packs.
  void shrink(Piece& piece, size_t bytes);

 private:
  std::shared_ptr<const Memory> chunk_;
  size_t used_ = 0;
};

// Scratch of the calling thread, at least `bytes`, 64-byte aligned; contents are lost at the next call with the same
// `Tag`. It only ever grows, so that a steady step allocates nothing.
template <class Tag, class T>
T* scratch(size_t count) {
  thread_local Memory memory;
  if (memory.bytes() < count * sizeof(T)) memory = Memory(count * sizeof(T));
  return memory.template as<T>();
}

}  // namespace octavo
