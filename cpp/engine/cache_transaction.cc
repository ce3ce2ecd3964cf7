#include "engine/cache_transaction.h"

#include <utility>
#include <vector>

namespace gkv {

CacheTransaction::CacheTransaction(std::shared_ptr<Conversation> cache,
                                   RunLock&& lock,
                                   std::span<const int32_t> prompt)
    : before_(cache->Export()), start_length_(cache->length()) {
  cache->Append(lock, prompt);
  prompt_end_ = start_length_ + prompt.size();
  ended_cache_ = cache;
  cache_ = std::move(cache);
  lock_ = std::move(lock);
}

void CacheTransaction::GiveBlocksBack() {
  std::vector<int32_t> added(cache_->length() - start_length_);
  cache_->CopyTokens(start_length_, added);
  KvContent again = *before_;
  again.log.Append(added);
  again.fingerprint = cache_->fingerprint();
  cache_->Adopt(lock_, std::move(again));
}

bool CacheTransaction::TruncateLate(size_t length) {
  const std::shared_ptr<Conversation> cache = ended_cache_.lock();
  if (cache == nullptr) return true;  // there is nothing left to cut
  const RunLock lock = cache->TryLockAfter(lock_.serial());
  if (!lock) return false;
  if (before_ && length == start_length_) {
    cache->Adopt(lock, *std::move(before_));
    before_.reset();
  } else {
    cache->Truncate(lock, length);
  }
  return true;
}

void CacheTransaction::Close(bool undo, bool revocable) noexcept {
  if (!open()) return;
  if (undo) cache_->Adopt(lock_, *std::move(before_));
  if (!revocable) before_.reset();
  lock_.Release();
  cache_.reset();
}

}  // namespace gkv
