#ifndef GEMMAKV_MODEL_GROUP_TASKS_H_
#define GEMMAKV_MODEL_GROUP_TASKS_H_

#include <cstddef>

namespace gkv {

// A loop over weight groups, cut into tasks for a pool that hands them out in
// ascending order. Tasks cover all groups, each once, and none is empty.
//
// Products of few rows wait for memory: all tasks have the same length, and are
// long enough for the kernels to read ahead. Products of many rows compute: a
// task takes as long as half a millisecond, and threads wait for the one that
// has the last task. So each round of tasks, one for each thread, takes half of
// what is left (Hummel, Schonberg, Flynn: Factoring, 1992), and the last tasks
// are short.
class GroupTasks {
 public:
  struct Range {
    size_t begin, end;
  };

  // No task has more than `most` groups, which is even.
  GroupTasks(size_t groups, size_t rows, size_t threads, size_t most);
  GroupTasks(size_t groups, size_t rows, size_t threads)
      : GroupTasks(groups, rows, threads, kNoLimit) {}

  size_t count() const { return count_; }
  // Returns the number of groups of the first task, which is the longest.
  size_t longest() const { return Size(groups_); }
  // Requires: task < count().
  Range RangeOf(size_t task) const;

 private:
  static constexpr size_t kNoLimit = ~size_t{1};

  // Returns the size of a task when `left` groups are not handed out yet.
  size_t Size(size_t left) const;

  size_t groups_, threads_, most_;
  size_t fixed_;  // groups of every task; 0: tasks become shorter
  size_t count_ = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_GROUP_TASKS_H_
