#include "engine/token_stream.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/inside_step.h"
#include "base/process.h"

namespace gkv {
namespace {

// The number of events that may wait for the reader: enough to keep steps going
// while one is being read.
constexpr size_t kMaxUnread = 2;

double Seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

// Throws `error` with `more` after its message. Exceptions of other kinds, such
// as std::bad_alloc or one of Python, are thrown as they are.
[[noreturn]] void RethrowWith(const std::exception_ptr& error,
                              const std::string& more) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    std::rethrow_exception(e.Continued(more));
  }
}

}  // namespace

TokenStream::TokenStream(std::shared_ptr<Conversation> cache, RunLock&& lock,
                         std::span<const int32_t> prompt, Options options)
    : options_(std::move(options)),
      transaction_(std::move(cache), std::move(lock), prompt) {
  result_.seed = options_.seed;
  result_.prompt_tokens = prompt.size();
}

bool TokenStream::Stop(Interrupt how, size_t read) {
  if (process_.InChild()) return false;  // the parent's
  {
    const MutexLock lock(mutex_);
    if (read < handed_out_) PutBack();
    if (done_) {
      StopLate(how);
      return false;
    }
    if (interrupt_ != Interrupt::kAbort) interrupt_ = how;
    transaction_.lock().set_waits_for_reader(false);
  }
  Wake(true);
  return true;
}

void TokenStream::Abort() {
  if (Stop(Interrupt::kAbort)) {
    WaitDone();
    Stop(Interrupt::kAbort);  // the end may have been decided before
  }
}

void TokenStream::Confirm() {
  if (process_.InChild()) return;
  const MutexLock lock(mutex_);
  if (done_) transaction_.Confirm();
}

// Undoes what a late Stop still can. Requires: done_.
void TokenStream::StopLate(Interrupt how) {
  if (error_) return;
  if (how == Interrupt::kAbort) {
    if (!transaction_.TruncateLate(transaction_.start_length())) return;
    events_.clear();
    result_.finish_reason = FinishReason::kCancelled;
  } else if (options_.streamed && Unread() > 0 &&
             transaction_.TruncateLate(KeptEnd())) {
    KeepTokens(delivered_);
    result_.finish_reason = FinishReason::kCancelled;
  }
}

// Takes the last event back. Requires: an event was handed out.
void TokenStream::PutBack() {
  --handed_out_;
  delivered_bytes_ -= last_.text.size();
  if (last_.token_id < 0) {
    end_text_ = std::move(last_.text);
    end_unread_ = true;
  } else {
    --delivered_;
    events_.push_front(std::move(last_));
  }
}

// Returns the length of the transcript that a cancelled request keeps.
size_t TokenStream::KeptEnd() const {
  return delivered_ == 0 ? transaction_.start_length()
                         : transaction_.prompt_end() + delivered_;
}

// In a child of fork() nothing ends the request: the scheduler's thread stayed
// in the parent.
void TokenStream::CheckProcess() const {
  if (!process_.InChild()) return;
  throw Error(
      "the call: it was running when this process was forked, and runs in the "
      "parent only; expected calls that the child made");
}

std::optional<TokenEvent> TokenStream::NextEvent(
    std::chrono::milliseconds timeout, bool acknowledge) {
  CheckProcess();
  if (timeout.count() > 0) PrepareToWait();
  TokenEvent event;
  bool may_end = false;
  {
    MutexLock lock(mutex_);
    // A reader that has the last event takes the request for ended.
    const auto readable = [&]() REQUIRES(mutex_) {
      return !events_.empty() &&
             (done_ || !complete_ ||
              events_.front().finish_reason == FinishReason::kNone);
    };
    const auto changed = [&]() REQUIRES(mutex_) {
      return done_ || readable();
    };
    // Even a wait of no time is a system call.
    if (timeout.count() > 0) changed_.WaitFor(lock, timeout, changed);
    const bool was_behind = Behind();
    if (readable()) {
      event = std::move(events_.front());
      events_.pop_front();
    } else if (std::exchange(end_unread_, false)) {
      event.logprob = std::numeric_limits<float>::quiet_NaN();
      event.text = std::move(end_text_);
      event.finish_reason = result_.finish_reason;
    } else {
      return std::nullopt;
    }
    may_end = was_behind && complete_ && !Behind();
    if (was_behind && complete_) TellGate();
    ++handed_out_;
    delivered_ += event.token_id >= 0;
    delivered_bytes_ += event.text.size();
    last_ = event;
    if (done_) {
      transaction_.Confirm();
      return event;
    }
  }
  if ((acknowledge && Acknowledge()) || may_end) Notify();
  return event;
}

