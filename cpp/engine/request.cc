#include "engine/request.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/rng.h"

namespace gkv {
namespace {

// Events of a streamed request that may wait for the reader: enough to keep
// steps going while one is being read.
constexpr size_t kMaxUnread = 2;

double Seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

Request::Request(std::shared_ptr<KVCache> cache, RunLock&& lock,
                 std::span<const int32_t> prompt, GenerateOptions options,
                 std::vector<int32_t> stop_ids,
                 std::shared_ptr<const TokenText> token_text, bool streamed)
    : cache_(std::move(cache)),
      generates_(true),
      streamed_(streamed),
      options_(std::move(options)),
      stop_ids_(std::move(stop_ids)),
      token_text_(std::move(token_text)),
      matcher_(options_.stop) {
  result_.seed = options_.seed ? *options_.seed : RandomSeed();
  std::vector<int32_t> transcript;
  if (options_.repetition_penalty != 1) {
    transcript = cache_->tokens();
    transcript.insert(transcript.end(), prompt.begin(), prompt.end());
  }
  sampler_.emplace(options_, result_.seed, transcript);
  Begin(lock, prompt);
  logits_begin_ = options_.max_tokens > 0 ? target_ - 1 : target_;
  lock_ = std::move(lock);
}

Request::Request(std::shared_ptr<KVCache> cache, RunLock&& lock,
                 std::span<const int32_t> prompt, bool all_positions,
                 float* logits)
    : cache_(std::move(cache)),
      generates_(false),
      streamed_(false),
      logits_out_(logits) {
  Begin(lock, prompt);
  logits_begin_ = all_positions ? target_ - prompt.size() : target_ - 1;
  lock_ = std::move(lock);
}

void Request::Begin(const RunLock& lock, std::span<const int32_t> prompt) {
  submitted_ = Clock::now();
  start_length_ = cache_->length();
  backup_ = cache_->Fork();
  cache_->Append(lock, prompt);
  target_ = cache_->length();
  next_ = cache_->next_position_for_logits();
  result_.prompt_tokens = prompt.size();
  // After a truncation past the window, positions before the end of what is
  // held are replayed: those were not served from the cache.
  result_.cached_tokens = next_;
}

// One that was never submitted leaves no trace.
Request::~Request() { RestoreAndRelease(true); }

bool Request::Stop(Interrupt how) {
  {
    std::unique_lock lock(mutex_);
    if (done_) {
      if (how == Interrupt::kCancel) TakeBackLate();
      return false;
    }
    if (interrupt_ != Interrupt::kAbort) interrupt_ = how;
  }
  Wake();
  return true;
}

std::optional<TokenEvent> Request::NextEvent(
    std::chrono::milliseconds timeout) {
  TokenEvent event;
  {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, timeout, [&] { return done_ || !events_.empty(); });
    if (events_.empty()) return std::nullopt;
    event = std::move(events_.front());
    events_.pop_front();
    lock_.set_waits_for_reader(false);
    read_text_bytes_ += event.text.size();
  }
  Wake();
  return event;
}

void Request::set_wake_up(std::shared_ptr<WakeUp> wake_up) {
  std::unique_lock lock(mutex_);
  wake_up_ = std::move(wake_up);
}

void Request::Wake() {
  std::shared_ptr<WakeUp> wake_up;
  {
    std::unique_lock lock(mutex_);
    if (done_) return;
    wake_up = wake_up_;
  }
  if (wake_up == nullptr) return;
  // Taking the lock orders this behind a check that is under way.
  { std::unique_lock lock(wake_up->mutex); }
  wake_up->changed.notify_all();
}

bool Request::paused() const {
  std::unique_lock lock(mutex_);
  return events_.size() >= kMaxUnread && interrupt_ == Interrupt::kNone &&
         !done_;
}

// Requires: mutex_ is held.
bool Request::HasUnread() const {
  return std::any_of(events_.begin(), events_.end(),
                     [](const TokenEvent& e) { return e.token_id >= 0; });
}

// A cancel that comes behind the end. Whoever went on with the conversation
// meanwhile keeps it. Requires: mutex_ is held.
void Request::TakeBackLate() {
  const std::shared_ptr<KVCache> cache = ended_cache_.lock();
  if (!HasUnread() || error_ || !cache) return;
  const RunLock lock = cache->TryLock();
  if (lock && cache->length() == end_length_) TakeBackUnread(lock, *cache);
}

// Requires: mutex_ and the cache's run lock are held.
void Request::TakeBackUnread(const RunLock& lock, KVCache& cache) {
  const size_t unread = static_cast<size_t>(
      std::count_if(events_.begin(), events_.end(),
                    [](const TokenEvent& e) { return e.token_id >= 0; }));
  events_.clear();
  if (unread > 0) {
    cache.Truncate(lock, cache.length() - unread);
    result_.token_ids.resize(result_.token_ids.size() - unread);
    if (options_.logprobs) result_.logprobs.resize(result_.token_ids.size());
  }
  // Text that was held back for a stop string belongs to the tokens read.
  if (token_text_) {
    result_.text.clear();
    for (const int32_t id : result_.token_ids) {
      result_.text += (*token_text_)[id];
    }
  }
  result_.finish_reason = FinishReason::kCancelled;
  TokenEvent last{-1,
                  std::numeric_limits<float>::quiet_NaN(),
                  {},
                  FinishReason::kCancelled};
  if (result_.text.size() > read_text_bytes_) {
    last.text = result_.text.substr(read_text_bytes_);
  }
  events_.push_back(std::move(last));
}

bool Request::WaitDone(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [&] { return done_; });
}

