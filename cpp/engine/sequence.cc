#include "engine/sequence.h"

#include <algorithm>
#include <numeric>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/rounding.h"
#include "engine/drafter.h"

namespace gkv {
namespace {

size_t MaskWords(size_t vocab_size) { return CeilDiv(vocab_size, 32); }

// Long prompts leave resume points at multiples of it.
constexpr size_t kPointDistance = 4096;
// Fewer tokens are not worth waiting for, nor a resume point.
constexpr size_t kWorthSharing = 64;

bool Has(std::span<const uint32_t> mask, int32_t id) {
  return (mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
}

}  // namespace

Sequence::Sequence(Parts parts) : parts_(std::move(parts)) {
  if (parts_.batch) {
    ++parts_.batch->undecided;
    ++parts_.batch->unstarted;
  }
  target_ = cache().length();
  logits_begin_ = target_ - (parts_.consumer ? parts_.output_rows : 0);
  next_ = cache().next_position_for_logits();
  // After a truncation past the window, positions before the end of what is
  // held are replayed: those were not served from the cache.
  stream().set_cached_tokens(next_);
  if (parts_.prefix.view) prompt_ = cache().tokens();
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

bool Sequence::Follow(Sequence& earlier) {
  leader_ = nullptr;
  if (!parts_.prefix.reads() || !earlier.parts_.prefix.writes() ||
      earlier.state_ != State::kPrefilling || earlier.preempted_ ||
      !parts_.prefix.view->Same(*earlier.parts_.prefix.view)) {
    return false;
  }
  const size_t limit = std::min(LookUpLimit(), earlier.prompt_.size());
  const auto end = prompt_.begin() + static_cast<ptrdiff_t>(limit);
  const auto common = static_cast<size_t>(
      std::mismatch(prompt_.begin(), end, earlier.prompt_.begin()).first -
      prompt_.begin());
  if (common <= std::max(earlier.next_, next_) + kWorthSharing ||
      cache().layout().hash() != earlier.cache().layout().hash()) {
    return false;
  }
  const PrefixOffer known =
      parts_.prefix.view->Find(cache(), prompt_, LookUpLimit());
  if (common <= known.start + kWorthSharing) return false;
  if (!earlier.lead_) earlier.lead_ = std::make_shared<Lead>();
  earlier.AddPoint(common);
  leader_ = earlier.lead_;
  awaited_ = common;
  return true;
}

bool Sequence::Fetch(const std::shared_ptr<WakeUp>& wake_up) {
  if (state_ != State::kWaiting || !parts_.prefix.reads() ||
      std::exchange(fetched_, true)) {
    return false;
  }
  try {
    fetch_ = parts_.prefix.view->Fetch(
        cache(), prompt_, LookUpLimit(), parts_.prefix.boundaries, [wake_up] {
          // Taking the lock orders this behind a check that is under way.
          {
            const std::lock_guard lock(wake_up->mutex);
          }
          wake_up->changed.notify_all();
        });
  } catch (const std::bad_alloc&) {
  } catch (const std::system_error&) {
    // It computes what it would have found.
  }
  return fetches();
}

// Leaves what did not come in time.
void Sequence::EndFetch() {
  if (!fetch_) return;
  if (!fetch_->done()) {
    parts_.prefix.view->cache().loader()->TimedOut(*fetch_);
  }
  fetch_ = nullptr;
}

void Sequence::Start() {
  if (state_ == State::kWaiting && parts_.batch) --parts_.batch->unstarted;
  state_ = State::kPrefilling;
  leader_ = nullptr;
  if (!parts_.prefix.view) return;
  try {
    LookUp();
  } catch (const std::bad_alloc&) {
    // It computes what it would have found.
  }
  EndFetch();
}

void Sequence::LookUp() {
  PrefixView& view = *parts_.prefix.view;
  const size_t limit = LookUpLimit();
  std::vector<int32_t> all;
  if (preempted_) all = cache().tokens();
  const std::span<const int32_t> tokens = preempted_ ? all : prompt_;
  size_t parts_at = 0;
  if (parts_.prefix.reads()) {
    const size_t before = next_;
    PrefixOffer offer = view.Find(cache(), tokens, limit, fetch_.get());
    // It is asked for a second time up to here.
    if (offer.match.parts || offer.match.known == limit) {
      parts_at = offer.match.known;
    }
    PrefixHit hit;
    const bool cheaper = offer.start == 0 && fetch_ && fetch_->cheaper();
    const PrefixMiss miss =
        cheaper ? PrefixMiss::kCheaper : PrefixView::MissOf(offer, limit);
    if (offer.start > 0 &&
        view.Take(cache(), stream().transaction().lock(), offer)) {
      computed_ = true;  // there is something to give back
      next_ = cache().next_position_for_logits();
      warm_end_ = cache().computed();
      hit = PrefixView::HitOf(offer, before, next_);
    }
    if (next_ < limit) hit.miss = miss;
    if (!preempted_) {
      stream().set_cached_tokens(next_, hit);
      view.cache().Count(limit, hit);
    }
  }
  if (preempted_ || !parts_.prefix.writes()) return;
  points_ = view.Points(tokens, parts_.prefix.boundaries, next_);
  if (parts_at > next_ + kWorthSharing) AddPoint(parts_at);
}

void Sequence::AddPoint(size_t position) {
  points_.insert(std::lower_bound(points_.begin(), points_.end(), position),
                 position);
}

// Ascending, each once.
std::vector<size_t> Sequence::PointsWithin(size_t begin, size_t end) const {
  std::vector<size_t> points;
  for (const size_t p : points_) {
    if (p > begin && p <= end) points.push_back(p);
  }
  const size_t far = RoundUp(begin + 1, kPointDistance);
  if (far <= end) points.push_back(far);
  std::sort(points.begin(), points.end());
  points.erase(std::unique(points.begin(), points.end()), points.end());
  return points;
}

void Sequence::PublishEnd() noexcept {
  if (fetch_) fetch_->Abandon();
  fetch_ = nullptr;
  if (computed_ && parts_.prefix.writes()) {
    parts_.prefix.view->Publish(cache(), {}, true);
  }
  if (lead_) lead_->over = true;
  lead_ = nullptr;
}

bool Sequence::GiveUpIndexed() {
  if (!parts_.prefix.view) return false;
  const bool took = std::exchange(takes_points_, false);
  return parts_.prefix.view->GiveUp(cache()) || took;
}

bool Sequence::LeavePrefix() {
  if (!computed_ || (!parts_.prefix.reads() && !parts_.prefix.writes())) {
    return false;
  }
  parts_.prefix.mode = PrefixMode::kOff;
  return true;
}

void Sequence::NoteSpeed(double seconds) const {
  if (parts_.prefix.view) parts_.prefix.view->set_seconds_per_token(seconds);
}

void Sequence::Preempt() {
  PublishEnd();
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
  const size_t target =
      next_ < warm_end_ ? warm_end_ : target_ + candidate_.guesses().size();
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
  // A step over what was computed before may be a warm-up.
  if (takes_points_ && parts_.prefix.writes() &&
      plan.begin >= cache().computed()) {
    slice.points = PointsWithin(plan.begin, plan.end);
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
    // What a warm-up led to is right where it ends.
    const bool warm = next_ == warm_end_ && parts_.prefix.writes();
    if (!points.empty() || warm) {
      parts_.prefix.view->Publish(cache(), points, warm);
    }
    if (lead_) lead_->reached = next_;
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
  PublishEnd();
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
  PublishEnd();
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
