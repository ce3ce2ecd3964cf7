#ifndef GEMMAKV_IO_WAKE_PIPE_H_
#define GEMMAKV_IO_WAKE_PIPE_H_

namespace gkv {

// A pipe that wakes whoever waits until it can be read from, as event loops do.
// It holds one byte between Fill() and Drain(), which are called in turn.
class WakePipe {
 public:
  // Throws IoError if the process has no file descriptors left.
  WakePipe();
  ~WakePipe();
  WakePipe(const WakePipe&) = delete;

  // The end to be read from.
  int descriptor() const { return ends_[0]; }
  // Neither waits.
  void Fill() noexcept;
  void Drain() noexcept;

 private:
  int ends_[2];
};

}  // namespace gkv

#endif  // GEMMAKV_IO_WAKE_PIPE_H_