bool Request::Drained() const {
  std::unique_lock lock(mutex_);
  return done_ && events_.empty();
}

const GenerateResult& Request::Result() const {
  std::unique_lock lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  return result_;
}

bool Request::done() const {
  std::unique_lock lock(mutex_);
  return done_;
}

void Request::Advance(size_t end, std::span<float> logits, ThreadPool* pool) {
  next_ = end;
  if (!generates_) {
    logits_out_ = std::copy(logits.begin(), logits.end(), logits_out_);
    if (next_ == target_) Finish(FinishReason::kLength);
    return;
  }
  if (next_ < target_) return;
  if (!decoding_) {
    first_logits_ = Clock::now();
    decoding_ = true;
  }
  if (options_.max_tokens == 0) return Finish(FinishReason::kLength);
  SampleNext(logits, pool);
}

void Request::SampleNext(std::span<float> logits, ThreadPool* pool) {
  if (cache_->length() >= cache_->capacity_tokens()) {
    return Finish(FinishReason::kLength);
  }
  const SampledToken token = sampler_->Next(logits, cache_->length(), pool);
  if (token.id < 0) {
    throw InvalidArgument(
        "every token is masked (logit_bias) or has no finite logit, expected "
        "at least one to choose from");
  }
  cache_->Append(lock_, {&token.id, 1});
  target_ = cache_->length();
  logits_begin_ = target_ - 1;
  const bool is_stop_id = std::find(stop_ids_.begin(), stop_ids_.end(),
                                    token.id) != stop_ids_.end();
  TokenEvent event{token.id, token.logprob, {}};
  if (!is_stop_id && token_text_) {
    event.text = matcher_.Push((*token_text_)[token.id]);
  }
  FinishReason reason = FinishReason::kNone;
  if (is_stop_id || matcher_.stopped()) {
    reason = FinishReason::kStop;
  } else if (result_.token_ids.size() + 1 >= options_.max_tokens ||
             target_ >= cache_->capacity_tokens()) {
    reason = FinishReason::kLength;
  }
  if (reason != FinishReason::kNone && !matcher_.stopped()) {
    event.text += matcher_.Flush();
  }
  event.finish_reason = reason;
  {
    std::unique_lock lock(mutex_);
    result_.token_ids.push_back(token.id);
    if (options_.logprobs) result_.logprobs.push_back(token.logprob);
    result_.text += event.text;
    if (streamed_) events_.push_back(std::move(event));
    lock_.set_waits_for_reader(events_.size() >= kMaxUnread);
  }
  if (reason != FinishReason::kNone) {
    announced_ = true;
    return Finish(reason);
  }
  changed_.notify_all();
}

void Request::Finish(FinishReason reason) { EndWith(reason, nullptr); }

void Request::Fail(std::exception_ptr error) {
  EndWith(FinishReason::kNone, std::move(error));
}

void Request::EndWith(FinishReason reason, std::exception_ptr error) {
  {
    std::unique_lock lock(mutex_);
    // A cancel between the last token and here counts: its reader has not
    // seen that token.
    if (!error && streamed_ && interrupt_ == Interrupt::kCancel &&
        HasUnread()) {
      reason = FinishReason::kCancelled;
    }
    const Clock::time_point now = Clock::now();
    if (!decoding_) first_logits_ = now;
    result_.prefill_s = Seconds(first_logits_ - submitted_);
    result_.decode_s = Seconds(now - first_logits_);
    result_.finish_reason = reason;
    const bool restore = error || interrupt_ == Interrupt::kAbort;
    if (reason == FinishReason::kCancelled && !restore && streamed_) {
      TakeBackUnread(lock_, *cache_);
    } else if (!announced_ && streamed_) {
      events_.push_back(
          {-1, std::numeric_limits<float>::quiet_NaN(), {}, reason});
    } else if (reason == FinishReason::kCancelled) {
      result_.text += matcher_.Flush();
    }
    if (error) events_.clear();
    end_length_ = cache_->length();
    RestoreAndRelease(restore);
    error_ = std::move(error);
    done_ = true;
  }
  changed_.notify_all();
}

void Request::RestoreAndRelease(bool restore) {
  if (!lock_) return;
  if (restore) cache_->Swap(lock_, *backup_);
  backup_.reset();
  lock_.Release();
  ended_cache_ = cache_;
  cache_.reset();
}

}  // namespace gkv
