#ifndef GEMMAKV_ENGINE_TOKEN_STREAM_H_
#define GEMMAKV_ENGINE_TOKEN_STREAM_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/own_process.h"
#include "engine/cache_transaction.h"
#include "engine/step_wait.h"
#include "engine/vocabulary.h"
#include "gemmakv/results.h"

namespace gkv {

// What a sleeping scheduler waits on. Shared with the streams, which may
// outlive it; its address stands for the scheduler, see InsideStep.
struct WakeUp {
  Mutex mutex{AtFork::kWaits};
  Condition changed{mutex};
  // A stream's interrupt() is to be looked at.
  bool interrupted GUARDED_BY(mutex) = false;
  // Requests may not wait for a prefix any more.
  bool prefix_changed GUARDED_BY(mutex) = false;
};

// What comes of one request: its tokens one by one, its end, its result, and
// what of it stays in the conversation. Filled by the scheduler, read by
// whoever made the request. Thread-safe.
//
// A request that is not streamed either succeeds or leaves its cache as it was.
// Of a streamed one a token counts as read when it is delivered: when cancelled
// or failing, the transcript keeps what was delivered, and no more. With nothing
// delivered, its cache is as it was.
class TokenStream {
 public:
  // How a request may end early.
  enum class Interrupt {
    kNone,
    kCancel,  // keep what was delivered, or everything if not streamed
    kAbort,   // as if the request had never been made
  };
  struct Options {
    bool streamed = false;  // tokens are handed out as events
    bool logprobs = false;
    size_t top_logprobs = 0;  // of each token
    uint64_t seed = 0;
    std::shared_ptr<const TokenText> token_text = nullptr;  // null: no text
  };

  // Takes `lock` over unless it throws; see CacheTransaction.
  TokenStream(std::shared_ptr<KVCache> cache, RunLock&& lock,
              std::span<const int32_t> prompt, Options options);
  TokenStream(const TokenStream&) = delete;

  // ---- The reader's side ----