bool TokenStream::Drained() const {
  const MutexLock lock(mutex_);
  return done_ && events_.empty() && !end_unread_;
}

bool TokenStream::WaitDone(std::chrono::milliseconds timeout) const {
  CheckProcess();
  if (timeout.count() > 0) PrepareToWait();
  MutexLock lock(mutex_);
  return changed_.WaitFor(lock, timeout,
                          [&]() REQUIRES(mutex_) { return done_; });
}

bool TokenStream::done() const {
  const MutexLock lock(mutex_);
  return done_;
}

void TokenStream::PrepareToWait() const {
  const void* const step = InsideStep::Runner();
  if (step == nullptr) return;
  const MutexLock lock(mutex_);
  if (done_ || !wake_up_) return;
  const auto says_so = [&](const StepWait& wait) {
    return wait.step() == step;
  };
  if (std::any_of(waits_.begin(), waits_.end(), says_so)) return;
  waits_.emplace_back(wake_up_.get());
}

const GenerateResult& TokenStream::Result() const {
  const MutexLock lock(mutex_);
  if (error_ && kept_delivered_) {
    RethrowWith(error_, StrCat("; the conversation keeps the ", delivered_,
                               " tokens that were delivered"));
  }
  if (error_) std::rethrow_exception(error_);
  return result_;
}

std::exception_ptr TokenStream::failure() const {
  if (process_.InChild()) return nullptr;
  const MutexLock lock(mutex_);
  return error_;
}

std::exception_ptr TokenStream::TakeFailure() {
  if (process_.InChild()) return nullptr;
  const MutexLock lock(mutex_);
  if (!error_) return nullptr;
  return std::exchange(error_, std::make_exception_ptr(
                                   Error("the request failed")));
}

void TokenStream::set_on_change(std::function<void()> on_change) {
  const MutexLock lock(on_change_mutex_);
  on_change_ = std::move(on_change);
}

void TokenStream::set_wake_up(std::shared_ptr<WakeUp> wake_up) {
  const MutexLock lock(mutex_);
  wake_up_ = std::move(wake_up);
}

void TokenStream::set_cached_tokens(size_t count, const PrefixHit& prefix) {
  const MutexLock lock(mutex_);
  result_.cached_tokens = count;
  result_.prefix = prefix;
}

bool TokenStream::waits_for_reader() const {
  const MutexLock lock(mutex_);
  return Behind() && interrupt_ == Interrupt::kNone && !done_;
}

void TokenStream::MarkComplete() {
  const MutexLock lock(mutex_);
  complete_ = true;
  TellGate();
}

bool TokenStream::Acknowledge() {
  if (process_.InChild()) return false;
  const MutexLock lock(mutex_);
  const bool was_behind = Behind();
  const size_t was_ahead = std::exchange(ahead_, events_.size());
  if (!was_behind || ahead_ == was_ahead || done_) return false;
  TellGate();
  return !Behind();
}

void TokenStream::Notify() { Wake(false); }

void TokenStream::Wake(bool interrupted) {
  std::shared_ptr<WakeUp> wake_up;
  {
    const MutexLock lock(mutex_);
    if (done_) return;
    wake_up = wake_up_;
  }
  if (wake_up == nullptr) return;
  {
    // Taking the lock orders this after a check that is under way.
    const MutexLock lock(wake_up->mutex);
    if (interrupted) wake_up->interrupted = true;
  }
  wake_up->changed.NotifyAll();
}

void TokenStream::Tell() noexcept {
  const MutexLock calling(on_change_mutex_);
  if (on_change_) on_change_();
}

size_t TokenStream::progress() const {
  const MutexLock lock(mutex_);
  const size_t sampled = result_.token_ids.size();
  return sampled == 0 ? computed_ : result_.prompt_tokens + sampled;
}

size_t TokenStream::cached_tokens() const {
  const MutexLock lock(mutex_);
  return result_.cached_tokens;
}

void TokenStream::MarkComputed(size_t position) {
  const MutexLock lock(mutex_);
  const size_t begin = transaction_.start_length();
  const size_t end = std::min(position, transaction_.prompt_end());
  computed_ = std::max(computed_, std::max(begin, end) - begin);
}

void TokenStream::MarkDecoding() {
  const MutexLock lock(mutex_);
  if (!first_logits_) first_logits_ = Clock::now();
}

void TokenStream::CountGuesses(size_t drafted, size_t accepted) {
  const MutexLock lock(mutex_);
  result_.drafted += drafted;
  result_.accepted += accepted;
}

