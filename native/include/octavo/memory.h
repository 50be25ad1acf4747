// Large zeroed memory straight from the kernel: touched pages only count, and all of it goes back when freed.
#pragma once

#include <cstddef>
#include <utility>

namespace octavo {

class Memory {
 public:
  Memory() = default;
  explicit Memory(
      size_t bytes);  // zeroed, 4 KB aligned, in 2 MB pages where the kernel has them; throws std::bad_alloc
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

// Scratch of the calling thread, at least `bytes`, 64-byte aligned; contents are lost at the next call with the same
// `Tag`. It only ever grows, so that a steady step allocates nothing.
template <class Tag, class T>
T* scratch(size_t count) {
  thread_local Memory memory;
  if (memory.bytes() < count * sizeof(T)) memory = Memory(count * sizeof(T));
  return memory.template as<T>();
}

}  // namespace octavo
