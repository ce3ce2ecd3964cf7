#ifndef GEMMAKV_STORE_PREFIX_CACHE_H_
#define GEMMAKV_STORE_PREFIX_CACHE_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "base/own_process.h"
#include "cache/kv_cache.h"
#include "gemmakv/options.h"
#include "gemmakv/results.h"
#include "store/address.h"
#include "store/prefix_index.h"
#include "store/prefix_loader.h"
#include "store/prefix_writer.h"

namespace gkv {

struct PrefixStats {
  PrefixIndexStats ram;
  uint64_t requests = 0;                         // that asked
  uint64_t prompt_tokens = 0;                    // of those
  PrefixHit tokens;                              // that they took over
  std::array<uint64_t, kPrefixMisses> misses{};  // by PrefixMiss

  struct Tier {
    PrefixTier tier;
    StoreStats store;
    PrefixTierStats loading;
  };
  std::vector<Tier> tiers;  // below RAM, the nearest first
  PrefixWriterStats writer;
  PrefixLoaderStats loader;
};

struct PrefixTierOptions {
  size_t queue_bytes = size_t{256} << 20;  // of blocks that wait to be written
  std::chrono::milliseconds time_out{2000};  // of one question to a tier
  bool weighs = true;  // computes what is quicker to compute
};

// What models, conversations and tenants share. Thread-safe. A child of fork()
// has what was in RAM, and no tiers.
class PrefixCache {
 public:
  // For a tier that does not answer, where nobody says how long.
  static constexpr std::chrono::seconds kFlushTime{60};
  static constexpr std::chrono::seconds kCloseTime{10};

  // `ram_bytes` bounds the blocks that the index refers to. `tiers` lie below
  // it, the nearest first. Throws InvalidArgument if two of them are of one
  // kind, or one is of none that there is.
  explicit PrefixCache(size_t ram_bytes, PrefixTiers tiers = {},
                       const PrefixTierOptions& options = {});
  ~PrefixCache() { Close(); }
  PrefixCache(const PrefixCache&) = delete;

  PrefixIndex& index() const { return *index_; }
  // What goes between the index and the tiers; null without tiers.
  PrefixWriter* writer() const {
    return has_tiers() ? transfer_->writer.get() : nullptr;
  }
  PrefixLoader* loader() const {
    return has_tiers() ? transfer_->loader.get() : nullptr;
  }
  void Count(size_t prompt_tokens, const PrefixHit& hit);
  PrefixStats stats() const;
  // Returns when what was published is written, or has failed; false if it was
  // not by then.
  bool Flush(std::chrono::nanoseconds time_out = kFlushTime);
  // Forgets everything, in all tiers. Throws Error in a child of fork(), if
  // there are tiers; and one that names the tiers that have still something,
  // which failed or did not answer in time: those may go on with it.
  void Clear(std::chrono::nanoseconds time_out = kFlushTime);
  // Of one tier alone: the index, or what is stored there. Throws
  // InvalidArgument if there is no such tier, Error as Clear().
  void Clear(PrefixTier tier, std::chrono::nanoseconds time_out = kFlushTime);
  // Removes a branch from the tiers that can tell what belongs to it, once what
  // is queued is written. RAM keeps it. Returns how many objects went.
  uint64_t RemoveBranch(const ObjectBranch& branch);
  // Writes what is queued; the tiers are neither asked nor written from then
  // on. What is in RAM stays usable. Waits no longer than that for tiers, and
  // returns how many objects are not written then.
  uint64_t Close(std::chrono::nanoseconds time_out = kCloseTime);

 private:
  class Clearing;
  using Clock = std::chrono::steady_clock;
  struct Transfer final : BlockHolder {
    Transfer(const std::shared_ptr<PrefixIndex>& index,
             const PrefixTiers& tiers, const std::vector<PrefixTier>& names,
             const PrefixTierOptions& options)
        : writer(std::make_shared<PrefixWriter>(index, tiers,
                                                options.queue_bytes)),
          loader(std::make_shared<PrefixLoader>(
              index, tiers, names, writer, options.time_out, options.weighs)) {}
    bool GiveUp(const BlockOwner* owner, size_t bytes, size_t& freed) override {
      return loader->GiveUp(owner, bytes, freed) ||
             writer->GiveUp(owner, bytes, freed);
    }

    // Their threads have them, too.
    const std::shared_ptr<PrefixWriter> writer;
    const std::shared_ptr<PrefixLoader> loader;
  };

