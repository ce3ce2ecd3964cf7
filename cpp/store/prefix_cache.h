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
#include "cache/conversation.h"
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
  size_t queue_bytes = size_t{256} << 20;  // of blocks that wait for the writer
  std::chrono::milliseconds time_out{2000};  // of one call of a tier
  bool weighs = true;  // what is quicker to compute is not loaded
};

// The prefix cache: the keys and values of known prefixes. One object serves
// all models and tenants; conversations share what belongs to the same model
// and tenant (PrefixView).
//
// It owns the index, which is the RAM tier, and if there are tiers below RAM a
// writer and a loader between these and the index. PrefixView::Publish puts
// what a conversation has computed into the index, and queues what was new for
// the PrefixWriter, which puts it into every tier that lacks it.
// PrefixView::Fetch queues a question for the PrefixLoader, which asks the
// tiers for the longest known prefix, checks what they give, puts it into the
// index, and has it written to the tiers above the one that had it.
// PrefixView::Find looks into the index and a fetch; PrefixView::Take gives a
// conversation references to the blocks, or copies. An entry is written when it
// is new, not when it is evicted.
//
// Index, writer and loader guard themselves, each by a mutex of its own; mutex_
// guards the counts alone. No lock is held while a tier is called. Clear and
// Close wait for tiers, but no longer than their time: the thread of a tier
// that does not answer is left alone.
//
// Thread-safe. A child of fork() has what was in RAM, and no tiers.
class PrefixCache {
 public:
  // How long Flush, Clear and Close wait for tiers by default.
  static constexpr std::chrono::seconds kFlushTime{60};
  static constexpr std::chrono::seconds kCloseTime{10};

  // `ram_bytes` bounds the blocks that the index refers to. `tiers` lie below
  // it, the nearest first. Throws InvalidArgument if two of them are of one
  // kind, or one is of an unknown kind.
  explicit PrefixCache(size_t ram_bytes, PrefixTiers tiers = {},
                       const PrefixTierOptions& options = {});
  ~PrefixCache() { Close(); }
  PrefixCache(const PrefixCache&) = delete;

  PrefixIndex& index() const { return *index_; }
  // Move objects between the index and the tiers; null without tiers.
  PrefixWriter* writer() const {
    return has_tiers() ? transfer_->writer.get() : nullptr;
  }
  PrefixLoader* loader() const {
    return has_tiers() ? transfer_->loader.get() : nullptr;
  }
  void Count(size_t prompt_tokens, const PrefixHit& hit);
  PrefixStats stats() const;
  // Waits until everything published is written, or has failed. Returns false
  // if it is not in time.
  bool Flush(std::chrono::nanoseconds time_out = kFlushTime);
  // Forgets everything, in all tiers. Throws Error in a child of fork(), if
  // there are tiers; and an Error that names the tiers that still have
  // something, because they failed or did not answer in time: they may go on
  // clearing.
  void Clear(std::chrono::nanoseconds time_out = kFlushTime);
  // Clears one tier: the index, or what is stored in it. Throws InvalidArgument
  // if there is no such tier, Error as Clear().
  void Clear(PrefixTier tier, std::chrono::nanoseconds time_out = kFlushTime);
  // Removes a branch from the tiers that can tell what belongs to it, after the
  // queue of the writer. RAM keeps it. Returns the number of objects that were
  // removed.
  uint64_t RemoveBranch(const ObjectBranch& branch);
  // Writes what is queued; from then on the tiers are neither asked nor
  // written. What is in RAM stays usable. Waits no longer than `time_out` for
  // tiers, and returns the number of objects that are not written then.
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

    // Shared with their threads.
    const std::shared_ptr<PrefixWriter> writer;
    const std::shared_ptr<PrefixLoader> loader;
  };

  bool has_tiers() const { return transfer_ && !process_.InChild(); }
  void CheckTiers() const;
  void ClearTiers(std::span<const PrefixTier> names, Clock::time_point until);

  const std::shared_ptr<PrefixIndex> index_;
  const PrefixTiers tiers_;
  std::vector<PrefixTier> names_;  // of the tiers, in their order
  std::shared_ptr<Transfer> transfer_;
  // The number of threads that clear a tier, including those that nobody waits
  // for any more.
  const std::shared_ptr<std::atomic<size_t>> clearing_ =
      std::make_shared<std::atomic<size_t>>(0);
  const OwnProcess process_;
  mutable Mutex mutex_{AtFork::kWaits};
  PrefixStats stats_ GUARDED_BY(mutex_);
};

// What a conversation may take over for some tokens.
struct PrefixOffer {
  PrefixMatch match;
  size_t start = 0;     // the first position to compute after that
  size_t computed = 0;  // positions of full layers to take over
  // The tier of each page, up to `computed` or more.
  std::vector<PrefixTier> found;
  bool cheaper = false;  // it is as quick to compute
};

