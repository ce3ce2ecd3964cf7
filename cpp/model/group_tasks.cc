#include "model/group_tasks.h"

#include <algorithm>

#include "base/rounding.h"

namespace gkv {
namespace {

// With this many rows the products take longer than reading the weights.
constexpr size_t kManyRows = 64;
// With fewer, weights are handed out in a few portions per thread, so that a
// thread that is held up by the system does not hold up the others.
constexpr size_t kMinGroupsOfFewRows = 16;
constexpr size_t kMaxPortionsPerThread = 16;
// Kernels take groups in pairs.
constexpr size_t kPair = 2;

}  // namespace

GroupTasks::GroupTasks(size_t groups, size_t rows, size_t threads, size_t most)
    : groups_(groups), threads_(threads), most_(most), fixed_(0) {
  if (rows < kManyRows) {
    const size_t portions = std::clamp<size_t>(
        groups / (threads * kMinGroupsOfFewRows), 1, kMaxPortionsPerThread);
    fixed_ =
        std::min(most_, RoundUp(CeilDiv(groups, threads * portions), kPair));
  }
  for (size_t left = groups; left != 0;) {
    const size_t size = Size(left);
    const size_t round = std::min(threads_, CeilDiv(left, size));
    count_ += round;
    left -= std::min(left, round * size);
  }
}

size_t GroupTasks::Size(size_t left) const {
  if (fixed_ != 0) return fixed_;
  const size_t half = RoundUp(CeilDiv(left, 2 * threads_), kPair);
  return std::min(most_, half);
}

GroupTasks::Range GroupTasks::RangeOf(size_t task) const {
  size_t begin = 0;
  size_t size = Size(groups_);
  for (; task >= threads_; task -= threads_) {
    begin += threads_ * size;
    size = Size(groups_ - begin);
  }
  begin += task * size;
  return {begin, std::min(groups_, begin + size)};
}

}  // namespace gkv