void TokenStream::Push(TokenEvent event) {
  MutexLock lock(mutex_);
  result_.token_ids.push_back(event.token_id);
  if (options_.logprobs) result_.logprobs.push_back(event.logprob);
  result_.top_logprobs.insert(result_.top_logprobs.end(),
                              event.top_logprobs.begin(),
                              event.top_logprobs.end());
  result_.text += event.text;
  if (event.finish_reason != FinishReason::kNone) {
    result_.finish_reason = event.finish_reason;
  }
  if (!options_.streamed) return;
  events_.push_back(std::move(event));
  ++ahead_;
  TellGate();
  lock.Unlock();
  changed_.NotifyAll();
}

// The number of unread tokens.
size_t TokenStream::Unread() const { return events_.size(); }

// Whether the reader has too many events unread for another token, or, if none
// follows, for the end. A reader that acknowledges later has read the event all
// the same, and may wait for the end by then.
bool TokenStream::Behind() const {
  return complete_ ? Unread() > kMaxUnread : ahead_ >= kMaxUnread;
}

// Tells the run gate whether the request waits for its reader.
void TokenStream::TellGate() const {
  transaction_.lock().set_waits_for_reader(Behind() &&
                                           interrupt_ == Interrupt::kNone);
}

// Cuts the result and the events to the first `count` tokens, none of which
// ended the text: text that was held back for a possible stop string belongs to
// them. Requires: all of these tokens were delivered, or no token is cut off.
void TokenStream::KeepTokens(size_t count) {
  std::string text;
  if (options_.token_text) {
    for (size_t i = 0; i < count; ++i) {
      text += (*options_.token_text)[result_.token_ids[i]];
    }
  }
  size_t given = delivered_bytes_;
  if (count < result_.token_ids.size()) {
    events_.clear();
  } else {
    for (const TokenEvent& event : events_) given += event.text.size();
  }
  if (text.size() > given) end_text_ = text.substr(given);
  result_.text = std::move(text);
  result_.token_ids.resize(count);
  result_.accepted = std::min(result_.accepted, count);
  if (options_.logprobs) result_.logprobs.resize(count);
  result_.top_logprobs.resize(count * options_.top_logprobs);
  end_unread_ = options_.streamed;
}

// Completes the result of a request that did not fail.
void TokenStream::Finish(FinishReason reason) {
  // A cancel that came after the last token counts: the reader has not seen
  // that token.
  if (options_.streamed && interrupt_ == Interrupt::kCancel && Unread() > 0) {
    reason = FinishReason::kCancelled;
  }
  const bool told = result_.finish_reason != FinishReason::kNone;
  if (reason == FinishReason::kCancelled && options_.streamed) {
    // If nothing was delivered, End() undoes everything.
    if (delivered_ > 0) {
      transaction_.cache().Truncate(transaction_.lock(), KeptEnd());
    }
    KeepTokens(delivered_);
  } else if (!told) {
    KeepTokens(result_.token_ids.size());
  }
  result_.finish_reason = reason;
}

void TokenStream::End(FinishReason reason, std::exception_ptr error,
                      bool decided) noexcept {
  // Destroying an error may take locks, so not while mutex_ is held.
  const std::exception_ptr given = error;
  MutexLock lock(mutex_);
  if (done_) return;
  const Clock::time_point now = Clock::now();
  if (!first_logits_) first_logits_ = now;
  result_.prefill_s = Seconds(*first_logits_ - submitted_);
  result_.decode_s = Seconds(now - *first_logits_);
  if (!decided && interrupt_ == Interrupt::kAbort) {
    reason = FinishReason::kNone;
    error = nullptr;
  }
  bool keep = false;
  if (!error && reason != FinishReason::kNone) {
    try {
      Finish(reason);
      keep = !options_.streamed || delivered_ > 0 ||
             result_.finish_reason != FinishReason::kCancelled;
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (error && options_.streamed && delivered_ > 0) {
    try {
      transaction_.cache().Truncate(transaction_.lock(), KeptEnd());
      keep = kept_delivered_ = true;
    } catch (...) {
      // Everything is undone: the error says nothing of tokens that are kept.
    }
  }
  if (error || !keep) {
    events_.clear();
    end_unread_ = options_.streamed && !error;
    result_.finish_reason = FinishReason::kCancelled;
  }
  const bool revocable = !options_.streamed || delivered_ == 0;
  keep ? transaction_.Keep(revocable) : transaction_.Undo();
  error_ = std::move(error);
  done_ = true;
  waits_.clear();
  lock.Unlock();
  changed_.NotifyAll();
  Tell();
}

}  // namespace gkv
