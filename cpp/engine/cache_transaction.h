#ifndef GEMMAKV_ENGINE_CACHE_TRANSACTION_H_
#define GEMMAKV_ENGINE_CACHE_TRANSACTION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "cache/conversation.h"

namespace gkv {

// The change that one request makes to a conversation. It holds the run lock
// and the content from before, and ends with Keep or Undo. Not thread-safe.
class CacheTransaction {
 public:
  // Appends `prompt`. Throws CacheFull, changing nothing, if it does not fit.
  // `lock` is the cache's and is taken over unless this throws.
  CacheTransaction(std::shared_ptr<Conversation> cache, RunLock&& lock,
                   std::span<const int32_t> prompt);
  // Undoes a transaction that is still open.
  ~CacheTransaction() { Undo(); }
  CacheTransaction(const CacheTransaction&) = delete;

  // cache() to GiveBlocksBack() require: open.
  bool open() const { return cache_ != nullptr; }
  Conversation& cache() const { return *cache_; }
  const RunLock& lock() const { return lock_; }
  // Conversation::Prepare for a step of the request.
  KvStepView Prepare(size_t begin, size_t end, std::span<const size_t> keep) {
    return cache_->Prepare(lock_, begin, end, keep, &*before_);
  }
  // Gives back the blocks that were filled since the beginning. The transcript
  // stays, and what was computed of it is pending again. Throws std::bad_alloc,
  // changing nothing.
  void GiveBlocksBack();

  // The lengths of the transcript before the prompt and with it.
  size_t start_length() const { return start_length_; }
  size_t prompt_end() const { return prompt_end_; }

  // End the transaction, from any thread, and release the conversation. With
  // `revocable`, the content from before stays until Confirm() or the end of
  // this object.
  void Keep(bool revocable) noexcept { Close(false, revocable); }
  // Requires: not open.
  void Confirm() noexcept { before_.reset(); }
  void Undo() noexcept { Close(true, false); }
  // Cuts a conversation that was kept to `length` tokens, if nobody has used it
  // since; returns false if somebody has. A revocable one that is cut to
  // start_length() is exactly as it was. Throws std::bad_alloc.
  bool TruncateLate(size_t length);

 private:
  void Close(bool undo, bool revocable) noexcept;

  std::shared_ptr<Conversation> cache_;
  std::weak_ptr<Conversation> ended_cache_;
  std::optional<KvContent> before_;
  RunLock lock_;  // destroyed before what it locks
  size_t start_length_ = 0;
  size_t prompt_end_ = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_CACHE_TRANSACTION_H_
