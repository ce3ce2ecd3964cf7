#include "bindings/waker.h"

#include <algorithm>
#include <utility>

namespace gkv {

// A byte is in the pipe exactly while there is news.
std::vector<uint64_t> Waker::Take() {
  const MutexLock lock(mutex_);
  std::vector<uint64_t> news(news_);
  if (news.empty()) return news;
  pipe_.Drain();
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
  if (news_.size() == 1) pipe_.Fill();
}

Bell::Bell(const std::shared_ptr<Waker>& waker) {
  const std::shared_ptr<Waker::Line> line = waker->AddLine();
  key_ = line->key;
  ring_ = std::make_shared<const std::function<void()>>(
      [waker, line] { waker->Ring(*line); });
}

}  // namespace gkv
