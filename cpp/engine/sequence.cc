#include "engine/sequence.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/rounding.h"

namespace gkv {
namespace {

size_t MaskWords(size_t vocab_size) { return CeilDiv(vocab_size, 32); }

bool Has(std::span<const uint32_t> mask, int32_t id) {
  return (mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
}

}  // namespace

Sequence::Sequence(Parts parts) : parts_(std::move(parts)) {
  if (parts_.batch) ++parts_.batch->undecided;
  target_ = cache().length();
  logits_begin_ = target_ - (parts_.consumer ? parts_.output_rows : 0);
  next_ = cache().next_position_for_logits();
  // After a truncation past the window, positions before the end of what is
  // held are replayed: those were not served from the cache.
  stream().set_cached_tokens(next_);
}

void Sequence::Start() { state_ = State::kPrefilling; }

void Sequence::Preempt() {
  if (computed_) stream().transaction().GiveBlocksBack();
  computed_ = false;
  if (state_ == State::kSettled) return;
  next_ = cache().next_position_for_logits();
  guesses_.clear();
  preempted_ = true;
  state_ = State::kPreempted;
}

PlanInput Sequence::ToPlan(size_t max_guesses) {
  const bool decoding = state_ == State::kDecoding;
  if (decoding && parts_.drafter && drafted_from_ < target_) {
    std::vector<int32_t> added(target_ - drafted_from_);
    cache().CopyTokens(drafted_from_, added);
    // The last token of the conversation is sampled from the row before it.
    const size_t room = cache().capacity_tokens() - target_ - 1;
    guesses_.resize(std::min(max_guesses, room));
    guesses_.resize(
        std::min(guesses_.size(), parts_.drafter->Propose(added, guesses_)));
    drafted_from_ = target_;
  }
  return {next_, target_ + guesses_.size(), logits_begin_, decoding, served_};
}

StepSlice Sequence::Prepare(const PlannedSlice& plan, size_t vocab_size,
                            size_t hidden_size) {
  StepSlice slice;
  slice.sequence = this;
  slice.ids.resize(std::min(plan.end, target_) - plan.begin);
  cache().CopyTokens(plan.begin, slice.ids);
  std::vector<size_t> keep;  // where a commit may end
  for (size_t i = 0; target_ + i < plan.end; ++i) {
    const int32_t id = guesses_[i];
    if (id < 0 || static_cast<size_t>(id) >= vocab_size) {
      throw InvalidArgument(StrCat("the drafter proposes token ", id,
                                   ", expected an id in 0..", vocab_size - 1));
    }
    slice.ids.push_back(id);
    keep.push_back(target_ + i);
  }
  if (parts_.consumer) {
    slice.output = parts_.consumer->output();
    slice.output.rows = LogitsRows(logits_begin_, plan.begin, plan.end);
    slice.row_size = slice.output.kind == RowOutput::kHidden ? hidden_size
                                                             : vocab_size;
  }
  if (parts_.constraint) {
    slice.masks.resize(slice.output.rows * MaskWords(vocab_size));
    slice.may_end.resize(slice.output.rows);
  }
  slice.view = stream().transaction().Prepare(plan.begin, plan.end, keep);
  return slice;
}

void Sequence::ComputeMasks(StepSlice& slice) noexcept {
  const size_t rows = slice.output.rows;
  const size_t words = MaskWords(slice.row_size);
  Constraint& constraint = *parts_.constraint;
  try {
    size_t guessed = 0;
    for (size_t row = 0; row < rows; ++row) {
      const std::span mask(slice.masks.data() + row * words, words);
      slice.may_end[row] = constraint.ComputeMask(mask);
      const auto allowed = [](uint32_t word) { return word != 0; };
      if (slice.may_end[row] &&
          std::any_of(mask.begin(), mask.end(), allowed)) {
        for (const int32_t id : parts_.stop_ids) {
          mask[static_cast<size_t>(id) / 32] |= uint32_t{1} << (id % 32);
        }
      }
      if (row + 1 == rows) break;
      const int32_t guess = slice.ids[slice.ids.size() - rows + row + 1];
      const auto& stops = parts_.stop_ids;
      if (!Has(mask, guess) ||
          std::find(stops.begin(), stops.end(), guess) != stops.end()) {
        break;  // the rows behind it will not count
      }
      constraint.Accept(guess);
      ++guessed;
    }
    if (guessed > 0) constraint.Rollback(guessed);
  } catch (...) {
    slice.mask_error = std::current_exception();
  }
}

// Takes one row; true if the next one follows from it.
bool Sequence::TakeRow(const StepSlice& slice, size_t row, ThreadPool* pool) {
  const size_t rows = slice.output.rows;
  KVCache& cache = this->cache();
  OutputRow output{{slice.output.data + row * slice.row_size, slice.row_size},
                   slice.view.end - rows + row + 1};
  output.last_token = output.position + 1 >= cache.capacity_tokens();
  output.pool = pool;
  if (parts_.constraint) {
    if (slice.mask_error) std::rethrow_exception(slice.mask_error);
    const size_t words = MaskWords(slice.row_size);
    output.allowed = {slice.masks.data() + row * words, words};
    const auto nothing = [](uint32_t word) { return word == 0; };
    if (slice.may_end[row] && std::all_of(output.allowed.begin(),
                                          output.allowed.end(), nothing)) {
      reason_ = FinishReason::kStop;
      return false;
    }
  }
  TokenEvent event = parts_.consumer->Take(output);
  reason_ = event.finish_reason;
  const bool finished = reason_ != FinishReason::kNone;
  const int32_t token = event.token_id;
  if (token < 0) return !finished;
  stream().MarkDecoding();
  if (parts_.constraint && !finished) parts_.constraint->Accept(token);
  cache.Append(stream().transaction().lock(), {&token, 1});
  sampled_ = true;
  stream().Push(std::move(event));
  return !finished && row + 1 < rows &&
         slice.ids[slice.ids.size() - rows + row + 1] == token;
}

void Sequence::TakeRows(StepSlice& slice, ThreadPool* pool) noexcept {
  try {
    computed_ = true;
    size_t row = 0;
    size_t taken = 0;
    while (row < slice.output.rows) {
      ++taken;
      if (!TakeRow(slice, row++, pool)) break;
    }
    next_ = slice.view.end - (slice.output.rows - taken);
    cache().Commit(stream().transaction().lock(), slice.view, next_);
    if (state_ == State::kPrefilling) stream().MarkComputed(next_);
    guesses_.clear();
    if (next_ < target_) {
      logits_begin_ = std::max(logits_begin_, next_);
    } else if (!sampled_) {
      if (reason_ == FinishReason::kNone) reason_ = FinishReason::kLength;
    } else {
      target_ = cache().length();
      logits_begin_ = target_ - 1;
      preempted_ = false;
      state_ = State::kDecoding;
    }
  } catch (...) {
    error_ = std::current_exception();
    slice.view = {};  // its blocks are free when the failure is told
  }
}

void Sequence::Conclude() noexcept {
  if (error_) return Fail(std::exchange(error_, nullptr));
  if (reason_ != FinishReason::kNone) return Settle(reason_);
  if (sampled_ && stream().streamed()) stream().Tell();
}

void Sequence::Settle(FinishReason reason) noexcept {
  if (state_ == State::kSettled || state_ == State::kEnded) return;
  reason_ = reason;
  state_ = State::kSettled;
  if (parts_.batch) {
    --parts_.batch->undecided;
  } else {
    stream().End(reason, nullptr);
    state_ = State::kEnded;
  }
}

void Sequence::Fail(std::exception_ptr error) noexcept {
  if (state_ == State::kEnded) return;
  if (parts_.batch && !std::exchange(parts_.batch->failed, true)) {
    parts_.batch->error = error;
  }
  stream().End(FinishReason::kNone, std::move(error));
  state_ = State::kEnded;
}

void Sequence::EndWithBatch() noexcept {
  if (!parts_.batch || state_ == State::kEnded) return;
  if (parts_.batch->failed) {
    stream().End(FinishReason::kNone, parts_.batch->error, true);
  } else if (parts_.batch->undecided == 0) {
    stream().End(reason_, nullptr, true);
  } else {
    return;
  }
  state_ = State::kEnded;
}

}  // namespace gkv
