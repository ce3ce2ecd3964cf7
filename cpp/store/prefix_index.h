#ifndef GEMMAKV_STORE_PREFIX_INDEX_H_
#define GEMMAKV_STORE_PREFIX_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "cache/block_pool.h"
#include "cache/kv_content.h"
#include "gemmakv/results.h"
#include "store/address.h"
#include "store/object.h"

namespace gkv {

// Blocks of positions of a known prefix, by group.
struct PrefixPart {
  std::shared_ptr<const KvLayout> layout;
  HeldSet held;
  PrefixTier tier = PrefixTier::kRam;  // that it was found in
};

// What is known of some tokens.
struct PrefixMatch {
  size_t known = 0;   // the first so many tokens
  size_t resume = 0;  // the last resume point among them; 0 if there is none
  // The known tokens go on otherwise: somebody parted from them here.
  bool parts = false;
  bool evicted = false;  // more was known once
  // In the order of positions: what groups that forget nothing hold of
  // [0, known), the last part maybe of more.
  std::vector<PrefixPart> pages;
  PrefixPart at_resume;  // what the others hold there
};

// A page or a resume point, by where it ends.
struct PrefixEntry {
  size_t end = 0;
  PrefixPart part;
};

// What was new to the index, each in the order of positions.
struct PrefixNews {
  std::vector<PrefixEntry> pages;
  std::vector<PrefixEntry> points;
};

// All blocks that are referred to, once for each reference.
template <typename Fn>
void ForBlocks(const HeldSet& held, const Fn& fn) NOT_ANALYZED {
  for (const auto& group : held) {
    for (const HeldBlock& part : group) fn(part.block.get());
  }
}
template <typename Fn>
void ForBlocks(const PrefixNews& news, const Fn& fn) NOT_ANALYZED {
  for (const auto* entries : {&news.pages, &news.points}) {
    for (const PrefixEntry& entry : *entries) ForBlocks(entry.part.held, fn);
  }
}

// Whoever refers to the index's blocks and will give them up when asked to.
class BlockHolder {
 public:
  virtual ~BlockHolder() = default;
  // Gives up blocks of `owner`, at least `bytes` of them where there are so
  // many. Adds the bytes that are free by it. False if there is nothing. Called
  // without locks of the index; see Reclaimer.
  virtual bool GiveUp(const BlockOwner* owner, size_t bytes, size_t& freed) = 0;
};

struct PrefixIndexStats {
  size_t bytes = 0;   // of the heap
  size_t pinned = 0;  // of these, that stay
  size_t pages = 0;
  size_t resume_points = 0;
  uint64_t published = 0;  // pages and resume points that were new
  uint64_t evictions = 0;  // of either
};

// The RAM tier: trees of pages and resume points by tokens, which refer to the
// blocks that conversations filled. docs/prefix-cache.md says what is kept.
//
// Thread-safe. While its lock is held no block is acquired and no reference
// destroyed.
class PrefixIndex : public std::enable_shared_from_this<PrefixIndex> {
 public:
  static std::shared_ptr<PrefixIndex> Create(size_t budget_bytes);
  ~PrefixIndex();
  PrefixIndex(const PrefixIndex&) = delete;

  size_t budget_bytes() const { return budget_bytes_; }

  // The longest resume point at most at `limit`, and how far the tokens before
  // that are known. Requires: limit <= tokens.size().
  PrefixMatch Match(const Address& root, std::span<const int32_t> tokens,
                    size_t limit);
  // Takes in the whole pages of [0, content.computed) that are new, and what
  // `points` are, which Commit or CheckpointGroups gave. `tokens` are those of
  // the content; `seconds` is what computing one of them takes; `pool` is that
  // of the content. What was new is added to `news`, if there is one. With
  // `pin`, all of it stays until Unpin of the number that it is set to, or
  // Clear. Throws std::bad_alloc, and CacheFull if pinned bytes are more than
  // the budget then.
  void Publish(const Address& root, std::shared_ptr<const KvLayout> layout,
               const std::shared_ptr<BlockPool>& pool,
               std::span<const int32_t> tokens, const KvContent& content,
               std::span<const Checkpoint> points, double seconds,
               PrefixNews* news = nullptr, uint64_t* pin = nullptr);
  // Bytes of the heap that a pin keeps, whoever keeps them too; 0 for one that
  // is over.
  size_t PinnedBytes(uint64_t pin) const;
  // Of blocks of `owner`, by any pin.
  size_t PinnedBytes(const BlockOwner* owner) const;
  // Throws std::bad_alloc, changing nothing.
  void Unpin(uint64_t pin);
  // Takes in what came from elsewhere, in blocks of `layout` that are of `pool`
  // or mapped: pages one after the other, and resume points behind them, as far
  // as it knows what comes before. `tokens` are those up to the last of them.
  // Throws std::bad_alloc.
  void Add(const Address& root, const std::shared_ptr<BlockPool>& pool,
           std::span<const int32_t> tokens, const PrefixNews& found,
           double seconds);
  // Asked where giving up entries does not do.
  void set_holder(std::weak_ptr<BlockHolder> holder) {
    const MutexLock lock(mutex_);
    holder_ = std::move(holder);
  }
  // Gives up what is worth least, until `bytes` of blocks of `owner` are free
  // by it where there are so many: blocks that nobody else refers to. What
  // frees nothing stays. Returns the bytes that are free.
  size_t Reclaim(const BlockOwner* owner, size_t bytes);
  // Gives up all that refers to blocks of `owner`, for whoever would have to
  // copy one of them in a full pool. False if there is nothing.
  bool GiveUp(const BlockOwner* owner);
  // Forgets a tree, or with a null pointer all, and what is pinned of it.
  void Clear(const Address* root);

