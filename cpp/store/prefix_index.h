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

// Blocks of some positions of a known prefix, by group.
struct PrefixPart {
  std::shared_ptr<const KvLayout> layout;
  HeldSet held;
  PrefixTier tier = PrefixTier::kRam;  // that it was found in
};

// The known prefix of some tokens.
struct PrefixMatch {
  size_t known = 0;   // so many tokens are known
  size_t resume = 0;  // the last resume point among them; 0 if there is none
  // Another conversation continues differently after the known tokens.
  bool parts = false;
  bool evicted = false;  // more was known once
  // Ascending: the blocks of full layers for [0, known); the last part may have
  // more.
  std::vector<PrefixPart> pages;
  PrefixPart at_resume;  // the blocks of the other layers there
};

// A page or a resume point, and where it ends.
struct PrefixEntry {
  size_t end = 0;
  PrefixPart part;
};

// Pages and points that were new to the index, each ascending.
struct PrefixNews {
  std::vector<PrefixEntry> pages;
  std::vector<PrefixEntry> points;
};

// Calls fn for each reference to a block.
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

// Holds references to the index's blocks, and gives them up when asked to.
class BlockHolder {
 public:
  virtual ~BlockHolder() = default;
  // Gives up blocks of `owner`, at least `bytes` of them if there are so many.
  // Adds the bytes that are freed by it to `freed`. Returns false if there is
  // nothing to give up. Called without locks of the index; see Reclaimer.
  virtual bool GiveUp(const BlockOwner* owner, size_t bytes, size_t& freed) = 0;
};

struct PrefixIndexStats {
  size_t bytes = 0;   // of heap blocks
  size_t pinned = 0;  // pinned bytes of these
  size_t pages = 0;
  size_t resume_points = 0;
  uint64_t published = 0;  // pages and resume points that were new
  uint64_t evictions = 0;  // of either
};

// The RAM tier: trees of pages and resume points by tokens, which refer to
// blocks that conversations filled. docs/internals/prefix-cache.md says what is
// kept.
//
// There is a tree for each root, which stands for a model, a layout and a
// tenant. A page is a child of the page before it, and a resume point hangs on
// the last page before it. Publish and Add insert pages and points, Match walks
// down the pages that are equal to the tokens. queue_ has the leaves that are
// not pinned, ordered by worth (GreedyDual-Size-Frequency); an entry that is
// used moves back in it. Evict takes a leaf out of its tree, and its parent
// enters the queue if that is a leaf now. KeepBudget evicts the entries of
// least worth until the bytes are within the budget; Reclaim and GiveUp evict
// for a full pool. references_ counts, for each block, how many entries refer
// to it: a block that several entries share is counted in bytes once.
//
// Thread-safe: mutex_ guards all of this. While it is held no block is acquired
// and no last reference to a block is destroyed: what is evicted is destroyed
// after the unlock.
class PrefixIndex : public std::enable_shared_from_this<PrefixIndex> {
 public:
  static std::shared_ptr<PrefixIndex> Create(size_t budget_bytes);
  ~PrefixIndex();
  PrefixIndex(const PrefixIndex&) = delete;

  size_t budget_bytes() const { return budget_bytes_; }

