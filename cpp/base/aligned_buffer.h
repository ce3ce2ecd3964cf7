#ifndef GEMMAKV_BASE_ALIGNED_BUFFER_H_
#define GEMMAKV_BASE_ALIGNED_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <type_traits>
#include <utility>

#include "base/rounding.h"

namespace gkv {

// The alignment of every buffer that SIMD code reads: that of a cache line and
// of a 512-bit vector.
inline constexpr size_t kAlignment = 64;

// Uninitialized storage for `size` trivially copyable values, aligned to
// kAlignment and padded to a multiple of it. Move-only.
template <typename T>
class AlignedBuffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  AlignedBuffer() = default;
  // Throws std::bad_alloc when memory (or the size computation) runs out.
  explicit AlignedBuffer(size_t size) : size_(size) {
    if (size == 0) return;
    if (size > (SIZE_MAX - kAlignment) / sizeof(T)) throw std::bad_alloc();
    data_ = static_cast<T*>(std::aligned_alloc(
        kAlignment, RoundUp(size * sizeof(T), kAlignment)));
    if (data_ == nullptr) throw std::bad_alloc();
  }
  AlignedBuffer(AlignedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~AlignedBuffer() { std::free(data_); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }

  // Grows to at least `size` values; the content is lost when it grows.
  void EnsureSize(size_t size) {
    if (size > size_) *this = AlignedBuffer(size);
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_BASE_ALIGNED_BUFFER_H_
