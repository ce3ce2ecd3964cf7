#include "bindings/waker.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/error.h"

namespace gkv {

Waker::Waker() {
  if (pipe(fds_) != 0) throw IoError("a pipe", errno);
  for (const int fd : fds_) {
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, O_NONBLOCK);
  }
}

Waker::~Waker() {
  for (const int fd : fds_) close(fd);
}

// One byte is in the pipe exactly while there is news.
std::vector<uint64_t> Waker::Take() {
  const MutexLock lock(mutex_);
  std::vector<uint64_t> news(news_);
  if (news.empty()) return news;
  char byte;
  while (read(fds_[0], &byte, 1) < 0 && errno == EINTR) {
  }
  for (const auto& weak : lines_) {
    if (const auto line = weak.lock()) line->rang = false;
  }
  news_.clear();
  return news;
}

std::shared_ptr<Waker::Line> Waker::AddLine() {
  const MutexLock lock(mutex_);
  std::erase_if(lines_, [](const auto& line) { return line.expired(); });
  auto line = std::make_shared<Line>(Line{next_key_++});
  lines_.push_back(line);
  news_.reserve(news_.size() + lines_.size());
  return line;
}

void Waker::Ring(Line& line) noexcept {
  const MutexLock lock(mutex_);
  if (std::exchange(line.rang, true)) return;
  news_.push_back(line.key);
  if (news_.size() > 1) return;
  while (write(fds_[1], "", 1) < 0 && errno == EINTR) {
  }
}

Bell::Bell(const std::shared_ptr<Waker>& waker) {
  const std::shared_ptr<Waker::Line> line = waker->AddLine();
  key_ = line->key;
  ring_ = std::make_shared<const std::function<void()>>(
      [waker, line] { waker->Ring(*line); });
}

std::chrono::steady_clock::time_point Bell::Look() {
  if (looks_ == kFirstLooks) return since_;
  ++looks_;
  return std::chrono::steady_clock::now();
}

}  // namespace gkv