  PrefixIndexStats stats() const;

 private:
  struct Node;
  struct Entry;
  struct Point;
  struct LessWorth {
    bool operator()(const Entry* a, const Entry* b) const;
  };
  class PoolReclaimer;
  // What stays: a page and all before it, and a point behind it.
  struct Pinned {
    Address root;
    std::vector<Entry*> entries;
  };
  using Pins = std::map<uint64_t, Pinned>;
  // Handed out by whoever holds the lock, destroyed behind it.
  using Victims = std::vector<std::unique_ptr<Entry>>;

  explicit PrefixIndex(size_t budget_bytes);
  Node* Descend(Node* node, std::span<const int32_t> page, uint64_t hash) const;
  void Insert(Entry* entry) REQUIRES(mutex_);
  void SetWorth(Entry* entry) REQUIRES(mutex_);
  void Touch(Entry* entry) REQUIRES(mutex_);
  std::unique_ptr<Entry> Remove(Entry* entry) REQUIRES(mutex_);
  void Evict(Entry* entry, Victims& victims) REQUIRES(mutex_);
  bool Frees(const Entry& entry, const BlockOwner* owner, size_t& bytes) const
      REQUIRES(mutex_);
  void Register(const std::shared_ptr<BlockPool>& pool);
  Node* Tree(const Address& root) REQUIRES(mutex_);
  Node* KnownPage(Node* node, std::span<const int32_t> page, uint64_t chain)
      REQUIRES(mutex_);
  Node* AddPage(Node* node, std::span<const int32_t> page, uint64_t chain,
                PrefixPart part, double seconds) REQUIRES(mutex_);
  void AddPages(Node*& node, std::span<const int32_t> tokens,
                const std::shared_ptr<const KvLayout>& layout,
                const HeldSet& full, double seconds, PrefixNews* news)
      REQUIRES(mutex_);
  bool AddPoint(Node* node, std::span<const int32_t> tokens, size_t position,
                PrefixPart part, double seconds) REQUIRES(mutex_);
  uint64_t PinAt(const Address& root, Node* node,
                 std::span<const int32_t> tokens, Victims& victims)
      REQUIRES(mutex_);
  void Unpin(Pins::iterator pin) REQUIRES(mutex_);
  static size_t BytesOf(std::span<Entry* const> entries,
                        const BlockOwner* owner);
  size_t PinnedBytesLocked(const BlockOwner* owner) const REQUIRES(mutex_);
  void KeepBudget(Victims& victims) REQUIRES(mutex_);
  size_t ReclaimEntries(const BlockOwner* owner, size_t bytes);
  std::shared_ptr<BlockHolder> holder() const {
    const MutexLock lock(mutex_);
    return holder_.lock();
  }

  const size_t budget_bytes_;
  mutable Mutex mutex_{AtFork::kWaits};
  std::map<Address, std::unique_ptr<Node>> trees_ GUARDED_BY(mutex_);
  std::unordered_map<const Block*, uint32_t> references_ GUARDED_BY(mutex_);
  // Leaves, which may go: not pinned.
  std::set<Entry*, LessWorth> queue_ GUARDED_BY(mutex_);
  Pins pins_ GUARDED_BY(mutex_);
  uint64_t last_pin_ GUARDED_BY(mutex_) = 0;
  double worth_gone_ GUARDED_BY(mutex_) = 0;                // of what went last
  // Hashes of pages that went.
  std::unordered_set<uint64_t> ghosts_ GUARDED_BY(mutex_);
  std::map<const BlockPool*, std::shared_ptr<PoolReclaimer>> reclaimers_
      GUARDED_BY(mutex_);
  PrefixIndexStats stats_ GUARDED_BY(mutex_);
  std::weak_ptr<BlockHolder> holder_ GUARDED_BY(mutex_);
};

}  // namespace gkv

#endif  // GEMMAKV_STORE_PREFIX_INDEX_H_
