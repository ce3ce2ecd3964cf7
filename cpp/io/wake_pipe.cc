#include "io/wake_pipe.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.h"
#include "io/file.h"

namespace gkv {

WakePipe::WakePipe() {
  if (pipe(ends_) != 0) throw IoError("a pipe", errno);
  for (const int end : ends_) {
    fcntl(end, F_SETFD, FD_CLOEXEC);
    fcntl(end, F_SETFL, O_NONBLOCK);
  }
}

WakePipe::~WakePipe() {
  for (const int end : ends_) close(end);
}

void WakePipe::Fill() noexcept {
  (void)Uninterrupted([&] { return write(ends_[1], "", 1); });
}

void WakePipe::Drain() noexcept {
  char byte;
  (void)Uninterrupted([&] { return read(ends_[0], &byte, 1); });
}

}  // namespace gkv