  // Returns the last resume point up to `limit`, and how many tokens before
  // `limit` are known. Requires: limit <= tokens.size().
  PrefixMatch Match(const Address& root, std::span<const int32_t> tokens,
                    size_t limit);
  // Adds the whole pages of [0, content.computed) that are new, and the points,
  // which Commit or CheckpointGroups returned. `tokens` are those of the
  // content; `seconds` is the time to compute one of them; `pool` is that of
  // the content. What was new is added to `news`, if there is one. With `pin`,
  // all of it stays until Unpin of the number that `pin` is set to, or Clear.
  // Throws std::bad_alloc, and CacheFull if more bytes would be pinned than the
  // budget allows.
  void Publish(const Address& root, std::shared_ptr<const KvLayout> layout,
               const std::shared_ptr<BlockPool>& pool,
               std::span<const int32_t> tokens, const KvContent& content,
               std::span<const Checkpoint> points, double seconds,
               PrefixNews* news = nullptr, uint64_t* pin = nullptr);
  // Returns the bytes of heap blocks that a pin keeps, even if others keep them
  // too; 0 if the pin is over.
  size_t PinnedBytes(uint64_t pin) const;
  // Returns the bytes of blocks of `owner` that pins keep.
  size_t PinnedBytes(const BlockOwner* owner) const;
  // Ends a pin. Throws std::bad_alloc, changing nothing.
  void Unpin(uint64_t pin);
  // Adds what came from elsewhere, in blocks of `pool` or mapped ones:
  // consecutive pages, and resume points after them, as long as the pages
  // before are known. `tokens` are those up to the last of them. Throws
  // std::bad_alloc.
  void Add(const Address& root, const std::shared_ptr<BlockPool>& pool,
           std::span<const int32_t> tokens, const PrefixNews& found,
           double seconds);
  // Sets the holder that is asked when giving up entries does not free enough.
  void set_holder(std::weak_ptr<BlockHolder> holder) {
    const MutexLock lock(mutex_);
    holder_ = std::move(holder);
  }
  // Evicts the entries of least worth until `bytes` of blocks of `owner` are
  // freed, if there are so many blocks that nobody else refers to. Entries that
  // free nothing stay. Returns the bytes that are freed.
  size_t Reclaim(const BlockOwner* owner, size_t bytes);
  // Evicts everything that refers to blocks of `owner`, for a request that
  // would have to copy one of them in a full pool. Returns false if there is
  // nothing.
  bool GiveUp(const BlockOwner* owner);
  // Forgets a tree, pinned entries included; with a null pointer, all trees.
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
  // The entries of a pin: a page and all before it, and a point after it.
  struct Pinned {
    Address root;
    std::vector<Entry*> entries;
  };
  using Pins = std::map<uint64_t, Pinned>;
  // Collected while the lock is held, destroyed after it is released.
  using Victims = std::vector<std::unique_ptr<Entry>>;

  explicit PrefixIndex(size_t budget_bytes);
  Node* FindChild(Node* node, std::span<const int32_t> page,
                  uint64_t hash) const;
  void Insert(Entry* entry) REQUIRES(mutex_);
  void SetWorth(Entry* entry) REQUIRES(mutex_);
  void Touch(Entry* entry) REQUIRES(mutex_);
  std::unique_ptr<Entry> Remove(Entry* entry) REQUIRES(mutex_);
  void Evict(Entry* entry, Victims& victims) REQUIRES(mutex_);
  bool Frees(const Entry& entry, const BlockOwner* owner, size_t& bytes) const
      REQUIRES(mutex_);
  void Register(const std::shared_ptr<BlockPool>& pool);
  Node* GetTree(const Address& root) REQUIRES(mutex_);
  Node* FindPage(Node* node, std::span<const int32_t> page, uint64_t chain)
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
  // Leaves that are not pinned, by worth.
  std::set<Entry*, LessWorth> queue_ GUARDED_BY(mutex_);
  Pins pins_ GUARDED_BY(mutex_);
  uint64_t last_pin_ GUARDED_BY(mutex_) = 0;
  double worth_gone_ GUARDED_BY(mutex_) = 0;  // of what was evicted last
  // Hashes of evicted pages.
  std::unordered_set<uint64_t> ghosts_ GUARDED_BY(mutex_);
  std::map<const BlockPool*, std::shared_ptr<PoolReclaimer>> reclaimers_
      GUARDED_BY(mutex_);
  PrefixIndexStats stats_ GUARDED_BY(mutex_);
  std::weak_ptr<BlockHolder> holder_ GUARDED_BY(mutex_);
};

}  // namespace gkv

#endif  // GEMMAKV_STORE_PREFIX_INDEX_H_