// The prefix cache as one model sees it, for one tenant. Thread-safe.
class PrefixView {
 public:
  // `turn_ends` are the model's eos ids.
  PrefixView(std::shared_ptr<PrefixCache> cache, const Hash128& fingerprint,
             std::span<const uint8_t> salt, std::vector<int32_t> turn_ends);

  PrefixCache& cache() const { return *cache_; }
  // Whether both views see the same.
  const Address& salt() const { return id_.salt; }
  bool Same(const PrefixView& other) const {
    return cache_ == other.cache_ && id_ == other.id_;
  }

  // Returns what is known of [0, limit). Its start is 0 if that is worth no
  // more than what `cache` has. `tokens` are those of `cache`. Requires: limit
  // < tokens.size(). `fetch`, which asked for the same, adds what it has found.
  PrefixOffer Find(const Conversation& cache, std::span<const int32_t> tokens,
                   size_t limit, PrefixFetch* fetch = nullptr) const;
  // Asks the tiers below RAM for more than Find gives. Returns null if there is
  // nothing to ask or to win. `on_done` is called on another thread, unless the
  // fetch is abandoned. Throws std::bad_alloc, std::system_error.
  std::shared_ptr<PrefixFetch> Fetch(const Conversation& cache,
                                     std::span<const int32_t> tokens,
                                     size_t limit,
                                     std::span<const size_t> boundaries,
                                     std::function<void()> on_done) const;
  // Returns the tiers of [begin, end), which Take took over from the offer.
  static PrefixHit HitOf(const PrefixOffer& offer, size_t begin, size_t end);
  // Takes the offer over. Returns false, changing nothing, if there is no
  // memory for copies.
  bool Take(Conversation& cache, const RunLock& lock,
            const PrefixOffer& offer) const;
  // Returns why the offer is less than [0, limit).
  static PrefixMiss MissOf(const PrefixOffer& offer, size_t limit);

  // Puts into the index what `cache` has computed, and the points that Commit
  // returned; with `at_end`, also a point at its end. The tiers below RAM do not
  // get a point at the position `ram_only`. Without memory, puts nothing or a
  // part.
  void Publish(const Conversation& cache, std::span<const Checkpoint> points,
               bool at_end, size_t ram_only = 0) const noexcept;
  // Puts into the index all that `cache` has computed, and keeps it until Unpin
  // of the number that it returns. Throws Mismatch if it was computed by
  // another arithmetic; see PrefixIndex::Publish.
  uint64_t Pin(const Conversation& cache) const;
  // Returns where to take points while positions [begin, tokens.size()) are
  // computed, ascending: at `boundaries`, and at the last candidate of the
  // prompt.
  std::vector<size_t> ChoosePoints(std::span<const int32_t> tokens,
                                   std::span<const size_t> boundaries,
                                   size_t begin) const;
  // Forgets what RAM has for this view, for caches of a layout.
  void Clear(const KvLayout& layout) const;

  // Removes from the tiers below RAM all that begins as `tokens` and shares
  // more with them than the first `shared` tokens, which others use. Returns
  // the number of objects that were removed.
  uint64_t Remove(const KvLayout& layout, std::span<const int32_t> tokens,
                  size_t shared) const;

  // Sets the time of one token of a prompt, as measured last.
  void set_seconds_per_token(double seconds) { seconds_per_token_ = seconds; }
  // For a full pool, see PrefixIndex::GiveUp.
  bool GiveUp(const Conversation& cache) const {
    return cache_->index().GiveUp(&cache.pool());
  }

 private:
  Address Root(const KvLayout& layout) const { return id_.Root(layout); }
  void TakeIn(const Conversation& cache, std::span<const Checkpoint> points,
              bool at_end, size_t ram_only, uint64_t* pin) const;

  const std::shared_ptr<PrefixCache> cache_;
  const PrefixId id_;
  const std::vector<int32_t> turn_ends_;
  std::atomic<double> seconds_per_token_ = 1e-3;
};

// How a request may use the prefix cache.
struct PrefixAccess {
  std::shared_ptr<PrefixView> view = nullptr;  // null: nothing
  PrefixMode mode = PrefixMode::kOn;
  std::vector<size_t> boundaries = {};  // see PrefixView::ChoosePoints

  bool reads() const {
    return view && (mode == PrefixMode::kRead || mode == PrefixMode::kOn);
  }
  bool writes() const {
    return view && (mode == PrefixMode::kWrite || mode == PrefixMode::kOn);
  }
};

}  // namespace gkv

#endif  // GEMMAKV_STORE_PREFIX_CACHE_H_
