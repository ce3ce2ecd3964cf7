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

// The condition that a sleeping scheduler waits on. It is shared with the
// streams, which may outlive the scheduler; its address identifies the
// scheduler, see InsideStep.
struct WakeUp {
  Mutex mutex{AtFork::kWaits};
  Condition changed{mutex};
  // A stream's interrupt() is to be looked at.
  bool interrupted GUARDED_BY(mutex) = false;
  // Requests may not wait for a prefix any more.
  bool prefix_changed GUARDED_BY(mutex) = false;
};

// The tokens of one request, its end and its result, and what it leaves in the
// conversation. The scheduler writes the stream (Push, End); the caller of the
// request reads it (NextEvent, WaitDone, Result).
//
// Push appends a token to the result and, in a streamed request, to the events
// that wait for the reader. NextEvent moves an event to the reader. A reader
// that leaves two or more events unread makes the request wait:
// waits_for_reader() is true, and the scheduler gives it no step until fewer
// are left. MarkComplete says that no token follows. End fixes the result,
// once, and closes the transaction: it keeps the conversation or restores it.
// Stop asks for an early end from any thread.
//
// A request that is not streamed either succeeds or leaves its cache as it was.
// In a streamed request a token counts as read when it is delivered: if the
// request is cancelled or fails, the transcript keeps what was delivered and no
// more. If nothing was delivered, the cache is as it was.
//
// The stream is thread-safe. The WakeUp's mutex is never taken while mutex_ is
// held. The transaction is the scheduler's to change until done_ is set.
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
  TokenStream(std::shared_ptr<Conversation> cache, RunLock&& lock,
              std::span<const int32_t> prompt, Options options);
  TokenStream(const TokenStream&) = delete;

  // ---- The reader's side ----

  // Years: as good as for ever, and small enough to be added to a time.
  static constexpr std::chrono::hours kLong{100'000};

  // Asks for an early end. Returns false if the request had ended already. In
  // that case a streamed request that is cancelled still takes back the tokens
  // that no one read, and one that is aborted takes back everything, unless
  // somebody has used the conversation since. `read`: the number of events that
  // the reader has, if the last one was lost on its way; that event is taken
  // back as if it had not been handed out.
  bool Stop(Interrupt how, size_t read = std::numeric_limits<size_t>::max());
  // Aborts the request, even if it has ended meanwhile, and waits for its end.
  void Abort();
  // Says that nobody will abort the request. If it is done, drops the content
  // that an abort would restore.
  void Confirm();
  // Waits until an event is there, the request has ended, or the time is over.
  // Returns nullopt in the last two cases. With `acknowledge` false, an event
  // that is read makes no room for further tokens before Acknowledge(): readers
  // of many streams read all of them, then call Acknowledge() of each, then
  // Notify(), so that their next tokens share a step.
  std::optional<TokenEvent> NextEvent(
      std::chrono::milliseconds timeout = kLong, bool acknowledge = true);
  // Makes room for further tokens. Returns true if the scheduler waited for
  // that and is to be notified.
  bool Acknowledge();
  void Notify();
  // Whether the request has ended and every event was taken.
  bool Drained() const;
  // Waits for the end. Returns whether the request has ended.
  bool WaitDone(std::chrono::milliseconds timeout = kLong) const;
  bool done() const;
  // Announces that this thread will wait for the request. NextEvent and
  // WaitDone call it before they wait; in a thread that works for no step,
  // nothing happens. Throws Busy, unless the request has ended, where the wait
  // would close a circle; see StepWait, which lasts until the request ends.
  void PrepareToWait() const;
  // Returns the number of tokens of the prompt that were computed or held, and
  // of all that were sampled.
  size_t progress() const;
  // Returns how many of the prompt's tokens were held or came from the prefix
  // cache, as far as that is known yet.
  size_t cached_tokens() const;
  // The first position of the prompt, and the position after its last.
  size_t prompt_begin() const { return transaction_.start_length(); }
  size_t prompt_end() const { return transaction_.prompt_end(); }
  // Requires: ended. Rethrows the failure of a failed request.
  const GenerateResult& Result() const;
  // Returns the failure of a failed request, else null; null in a child of
  // fork(). Does not wait.
  std::exception_ptr failure() const;
  // The same, and drops it: after this, Result() throws an Error without a
  // cause.
  std::exception_ptr TakeFailure();
  // Sets the function that is called, on any thread, when a step has brought an
  // event or the request has ended. It must not throw, nor set another one, and
  // should not take long. When set_on_change returns, the function before it is
  // called no more.
  void set_on_change(std::function<void()> on_change);

  // ---- The scheduler's side ----

  bool streamed() const { return options_.streamed; }
  // The cache of the transaction requires: not ended.
  CacheTransaction& transaction() { return transaction_; }
  Interrupt interrupt() const { return interrupt_.load(); }
  // Whether the reader has too many unread events: the request gets no step
  // now, and does not end.
  bool waits_for_reader() const;
  // Says that no token follows. The request ends when it does not wait for its
  // reader: a step whose guesses were right may bring many tokens, and the end
  // leaves no more of them unread than steps of single tokens would.
  void MarkComplete();
  // Sets what to wake when waits_for_reader() or interrupt() changes.
  void set_wake_up(std::shared_ptr<WakeUp> wake_up);
  // Notes how many tokens need no computing, those of the prefix cache
  // included.
  void set_cached_tokens(size_t count, const PrefixHit& prefix = {});
  // Notes that the transcript was computed up to `position`.
  void MarkComputed(size_t position);
  // Notes the time of the first logits.
  void MarkDecoding();
  // Counts the guesses of one step, and how many of them were right.
  void CountGuesses(size_t drafted, size_t accepted);
  // Takes a token that was appended to the transcript. Throws std::bad_alloc.
  void Push(TokenEvent event);
  // Calls `on_change`. The scheduler does so after the whole step, so that a
  // reader of many streams finds all of them changed.
  void Tell() noexcept;
  // Ends the request, once: with a reason, or with the failure `error`, or,
  // with neither, as if it had never been made. A Stop that the scheduler has
  // not seen yet counts, unless the end is `decided`. Never fails: if there is
  // no memory to keep what was delivered, everything is undone.
  void End(FinishReason reason, std::exception_ptr error,
           bool decided = false) noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  size_t Unread() const REQUIRES(mutex_);
  bool Behind() const REQUIRES(mutex_);
  void TellGate() const REQUIRES(mutex_);
  void Finish(FinishReason reason) REQUIRES(mutex_);
  void KeepTokens(size_t count) REQUIRES(mutex_);
  void StopLate(Interrupt how) REQUIRES(mutex_);
  void PutBack() REQUIRES(mutex_);
  void Wake(bool interrupted);
  size_t KeptEnd() const REQUIRES(mutex_);
  void CheckProcess() const;

  const Options options_;
  const OwnProcess process_;  // that the scheduler runs in
  std::atomic<Interrupt> interrupt_{Interrupt::kNone};

  ForkScope scope_;
  Mutex on_change_mutex_{scope_};  // held during a call
  std::function<void()> on_change_ GUARDED_BY(on_change_mutex_);

  mutable Mutex mutex_{scope_};
  mutable Condition changed_{mutex_};
  std::shared_ptr<WakeUp> wake_up_ GUARDED_BY(mutex_);
  mutable std::vector<StepWait> waits_ GUARDED_BY(mutex_);  // for this
  std::deque<TokenEvent> events_ GUARDED_BY(mutex_);
  bool complete_ GUARDED_BY(mutex_) = false;  // no token follows
  // An end without a token is to be delivered.
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
