#include "engine/request.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/rng.h"

namespace gkv {
namespace {

double Seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

// Releases the run lock when a constructor throws.
class LockGuard {
 public:
  explicit LockGuard(KVCache& cache) : cache_(&cache) {}
  ~LockGuard() {
    if (cache_ != nullptr) cache_->run_lock().release();
  }
  void Dismiss() { cache_ = nullptr; }

 private:
  KVCache* cache_;
};

}  // namespace

Request::Request(std::shared_ptr<KVCache> cache,
                 std::span<const int32_t> prompt, GenerateOptions options,
                 std::vector<int32_t> stop_ids,
                 std::shared_ptr<const TokenText> token_text)
    : cache_(std::move(cache)),
      generates_(true),
      options_(std::move(options)),
      stop_ids_(std::move(stop_ids)),
      token_text_(std::move(token_text)),
      matcher_(options_.stop) {
  LockGuard guard(*cache_);
  result_.seed = options_.seed ? *options_.seed : RandomSeed();
  std::vector<int32_t> transcript;
  if (options_.repetition_penalty != 1) {
    transcript = cache_->tokens();
    transcript.insert(transcript.end(), prompt.begin(), prompt.end());
  }
  sampler_.emplace(options_, result_.seed, transcript);
  Begin(prompt);
  logits_begin_ = options_.max_tokens > 0 ? target_ - 1 : target_;
  guard.Dismiss();
}

Request::Request(std::shared_ptr<KVCache> cache,
                 std::span<const int32_t> prompt, bool all_positions,
                 float* logits)
    : cache_(std::move(cache)), generates_(false), logits_out_(logits) {
  LockGuard guard(*cache_);
  Begin(prompt);
  logits_begin_ = all_positions ? target_ - prompt.size() : target_ - 1;
  guard.Dismiss();
}

void Request::Begin(std::span<const int32_t> prompt) {
  submitted_ = Clock::now();
  start_length_ = cache_->length();
  backup_ = cache_->Fork();
  cache_->Append(prompt);
  target_ = cache_->length();
  next_ = cache_->next_position_for_logits();
  result_.prompt_tokens = prompt.size();
  // After a truncation past the window, positions before the end of what is
  // held are replayed: those were not served from the cache.
  result_.cached_tokens = next_;
}

Request::~Request() { RestoreAndRelease(true); }

bool Request::Stop(Interrupt how) {
  std::unique_lock lock(mutex_);
  if (done_) return false;
  if (interrupt_ != Interrupt::kAbort) interrupt_ = how;
  return true;
}

std::optional<TokenEvent> Request::NextEvent(
    std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, timeout, [&] { return done_ || !events_.empty(); });
  if (events_.empty()) return std::nullopt;
  TokenEvent event = std::move(events_.front());
  events_.pop_front();
  return event;
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

void Request::Advance(size_t end, std::span<float> logits) {
  next_ = end;
  if (!generates_) {
    std::memcpy(logits_out_, logits.data(), logits.size() * sizeof(float));
    logits_out_ += logits.size();
    if (next_ == target_) Finish(FinishReason::kLength);
    return;
  }
  if (next_ < target_) return;
  if (!decoding_) {
    first_logits_ = Clock::now();
    decoding_ = true;
  }
  if (options_.max_tokens == 0) return Finish(FinishReason::kLength);
  SampleNext(logits);
}

void Request::SampleNext(std::span<float> logits) {
  if (cache_->length() >= cache_->capacity_tokens()) {
    return Finish(FinishReason::kLength);
  }
  const SampledToken token = sampler_->Next(logits, cache_->length());
  if (token.id < 0) {
    throw InvalidArgument(
        "every token is masked (logit_bias) or has no finite logit, expected "
        "at least one to choose from");
  }
  cache_->Append({&token.id, 1});
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
    events_.push_back(std::move(event));
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
    const Clock::time_point now = Clock::now();
    if (!decoding_) first_logits_ = now;
    result_.prefill_s = Seconds(first_logits_ - submitted_);
    result_.decode_s = Seconds(now - first_logits_);
    result_.finish_reason = reason;
    if (!error && !announced_) {
      // What the stop matcher held back was sampled: it belongs to the text.
      TokenEvent last{-1, std::numeric_limits<float>::quiet_NaN(),
                      matcher_.Flush(), reason};
      result_.text += last.text;
      events_.push_back(std::move(last));
    }
    RestoreAndRelease(error || interrupt_ == Interrupt::kAbort);
    error_ = std::move(error);
    done_ = true;
  }
  changed_.notify_all();
}

void Request::RestoreAndRelease(bool restore) {
  if (released_) return;
  if (restore) cache_->Swap(*backup_);
  backup_.reset();
  released_ = true;
  cache_->run_lock().release();
}

}  // namespace gkv