  // Years: as good as for ever, and small enough to be added to a time.
  static constexpr std::chrono::hours kLong{100'000};

  // Asks for an early end. False if the request had ended already. Then too, a
  // streamed one that is cancelled takes back the tokens that no one read, and
  // one that is aborted takes back everything, unless somebody has used the
  // conversation since. `read`: events that the reader has, if the last one
  // was lost on its way; that one is taken back as if it had not been handed
  // out.
  bool Stop(Interrupt how, size_t read = std::numeric_limits<size_t>::max());
  // Has it aborted, whenever it ends, and waits for that.
  void Abort();
  // Nobody will abort it, if it is done: lets go of what there was before.
  void Confirm();
  // Waits until an event is there, the request has ended, or the time is over.
  // nullopt in the last two cases.
  // With `acknowledge` false what is read makes no room for further tokens
  // before Acknowledge(): readers of many streams call that of all, then
  // Notify(), once they have read all, so that their next tokens share a step.
  std::optional<TokenEvent> NextEvent(
      std::chrono::milliseconds timeout = kLong, bool acknowledge = true);
  // True if the scheduler waits for that: it is to be notified.
  bool Acknowledge();
  void Notify();
  // True once the request has ended and every event was taken.
  bool Drained() const;
  // Waits; true once the request has ended.
  bool WaitDone(std::chrono::milliseconds timeout = kLong) const;
  bool done() const;
  // Whoever will wait for it comes here first, as NextEvent and WaitDone do if
  // they wait; for a thread that works for no step, nothing happens. Throws
  // Busy, unless the request has ended, where waiting would be waiting for
  // oneself; see StepWait, which lasts until the request ends.
  void PrepareToWait() const;
  // Tokens of the prompt that were computed or held, and all that were sampled.
  size_t progress() const;
  // Positions of the prompt.
  size_t prompt_begin() const { return transaction_.start_length(); }
  size_t prompt_end() const { return transaction_.prompt_end(); }
  // Requires: ended. Rethrows the failure of a failed request.
  const GenerateResult& Result() const;
  // The failure of a failed request, else null; null in a child of fork(). Waits
  // for nothing.
  std::exception_ptr failure() const;
  // The same, and lets go of it: Result() throws an Error without a cause then.
  std::exception_ptr TakeFailure();
  // `on_change` is called, on any thread, when a step has brought an event, or
  // the request has ended. It must not throw, nor set another one, and should
  // not take long. On return, the one before is called no more.
  void set_on_change(std::function<void()> on_change);

  // ---- The scheduler's side ----

  bool streamed() const { return options_.streamed; }
  // Requires: not ended, for the cache.
  CacheTransaction& transaction() { return transaction_; }
  Interrupt interrupt() const { return interrupt_.load(); }
  // Its reader is behind: no more is to be made for it now, nor is it to end.
  bool waits_for_reader() const;
  // Nothing more is made for it. It is to end when it does not wait for its
  // reader: a step whose guesses were right may have brought many tokens, and
  // leaves no more unread at the end than steps of single ones.
  void NothingFollows();
  // Who is to be woken when that or interrupt() changes.
  void set_wake_up(std::shared_ptr<WakeUp> wake_up);
  // Tokens that need no computing, those of the prefix cache among them.
  void set_cached_tokens(size_t count, const PrefixHit& prefix = {});
  // The transcript was computed up to `position`.
  void MarkComputed(size_t position);
  // The first logits are there.
  void MarkDecoding();
  // Of the guesses of one step, so many were right.
  void CountGuesses(size_t drafted, size_t accepted);
  // Takes a token that was appended to the transcript. Throws std::bad_alloc.
  void Push(TokenEvent event);
  // Calls `on_change`. One that reads many streams finds them all changed if it
  // is told when the whole step is done.
  void Tell() noexcept;
  // Ends the request, once: with a reason, or with the failure `error`, or,
  // with neither, as if it had never been made. An interrupt that nobody has
  // looked at counts, unless the end is `decided`. Never fails: where memory
  // does not suffice to keep what was delivered, everything is undone.
  void End(FinishReason reason, std::exception_ptr error,
           bool decided = false) noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  size_t Unread() const REQUIRES(mutex_);
  bool Behind() const REQUIRES(mutex_);
  void TellGate() const REQUIRES(mutex_);
  void Settle(FinishReason reason) REQUIRES(mutex_);
  void KeepTokens(size_t count) REQUIRES(mutex_);
  void StopLate(Interrupt how) REQUIRES(mutex_);
  void PutBack() REQUIRES(mutex_);
  void Wake(bool interrupted);
  size_t KeptEnd() const REQUIRES(mutex_);
  void CheckProcess() const;

  const Options options_;
  const OwnProcess process_;  // with the scheduler
  std::atomic<Interrupt> interrupt_{Interrupt::kNone};

  ForkScope scope_;
  Mutex on_change_mutex_{scope_};  // held while it is called; no other is then
  std::function<void()> on_change_ GUARDED_BY(on_change_mutex_);

  mutable Mutex mutex_{scope_};
  mutable Condition changed_{mutex_};
  std::shared_ptr<WakeUp> wake_up_ GUARDED_BY(mutex_);
  mutable std::vector<StepWait> waits_ GUARDED_BY(mutex_);  // for this
  std::deque<TokenEvent> events_ GUARDED_BY(mutex_);
  bool settled_ GUARDED_BY(mutex_) = false;
  // An end without a token is to be told.
  bool end_unread_ GUARDED_BY(mutex_) = false;
  std::string end_text_ GUARDED_BY(mutex_);   // of that event
  TokenEvent last_ GUARDED_BY(mutex_);        // that was handed out
  size_t handed_out_ GUARDED_BY(mutex_) = 0;  // events
  size_t ahead_ GUARDED_BY(mutex_) = 0;  // events that were not acknowledged
  size_t delivered_ GUARDED_BY(mutex_) = 0;  // tokens
  size_t delivered_bytes_ GUARDED_BY(mutex_) = 0;
  size_t computed_ GUARDED_BY(mutex_) = 0;  // tokens of the prompt
  GenerateResult result_ GUARDED_BY(mutex_);
  std::exception_ptr error_ GUARDED_BY(mutex_);
  bool kept_delivered_ GUARDED_BY(mutex_) = false;  // by a request that failed
  bool done_ GUARDED_BY(mutex_) = false;
  const Clock::time_point submitted_ = Clock::now();
  std::optional<Clock::time_point> first_logits_ GUARDED_BY(mutex_);

  CacheTransaction transaction_;  // the scheduler's, until the end
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_TOKEN_STREAM_H_
