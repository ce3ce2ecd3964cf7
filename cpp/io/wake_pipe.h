#ifndef GEMMAKV_IO_WAKE_PIPE_H_
#define GEMMAKV_IO_WAKE_PIPE_H_

namespace gkv {

// A pipe that wakes an event loop, which waits until it can read from the pipe.
// The pipe holds one byte between Fill() and Drain(), which are called in turn.
class WakePipe {
 public:
  // Throws IoError if the process has no file descriptors left.
  WakePipe();
  ~WakePipe();
  WakePipe(const WakePipe&) = delete;

  // The end to read from.
  int descriptor() const { return ends_[0]; }
  // Write and read the byte. Neither waits.
  void Fill() noexcept;
  void Drain() noexcept;

 private:
  int ends_[2];
};

}  // namespace gkv

#endif  // GEMMAKV_IO_WAKE_PIPE_H_
