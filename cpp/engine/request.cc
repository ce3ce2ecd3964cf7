#include "engine/request.h"

#include <algorithm>
#include <new>
#include <span>
#include <utility>

#include "base/error.h"
#include "engine/drafter.h"

namespace gkv {

Request::Request(Parts parts)
    : parts_(std::move(parts)),
      next_(cache().next_position_for_logits()),
      target_(cache().length()),
      logits_begin_(target_ - (parts_.consumer ? parts_.output_rows : 0)),
      prefix_(std::move(parts_.prefix), stream(), PrefixLimit()) {
  if (parts_.batch) {
    ++parts_.batch->undecided;
    ++parts_.batch->unstarted;
  }
  // After a truncation past the window, positions before the end of what is
  // held are replayed: those did not come from the cache.
  stream().set_cached_tokens(next_);
  candidate_.sources = std::move(parts_.guessed_by);
  candidate_.cache = &cache();
  candidate_.lock = &stream().transaction().lock();
  candidate_.consumer = parts_.consumer.get();
  candidate_.constraint = parts_.constraint.get();
  candidate_.sampled_from = stream().prompt_end();
}

void Request::Become(State state) noexcept {
  if (is<Waiting>() && parts_.batch) --parts_.batch->unstarted;
  state_ = state;
}

// Returns how many tokens may come from the prefix cache at most.
size_t Request::PrefixLimit() const {
  return std::min(logits_begin_, target_ - 1);
}

void Request::Start() {
  Become(Prefilling{.again = is<Preempted>()});
  if (!prefix_.Resume(PrefixLimit())) return;
  holds_blocks_ = true;
  next_ = cache().next_position_for_logits();
}

void Request::Preempt() {
  prefix_.End(holds_blocks_);
  if (holds_blocks_) stream().transaction().GiveBlocksBack();
  holds_blocks_ = false;
  if (is<Settled>()) return;
  next_ = cache().next_position_for_logits();
  candidate_.Forget();
  Become(Preempted{});
}

// Returns how many guesses there is room for. The last token needs no row of
// its own: it is sampled from the row before.
size_t Request::GuessLimit(size_t max_guesses) const {
  return std::min({max_guesses, parts_.consumer->tokens_left() - 1,
                   cache().capacity_tokens() - target_ - 1});
}

Candidate& Request::ToGuess(size_t max_guesses) {
  Decoding* const decoding = std::get_if<Decoding>(&state_);
  candidate_.decodes = decoding != nullptr;
  candidate_.read = next_;
  candidate_.is_new = decoding && !std::exchange(decoding->asked, true);
  if (candidate_.is_new) candidate_.most = GuessLimit(max_guesses);
  return candidate_;
}

PlanInput Request::ToPlan() const {
  const size_t warm_end = prefix_.warm_end();
  const size_t target =
      next_ < warm_end ? warm_end : target_ + candidate_.guesses().size();
  return {next_, target, logits_begin_, is<Decoding>(), served_};
}

bool Request::DropGuesses(PlannedSlice& plan) {
  if (plan.end <= target_) return false;
  candidate_.planned = (plan.end - target_) / 2;
  plan.end = target_ + candidate_.planned;
  return true;
}

StepSlice Request::Prepare(const PlannedSlice& plan, size_t vocab_size,
                           size_t hidden_size) {
  StepSlice slice;
  slice.request = this;
  slice.ids.resize(std::min(plan.end, target_) - plan.begin);
  cache().CopyTokens(plan.begin, slice.ids);
  std::vector<size_t> keep;  // positions at which the commit may end
  for (size_t i = 0; target_ + i < plan.end; ++i) {
    const int32_t id = candidate_.proposed[i].id;
    if (id < 0 || static_cast<size_t>(id) >= vocab_size) {
      throw InvalidArgument(Unexpected(
          "guess", StrCat("a token id in 0..", vocab_size - 1), id));
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
  if (parts_.constraint && slice.output.rows > 0) {
    slice.masks = TokenMasks(slice.output.rows, vocab_size);
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

void Request::ComputeMasks(StepSlice& slice) noexcept {
  slice.masks.Compute(*parts_.constraint,
                      std::span(slice.ids).last(slice.output.rows - 1),
                      parts_.stop_ids, candidate_.forced_error);
}

// Takes one row. Returns true if the next row is valid, too: its token is the
// sampled one.
bool Request::TakeRow(StepSlice& slice, size_t row, ThreadPool* pool) {
  const size_t rows = slice.output.rows;
  Conversation& cache = this->cache();
  OutputRow output = OutputRow::Of(slice.output, row, slice.row_size,
                                   slice.view.end - rows + row + 1);
  output.last_token = output.position + 1 >= cache.capacity_tokens();
  output.pool = pool;
  if (!slice.masks.empty()) {
    output.allowed = slice.masks.Of(row);
    if (slice.masks.Ends(row)) {
      slice.reason = FinishReason::kStop;
      return false;
    }
  }
  TokenEvent event = parts_.consumer->Take(output);
  slice.reason = event.finish_reason;
  const bool finished = slice.reason != FinishReason::kNone;
  const int32_t token = event.token_id;
  if (token < 0) return !finished;
  stream().MarkDecoding();
  if (parts_.constraint && !finished) parts_.constraint->Accept(token);
  cache.Append(stream().transaction().lock(), {&token, 1});
  stream().Push(std::move(event));
  return !finished && row + 1 < rows &&
         slice.ids[slice.ids.size() - rows + row + 1] == token;
}

// Keeps the hidden state from which the last token was sampled.
void Request::TakeState(const StepSlice& slice, size_t taken) {
  candidate_.hidden.clear();
  if (slice.output.states == nullptr || taken == 0) return;
  const size_t size = candidate_.sources.model->config.target_hidden;
  const float* const row = slice.output.states + (taken - 1) * size;
  try {
    candidate_.hidden.assign(row, row + size);
    candidate_.hidden_length = cache().length();
  } catch (const std::bad_alloc&) {
    // Nothing is guessed of what follows.
  }
}

void Request::TakeRows(StepSlice& slice, ThreadPool* pool) noexcept {
  try {
    holds_blocks_ = true;
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
    if (is<Prefilling>()) stream().MarkComputed(next_);
    candidate_.Forget();
    const size_t length = cache().length();
    if (next_ < target_) {
      logits_begin_ = std::max(logits_begin_, next_);
    } else if (length > target_) {
      target_ = length;
      logits_begin_ = target_ - 1;
      Become(Decoding{});
    } else if (slice.reason == FinishReason::kNone) {
      slice.reason = FinishReason::kLength;  // nothing more was asked for
    }
  } catch (...) {
    slice.error = std::current_exception();
    slice.view = {};  // frees its blocks before the failure is told
  }
}

void Request::Conclude(StepSlice& slice) noexcept {
  if (slice.error) return Fail(std::move(slice.error));
  if (slice.reason != FinishReason::kNone) return Settle(slice.reason);
  if (is<Decoding>() && stream().streamed()) stream().Tell();
}

void Request::Settle(FinishReason reason) noexcept {
  if (is<Settled>() || is<Ended>()) return;
  prefix_.End(holds_blocks_);
  DrafterGuesser::End(candidate_);
  GiveBackAtEnd();
  Become(Settled{reason});
  if (parts_.batch) {
    --parts_.batch->undecided;
  } else {
    stream().MarkComplete();
    EndSettled();
    if (is<Settled>()) stream().Tell();
  }
}

// Gives the blocks of a conversation for one request back at once: the caller
// may release it late, and running requests need the blocks.
void Request::GiveBackAtEnd() noexcept {
  if (!holds_blocks_ || !cache().for_one_request()) return;
  try {
    stream().transaction().GiveBlocksBack();
    holds_blocks_ = false;
  } catch (const std::bad_alloc&) {
    // They are freed with the conversation.
  }
}

void Request::Fail(std::exception_ptr error) noexcept {
  if (is<Ended>()) return;
  prefix_.End(holds_blocks_);
  candidate_.sources.drafter = nullptr;
  if (parts_.batch && !std::exchange(parts_.batch->failed, true)) {
    parts_.batch->error = error;
  }
  stream().End(FinishReason::kNone, std::move(error));
  Become(Ended{});
}

bool Request::may_end() const {
  if (is<Ended>()) return false;
  if (parts_.batch) return parts_.batch->decided();
  return is<Settled>() && !stream().waits_for_reader();
}

void Request::EndSettled() noexcept {
  if (!may_end()) return;
  const Settled* const settled = std::get_if<Settled>(&state_);
  // Others may follow a request that ends with its batch in the middle of its
  // prompt.
  if (settled == nullptr) prefix_.End(holds_blocks_);
  if (parts_.batch && parts_.batch->failed) {
    stream().End(FinishReason::kNone, parts_.batch->error, true);
  } else {
    stream().End(settled->reason, nullptr, parts_.batch != nullptr);
  }
  Become(Ended{});
}

void Request::EndAtDeadline() noexcept {
  Settle(FinishReason::kDeadline);
  const Settled* const settled = std::get_if<Settled>(&state_);
  if (settled == nullptr || parts_.batch) return;
  stream().End(settled->reason, nullptr);  // no reader came
  Become(Ended{});
}

}  // namespace gkv
