#include "engine/sequence.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/rounding.h"
#include "engine/drafter.h"

namespace gkv {
namespace {

size_t MaskWords(size_t vocab_size) { return CeilDiv(vocab_size, 32); }

bool Has(std::span<const uint32_t> mask, int32_t id) {
  return (mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
}

}  // namespace

Sequence::Sequence(Parts parts)
    : parts_(std::move(parts)),
      next_(cache().next_position_for_logits()),
      target_(cache().length()),
      logits_begin_(target_ - (parts_.consumer ? parts_.output_rows : 0)),
      prefix_(std::move(parts_.prefix), stream(), LookUpLimit()) {
  if (parts_.batch) {
    ++parts_.batch->undecided;
    ++parts_.batch->unstarted;
  }
  // After a truncation past the window, positions before the end of what is
  // held are replayed: those were not served from the cache.
  stream().set_cached_tokens(next_);
  candidate_.sources = std::move(parts_.guessed_by);
  candidate_.cache = &cache();
  candidate_.lock = &stream().transaction().lock();
  candidate_.consumer = parts_.consumer.get();
  candidate_.constraint = parts_.constraint.get();
  candidate_.sampled_from = stream().prompt_end();
}

// At most so many tokens may come from the prefix cache.
size_t Sequence::LookUpLimit() const {
  return std::min(logits_begin_, target_ - 1);
}

void Sequence::Start() {
  if (state_ == State::kWaiting && parts_.batch) --parts_.batch->unstarted;
  state_ = State::kPrefilling;
  if (!prefix_.Resume(LookUpLimit())) return;
  computed_ = true;  // there is something to give back
  next_ = cache().next_position_for_logits();
}

bool Sequence::LeavePrefix() { return computed_ && prefix_.Leave(); }

void Sequence::Preempt() {
  prefix_.End(computed_);
  if (computed_) stream().transaction().GiveBlocksBack();
  computed_ = false;
  if (state_ == State::kSettled) return;
  next_ = cache().next_position_for_logits();
  candidate_.Forget();
  preempted_ = true;
  state_ = State::kPreempted;
}

// The last token of all is sampled from the row before it.
size_t Sequence::GuessLimit(size_t max_guesses) const {
  return std::min({max_guesses, parts_.consumer->tokens_left() - 1,
                   cache().capacity_tokens() - target_ - 1});
}

Candidate& Sequence::ToGuess(size_t max_guesses) {
  candidate_.decodes = state_ == State::kDecoding;
  candidate_.read = next_;
  candidate_.is_new = candidate_.decodes && asked_at_ != target_;
  if (candidate_.is_new) {
    asked_at_ = target_;
    candidate_.most = GuessLimit(max_guesses);
  }
  return candidate_;
}

bool Sequence::DropGuesses(PlannedSlice& plan) {
  if (plan.end <= target_) return false;
  candidate_.planned = (plan.end - target_) / 2;
  plan.end = target_ + candidate_.planned;
  return true;
}

// Keeps what the head read for the row that the last token was sampled from.
void Sequence::TakeState(const StepSlice& slice, size_t taken) {
  candidate_.hidden.clear();
  if (slice.output.states == nullptr || taken == 0) return;
  const size_t size = candidate_.sources.model->config.target_hidden;
  const float* const row = slice.output.states + (taken - 1) * size;
  try {
    candidate_.hidden.assign(row, row + size);
    candidate_.hidden_length = cache().length();
  } catch (const std::bad_alloc&) {
    // There are no guesses of what follows.
  }
}

PlanInput Sequence::ToPlan() const {
  const size_t warm_end = prefix_.warm_end();
  const size_t target =
      next_ < warm_end ? warm_end : target_ + candidate_.guesses().size();
  return {next_, target, logits_begin_, state_ == State::kDecoding, served_};
}

StepSlice Sequence::Prepare(const PlannedSlice& plan, size_t vocab_size,
                            size_t hidden_size) {
  StepSlice slice;
  slice.sequence = this;
  slice.ids.resize(std::min(plan.end, target_) - plan.begin);
  cache().CopyTokens(plan.begin, slice.ids);
  std::vector<size_t> keep;  // where a commit may end
  for (size_t i = 0; target_ + i < plan.end; ++i) {
    const int32_t id = candidate_.proposed[i].id;
    if (id < 0 || static_cast<size_t>(id) >= vocab_size) {
      throw InvalidArgument(StrCat("the guess is token ", id,
                                   ", expected an id in 0..", vocab_size - 1));
    }
    slice.ids.push_back(id);
    keep.push_back(target_ + i);
    ++slice.guesses;
  }
  if (parts_.consumer) {
    slice.output = parts_.consumer->output();
    slice.output.rows = LogitsRows(logits_begin_, plan.begin, plan.end);
    slice.row_size =
        slice.output.kind == RowOutput::kHidden ? hidden_size : vocab_size;
  }
  slice.wants_states = candidate_.reads_states() && slice.output.rows > 0;
  if (parts_.constraint) {
    slice.masks.resize(slice.output.rows * MaskWords(vocab_size));
    slice.may_end.resize(slice.output.rows);
  }
  slice.points = prefix_.PointsIn(plan.begin, plan.end);
  if (!slice.points.empty()) {
    for (const size_t p : slice.points) {
      if (p < plan.end) keep.push_back(p);
    }
    std::sort(keep.begin(), keep.end());
    keep.erase(std::unique(keep.begin(), keep.end()), keep.end());
  }
  std::optional<OptionalWork> optional;
  if (slice.guesses > 0) optional.emplace();
  slice.view = stream().transaction().Prepare(plan.begin, plan.end, keep);
  return slice;
}

void Sequence::ComputeMasks(StepSlice& slice) noexcept {
  const size_t rows = slice.output.rows;
  const size_t words = MaskWords(slice.row_size);
  Constraint& constraint = *parts_.constraint;
  try {
    if (candidate_.forced_error) {
      std::rethrow_exception(candidate_.forced_error);
    }
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
  OutputRow output = OutputRow::Of(slice.output, row, slice.row_size,
                                   slice.view.end - rows + row + 1);
  output.last_token = output.position + 1 >= cache.capacity_tokens();
  output.pool = pool;
  if (parts_.constraint) {
    if (slice.mask_error) std::rethrow_exception(slice.mask_error);
    const size_t words = MaskWords(slice.row_size);
    output.allowed = {slice.masks.data() + row * words, words};
    const auto nothing = [](uint32_t word) { return word == 0; };
    if (slice.may_end[row] &&
        std::all_of(output.allowed.begin(), output.allowed.end(), nothing)) {
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
    if (slice.wants_states) TakeState(slice, taken);
    if (slice.guesses > 0) stream().CountGuesses(slice.guesses, taken - 1);
    next_ = slice.view.end - (slice.output.rows - taken);
    while (!slice.points.empty() && slice.points.back() > next_) {
      slice.points.pop_back();
    }
    const std::vector<Checkpoint> points = cache().Commit(
        stream().transaction().lock(), slice.view, next_, slice.points);
    prefix_.Publish(points, next_);
    if (state_ == State::kPrefilling) stream().MarkComputed(next_);
    candidate_.Forget();
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
  prefix_.End(computed_);
  DrafterGuesser::End(candidate_);
  GiveBackAtEnd();
  reason_ = reason;
  state_ = State::kSettled;
  if (parts_.batch) {
    --parts_.batch->undecided;
  } else {
    stream().NothingFollows();
    EndSettled();
    if (state_ == State::kSettled) stream().Tell();
  }
}

// Whoever made the request may get to it late, and those that run need the
// blocks.
void Sequence::GiveBackAtEnd() noexcept {
  if (!computed_ || !cache().for_one_request()) return;
  try {
    stream().transaction().GiveBlocksBack();
    computed_ = false;
  } catch (const std::bad_alloc&) {
    // They are free when the conversation is.
  }
}

void Sequence::Fail(std::exception_ptr error) noexcept {
  if (state_ == State::kEnded) return;
  prefix_.End(computed_);
  candidate_.sources.drafter = nullptr;
  if (parts_.batch && !std::exchange(parts_.batch->failed, true)) {
    parts_.batch->error = error;
  }
  stream().End(FinishReason::kNone, std::move(error));
  state_ = State::kEnded;
}

bool Sequence::may_end() const {
  if (state_ == State::kEnded) return false;
  if (parts_.batch) return parts_.batch->decided();
  return state_ == State::kSettled && !stream().waits_for_reader();
}

void Sequence::EndSettled() noexcept {
  if (!may_end()) return;
  // Others may follow one that ends with its batch in the middle of its prompt.
  if (state_ != State::kSettled) prefix_.End(computed_);
  if (!parts_.batch) {
    stream().End(reason_, nullptr);
  } else if (parts_.batch->failed) {
    stream().End(FinishReason::kNone, parts_.batch->error, true);
  } else {
    stream().End(reason_, nullptr, true);
  }
  state_ = State::kEnded;
}

void Sequence::EndAtDeadline() noexcept {
  Settle(FinishReason::kDeadline);
  if (state_ != State::kSettled || parts_.batch) return;
  stream().End(reason_, nullptr);  // no reader came
  state_ = State::kEnded;
}

}  // namespace gkv
