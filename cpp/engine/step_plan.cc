#include "engine/step_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "base/rounding.h"

namespace gkv {
namespace {

// The rows that the longest waiting prompts get before the others: few enough
// for several prompts in a step, many enough to be worth a step.
constexpr size_t kFirstRows = 8;

void CheckLeast(size_t value, size_t least, const char* name) {
  if (value < least) {
    throw InvalidArgument(Unexpected(name, StrCat("at least ", least), value));
  }
}

// Returns limits that can be added to positions and to each other.
SchedulerOptions Limited(SchedulerOptions options) {
  constexpr size_t kMost = std::numeric_limits<size_t>::max() / 8;
  options.step_rows = std::min(options.step_rows, kMost);
  options.prefill_rows_while_decoding =
      std::min(options.prefill_rows_while_decoding, kMost);
  options.logits_rows = std::min(options.logits_rows, kMost);
  return options;
}

// Returns the rows that decoding leaves to prompts.
size_t Quarter(size_t rows) { return std::max<size_t>(1, rows / 4); }

// Rows that are left in a step.
struct Budget {
  size_t rows;
  size_t logits;
};

class StepPlanner {
 public:
  StepPlanner(std::span<const PlanInput> requests,
              const SchedulerOptions& options)
      : requests_(requests),
        options_(Limited(options)),
        end_(requests.size()),
        left_{options_.step_rows, options_.logits_rows} {
    std::vector<size_t> order(requests.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return requests[a].served < requests[b].served;
    });
    for (const size_t i : order) {
      end_[i] = requests[i].next;
      if (requests[i].next >= requests[i].target) continue;
      (requests[i].decoding ? decoding_ : prefilling_).push_back(i);
    }
  }

  std::vector<PlannedSlice> Plan() {
    Decode();
    Prefill();
    std::vector<PlannedSlice> plan;
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (end_[i] > requests_[i].next) {
        plan.push_back({i, requests_[i].next, end_[i]});
      }
    }
    return plan;
  }

 private:
  void Decode() {
    const Budget kept = KeptForPrefill();
    bool first = true;
    for (const size_t i : decoding_) {
      const size_t rows = requests_[i].target - requests_[i].next;
      if (!first && (rows + kept.rows > left_.rows ||
                     rows + kept.logits > left_.logits)) {
        continue;
      }
      Take(i, requests_[i].target);
      first = false;
    }
  }

  Budget KeptForPrefill() const {
    Budget kept{0, 0};
    if (prefilling_.empty()) return kept;
    const size_t limit = options_.prefill_rows_while_decoding;
    for (const size_t i : prefilling_) {
      const PlanInput& s = requests_[i];
      kept.logits += LogitsRows(s.logits_begin, s.next,
                                std::min(s.target, s.next + limit));
    }
    kept.rows = std::min(limit, Quarter(options_.step_rows));
    kept.logits = std::min(kept.logits, Quarter(options_.logits_rows));
    return kept;
  }

  void Prefill() {
    if (left_.rows < options_.step_rows) {
      left_.rows = std::min(left_.rows, options_.prefill_rows_while_decoding);
    }
    size_t first_rows = (left_.rows + 1) / 2;
    for (const size_t i : prefilling_) {
      if (first_rows == 0) break;
      const size_t before = end_[i];
      Extend(i, std::min(first_rows, kFirstRows), i == prefilling_.front());
      first_rows -= std::min(first_rows, end_[i] - before);
    }
    // Shortest first: what a short prompt leaves of its share goes to the rest.
    // Rows from above count.
    std::stable_sort(prefilling_.begin(), prefilling_.end(),
                     [&](size_t a, size_t b) {
                       return requests_[a].target - end_[a] <
                              requests_[b].target - end_[b];
                     });
    size_t shared = left_.rows;
    for (const size_t i : prefilling_) shared += end_[i] - requests_[i].next;
    for (size_t k = 0; k < prefilling_.size(); ++k) {
      const size_t i = prefilling_[k];
      const size_t waiting = prefilling_.size() - k;
      const size_t share = CeilDiv(shared, waiting);
      const size_t got = end_[i] - requests_[i].next;
      if (share > got) Extend(i, share - got, false);
      shared -= std::min(shared, end_[i] - requests_[i].next);
    }
  }

  // Gives a prompt up to `rows` more rows, as far as the budget goes. A span
  // that must not be cut is taken whole if it fits what is left, or if `must`.
  void Extend(size_t i, size_t rows, bool must) {
    const PlanInput& s = requests_[i];
    const size_t begin = end_[i];
    size_t end = std::min({s.target, begin + std::min(rows, left_.rows),
                           std::max(begin, s.logits_begin) + left_.logits});
    for (const auto& [from, to] : s.uncut) {
      if (from >= end || to <= end) continue;
      const bool fits = to - begin <= left_.rows &&
                        LogitsRows(s.logits_begin, begin, to) <= left_.logits;
      end = from > begin ? from : (must || fits) ? to : begin;
      break;
    }
    if (end > begin) Take(i, end);
  }

  void Take(size_t i, size_t end) {
    const size_t logits =
        LogitsRows(requests_[i].logits_begin, end_[i], end);
    left_.rows -= std::min(left_.rows, end - end_[i]);
    left_.logits -= std::min(left_.logits, logits);
    end_[i] = end;
  }

  const std::span<const PlanInput> requests_;
  const SchedulerOptions options_;
  std::vector<size_t> decoding_, prefilling_;  // by index, longest wait first
  std::vector<size_t> end_;                    // of what each has got
  Budget left_;
};

}  // namespace

size_t MaxGuesses(const SchedulerOptions& options) {
  return std::min(options.max_guesses,
                  options.step_rows - Quarter(options.step_rows) - 1);
}

void SchedulerOptions::Validate() const {
  CheckLeast(step_rows, 2, "step_rows");
  CheckLeast(prefill_rows_while_decoding, 1, "prefill_rows_while_decoding");
  CheckLeast(logits_rows, 2, "logits_rows");
  CheckLeast(max_running, 1, "max_running");
  const size_t guesses = logits_rows - Quarter(logits_rows) - 1;
  if (max_guesses > guesses) {
    throw InvalidArgument(Unexpected(
        "max_guesses",
        StrCat("at most ", guesses, " with ", logits_rows, " logits_rows"),
        max_guesses));
  }
}

std::vector<PlannedSlice> PlanStep(std::span<const PlanInput> requests,
                                   const SchedulerOptions& options) {
  return StepPlanner(requests, options).Plan();
}

}  // namespace gkv
