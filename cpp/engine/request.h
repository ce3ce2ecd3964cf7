#ifndef GEMMAKV_ENGINE_REQUEST_H_
#define GEMMAKV_ENGINE_REQUEST_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "cache/kv_cache.h"
#include "engine/options.h"
#include "engine/sampler.h"
#include "engine/stop_matcher.h"
#include "engine/vocabulary.h"

namespace gkv {

enum class FinishReason { kNone, kStop, kLength, kCancelled };

// One sampled token. `text` holds the bytes that became final with it: it may
// be empty (part of a possible stop string is held back) and may end inside a
// UTF-8 sequence. The last event of a request that did not fail has a
// finish_reason; it has token_id -1 if no token came with the end.
struct TokenEvent {
  int32_t token_id;
  float logprob;
  std::string text;
  FinishReason finish_reason = FinishReason::kNone;
};

struct GenerateResult {
  std::vector<int32_t> token_ids;  // all sampled, the stopping one last
  std::string text;                // without eos and stop string
  std::vector<float> logprobs;     // empty unless asked for
  uint64_t seed = 0;
  FinishReason finish_reason = FinishReason::kNone;
  size_t prompt_tokens = 0;  // of this request's prompt
  size_t cached_tokens = 0;  // transcript tokens that needed no computing
  double prefill_s = 0;      // from submission to the first logits
  double decode_s = 0;
};

// What a sleeping scheduler waits on. Shared with the requests, which may
// outlive it.
struct WakeUp {
  std::mutex mutex;
  std::condition_variable changed;
};

// One piece of work on one conversation, from submission to its end: generate
// text, or compute logits. Created by Gemma on the caller's thread, driven by
// the scheduler's thread, watched by the caller. Until it ends, the request
// holds the cache's run lock and a fork of the cache to restore when it fails.
class Request {
 public:
  // How a request may end early.
  enum class Interrupt {
    kNone,
    kCancel,  // keep every token that was emitted
    kAbort,   // as if the request had never been made
  };

  // Appends `prompt` to the transcript. Throws OutOfBlocks before any work if
  // it does not fit; the cache is unchanged then. `lock` is the cache's and is
  // taken over unless this throws.
  // With `streamed`, tokens are handed out as events, and sampling runs only a
  // little ahead of the reader.
  Request(std::shared_ptr<KVCache> cache, RunLock&& lock,
          std::span<const int32_t> prompt, GenerateOptions options, std::vector<int32_t> stop_ids,
          std::shared_ptr<const TokenText> token_text, bool streamed);
  // A request for logits: rows of `all_positions ? prompt.size() : 1`.
  Request(std::shared_ptr<KVCache> cache, RunLock&& lock,
          std::span<const int32_t> prompt, bool all_positions, float* logits);
  ~Request();
  Request(const Request&) = delete;

  // ---- Caller's side; any thread ----

  // Asks for an early end. False if the request had ended already. A streamed
  // request that is cancelled takes back the tokens that no one read, also if
  // it had ended: the transcript holds what the reader saw.
  bool Stop(Interrupt how);
  // Waits until an event is there, the request has ended, or the time is over.
  // nullopt in the last two cases.
  std::optional<TokenEvent> NextEvent(std::chrono::milliseconds timeout);
  // True once the request has ended and every event was taken.
  bool Drained() const;
  // Waits; true once the request has ended.
  bool WaitDone(std::chrono::milliseconds timeout);
  // Requires: ended. Rethrows the failure of a failed request.
  const GenerateResult& Result() const;

  // Of the transcript before this request.
  size_t start_length() const { return start_length_; }

  // ---- Scheduler's side; its thread only ----

  // Requires: not ended.
  KVCache& cache() const { return *cache_; }
  const RunLock& lock() const { return lock_; }
  Interrupt interrupt() const { return interrupt_.load(); }
  // Positions [next, target) are to be computed.
  size_t next() const { return next_; }
  size_t target() const { return target_; }
  bool decoding() const { return decoding_; }
  // First position whose logits are wanted: they are for all from there on.
  size_t logits_begin() const { return logits_begin_; }
  // Whether only the largest logit of each row matters.
  bool argmax_only() const { return generates_ && options_.TakesLargest(); }
  // The step [next(), end) is committed; `logits` are its rows. Samples, emits
  // and plans the next row, or ends the request. `pool` is null unless no loop
  // runs on it.
  void Advance(size_t end, std::span<float> logits, ThreadPool* pool);
  // Ends the request; restores the cache if it failed or was aborted.
  void Finish(FinishReason reason);
  void Fail(std::exception_ptr error);
  bool done() const;
  // Waits for its reader: not to be stepped.
  bool paused() const;
  // Who is to be woken when it need not wait any longer.
  void set_wake_up(std::shared_ptr<WakeUp> wake_up);

 private:
  using Clock = std::chrono::steady_clock;

  void Begin(const RunLock& lock, std::span<const int32_t> prompt);
  void SampleNext(std::span<float> logits, ThreadPool* pool);
  void EndWith(FinishReason reason, std::exception_ptr error);
  void RestoreAndRelease(bool restore);
  bool HasUnread() const;
  void TakeBackUnread(const RunLock& lock, KVCache& cache);
  void TakeBackLate();
  void Wake();

  // Let go of at the end: whoever made the request decides how long the
  // conversation lives.
  std::shared_ptr<KVCache> cache_;
  std::weak_ptr<KVCache> ended_cache_;
  RunLock lock_;  // until the end
  const bool generates_;
  const bool streamed_;
  const GenerateOptions options_;
  const std::vector<int32_t> stop_ids_;
  const std::shared_ptr<const TokenText> token_text_;
  std::unique_ptr<KVCache> backup_;
  std::optional<Sampler> sampler_;
  StopMatcher matcher_;

  float* logits_out_ = nullptr;  // next row to write, logits requests
  size_t logits_begin_ = 0;

  size_t start_length_ = 0;
  size_t end_length_ = 0;  // of the transcript when the request ended
  size_t next_ = 0;
  size_t target_ = 0;
  bool decoding_ = false;
  Clock::time_point submitted_;
  Clock::time_point first_logits_;
  std::atomic<Interrupt> interrupt_{Interrupt::kNone};
  bool announced_ = false;  // the last token's event tells the finish reason

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<TokenEvent> events_;
  size_t read_text_bytes_ = 0;  // of the events that were read
  std::shared_ptr<WakeUp> wake_up_;
  GenerateResult result_;
  std::exception_ptr error_;
  bool done_ = false;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_REQUEST_H_