  bool has_tiers() const { return transfer_ && !process_.InChild(); }
  void CheckTiers() const;
  void ClearTiers(std::span<const PrefixTier> names, Clock::time_point until);

  const std::shared_ptr<PrefixIndex> index_;
  const PrefixTiers tiers_;
  std::vector<PrefixTier> names_;  // of the tiers
  std::shared_ptr<Transfer> transfer_;
  // Threads that clear a tier, also those that nobody waits for any more.
  const std::shared_ptr<std::atomic<size_t>> clearing_ =
      std::make_shared<std::atomic<size_t>>(0);
  const OwnProcess process_;
  mutable Mutex mutex_{AtFork::kWaits};
  PrefixStats stats_ GUARDED_BY(mutex_);
};

// What may be taken over for some tokens.
struct PrefixOffer {
  PrefixMatch match;
  size_t start = 0;     // the first position that would be computed then
  size_t computed = 0;  // of full layers that would be taken over
  // By page, up to `computed` or more: where it was found.
  std::vector<PrefixTier> found;
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
  const Address& salt() const { return id_.salt; }
  bool Same(const PrefixView& other) const {
    return cache_ == other.cache_ && id_ == other.id_;
  }

  // What is known of [0, limit), if it is worth more than what `cache` would go
  // on from: else its start is 0. `tokens` are those of `cache`. Requires:
  // limit < tokens.size(). `fetch`, which asked for the same, adds what came of
  // it.
  PrefixOffer Find(const KVCache& cache, std::span<const int32_t> tokens,
                   size_t limit, PrefixFetch* fetch = nullptr) const;
  // Asks the tiers below RAM for more than Find gives. Null if there is nothing
  // to ask or to win. `on_done` is called on another thread, unless it is
  // abandoned. Throws std::bad_alloc, std::system_error.
  std::shared_ptr<PrefixFetch> Fetch(const KVCache& cache,
                                     std::span<const int32_t> tokens,
                                     size_t limit,
                                     std::span<const size_t> boundaries,
                                     std::function<void()> on_done) const;
  // Of [begin, end), which Take took over of it.
  static PrefixHit HitOf(const PrefixOffer& offer, size_t begin, size_t end);
  // Takes it over; false, changing nothing, if there is no memory for copies.
  bool Take(KVCache& cache, const RunLock& lock,
            const PrefixOffer& offer) const;
  // Why it is less than [0, limit).
  static PrefixMiss MissOf(const PrefixOffer& offer, size_t limit);

  // Takes in what `cache` has computed, and points that Commit gave. Where
  // memory does not suffice, nothing or a part. `at_end`: and where it stands.
  void Publish(const KVCache& cache, std::span<const Checkpoint> points,
               bool at_end) const noexcept;
  // Takes in all that `cache` has computed, and keeps it until Unpin of the
  // number that it gives. Throws Mismatch if it was computed by another
  // arithmetic; see PrefixIndex::Publish.
  uint64_t Pin(const KVCache& cache) const;
  // Where to take points while positions [begin, tokens.size()) are computed,
  // ascending: `boundaries`, the last candidate of the prompt.
  std::vector<size_t> Points(std::span<const int32_t> tokens,
                             std::span<const size_t> boundaries,
                             size_t begin) const;
  // Forgets what RAM has for this view of caches of a layout.
  void Clear(const KvLayout& layout) const;

  // Removes from the tiers below RAM all that begins as `tokens` and has more
  // in common with them than the first `shared`, which others use. Returns how
  // many objects that were.
  uint64_t Remove(const KvLayout& layout, std::span<const int32_t> tokens,
                  size_t shared) const;

  // What one token of a prompt takes, as measured last.
  void set_seconds_per_token(double seconds) { seconds_per_token_ = seconds; }
  // For a full pool: see PrefixIndex::GiveUp.
  bool GiveUp(const KVCache& cache) const {
    return cache_->index().GiveUp(&cache.pool());
  }

 private:
  Address Root(const KvLayout& layout) const { return id_.Root(layout); }
  void TakeIn(const KVCache& cache, std::span<const Checkpoint> points,
              bool at_end, uint64_t* pin) const;

  const std::shared_ptr<PrefixCache> cache_;
  const PrefixId id_;
  const std::vector<int32_t> turn_ends_;
  std::atomic<double> seconds_per_token_ = 1e-3;
};

// What a request may do with it.
struct PrefixAccess {
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
