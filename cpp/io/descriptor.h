#ifndef GEMMAKV_IO_DESCRIPTOR_H_
#define GEMMAKV_IO_DESCRIPTOR_H_

#include <unistd.h>

#include <utility>

namespace gkv {

// An open file of the system, closed on destruction. Move-only.
class Descriptor {
 public:
  // Takes over `fd`; a negative one is none.
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;

  bool is_open() const { return fd_ >= 0; }
  int get() const { return fd_; }

 private:
  int fd_;
};

}  // namespace gkv

#endif  // GEMMAKV_IO_DESCRIPTOR_H_
