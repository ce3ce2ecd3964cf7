#ifndef GEMMAKV_STORE_PREFIX_CACHE_H_
#define GEMMAKV_STORE_PREFIX_CACHE_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "cache/kv_cache.h"
#include "gemmakv/options.h"
#include "gemmakv/results.h"
#include "store/address.h"
#include "store/prefix_index.h"

namespace gkv {

struct PrefixStats {
  PrefixIndexStats ram;
  uint64_t requests = 0;      // that asked
  uint64_t prompt_tokens = 0;  // of those
  uint64_t ram_tokens = 0;     // that they took over
  std::array<uint64_t, kPrefixMisses> misses{};  // by PrefixMiss
};

// What models, conversations and tenants share. Thread-safe.
class PrefixCache {
 public:
  // `ram_bytes` bounds the blocks that the index refers to.
  explicit PrefixCache(size_t ram_bytes)
      : index_(PrefixIndex::Create(ram_bytes)) {}

  PrefixIndex& index() const { return *index_; }
  void Count(size_t prompt_tokens, const PrefixHit& hit);
  PrefixStats stats() const;
  void Clear() { index_->Clear(nullptr); }

 private:
  const std::shared_ptr<PrefixIndex> index_;
  mutable std::mutex mutex_;  // guards what follows
  PrefixStats stats_;
};

// What may be taken over for some tokens.
struct PrefixOffer {
  PrefixMatch match;
  size_t start = 0;     // the first position that would be computed then
  size_t computed = 0;  // of full layers that would be taken over
  bool cheaper = false;  // it is not worth it
};

// The prefix cache as one model sees it, for one tenant. Thread-safe.
class PrefixView {
 public:
  // `turn_ends` are the model's eos ids.
  PrefixView(std::shared_ptr<PrefixCache> cache, const Hash128& fingerprint,
             std::span<const uint8_t> salt, std::vector<int32_t> turn_ends);

  PrefixCache& cache() const { return *cache_; }
  // Whether they see the same.
  bool Same(const PrefixView& other) const {
    return cache_ == other.cache_ && fingerprint_ == other.fingerprint_ &&
           salt_ == other.salt_;
  }

  // What is known of [0, limit), if it is worth more than what `cache` would go
  // on from: else its start is 0. `tokens` are those of `cache`. Requires:
  // limit < tokens.size().
  PrefixOffer Find(const KVCache& cache, std::span<const int32_t> tokens,
                   size_t limit) const;
  // Takes it over; false, changing nothing, if there is no memory for copies.
  bool Take(KVCache& cache, const RunLock& lock, PrefixOffer offer) const;
  // Why it is less than [0, limit).
  static PrefixMiss MissOf(const PrefixOffer& offer, size_t limit);

  // Takes in what `cache` has computed, and points that Commit gave. Where
  // memory does not suffice, nothing or a part. `at_end`: and where it stands.
  void Publish(const KVCache& cache, std::span<const Checkpoint> points,
               bool at_end) const noexcept;
  // Where to take points while positions [begin, tokens.size()) are computed,
  // ascending: `boundaries`, the last candidate of the prompt.
  std::vector<size_t> Points(std::span<const int32_t> tokens,
                             std::span<const size_t> boundaries,
                             size_t begin) const;
  // Forgets what this view sees of caches of a layout.
  void Clear(const KvLayout& layout) const;

  // What one token of a prompt takes, as measured last.
  void set_seconds_per_token(double seconds) { seconds_per_token_ = seconds; }
  // For a full pool: see PrefixIndex::GiveUp.
  bool GiveUp(const KVCache& cache) const {
    return cache_->index().GiveUp(&cache.pool());
  }

 private:
  Address Root(const KvLayout& layout) const {
    return RootAddress(fingerprint_, layout.hash(), salt_);
  }

  const std::shared_ptr<PrefixCache> cache_;
  const Hash128 fingerprint_;
  const Address salt_;
  const std::vector<int32_t> turn_ends_;
  std::atomic<double> seconds_per_token_ = 1e-3;
};

// What a request may do with it.
struct PrefixUse {
  std::shared_ptr<PrefixView> view = nullptr;  // null: nothing
  PrefixMode mode = PrefixMode::kOn;
  std::vector<size_t> boundaries = {};  // see PrefixView::Points

  bool reads() const {
    return view && (mode == PrefixMode::kRead || mode == PrefixMode::kOn);
  }
  bool writes() const {
    return view && (mode == PrefixMode::kWrite || mode == PrefixMode::kOn);
  }
};

}  // namespace gkv

#endif  // GEMMAKV_STORE_PREFIX_CACHE_H_
