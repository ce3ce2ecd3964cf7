#include "store/prefix_index.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "base/bytes.h"
#include "base/error.h"
#include "base/hash.h"

namespace gkv {
namespace {

// Bytes of an entry besides its blocks and token ids.
constexpr size_t kEntryBytes = 256;
// The most evicted pages that are remembered, as hashes.
constexpr size_t kMaxGhosts = 1 << 14;

size_t CommonPrefix(std::span<const int32_t> a, std::span<const int32_t> b) {
  const size_t size = std::min(a.size(), b.size());
  const auto end = a.begin() + static_cast<ptrdiff_t>(size);
  return static_cast<size_t>(std::mismatch(a.begin(), end, b.begin()).first -
                             a.begin());
}

template <typename Entry>
size_t OwnBytes(const Entry& entry) {
  return kEntryBytes + entry.tokens.size() * sizeof(int32_t);
}

uint64_t ChainHash(uint64_t parent, std::span<const int32_t> page) {
  return HashBytes(AsBytes(page), parent).low;
}

}  // namespace

// A page or a resume point: what may be evicted.
struct PrefixIndex::Entry {
  virtual ~Entry() = default;
  virtual bool is_page() const = 0;
  virtual bool leaf() const = 0;  // nothing hangs on it
  // Takes the entry out of its tree.
  virtual std::unique_ptr<Entry> TakeOut() = 0;

  Node* parent = nullptr;  // of a point: the last page before it
  std::vector<int32_t> tokens;
  std::shared_ptr<const KvLayout> layout;
  HeldSet held;
  size_t bytes = 0;    // counted when it was added
  double seconds = 0;  // to compute it again
  uint32_t uses = 0;
  double worth = 0;
  size_t pins = 0;
};

// `tokens` lie between the last page before the point and its position.
struct PrefixIndex::Point final : Entry {
  bool is_page() const override { return false; }
  bool leaf() const override { return true; }
  std::unique_ptr<Entry> TakeOut() override;

  size_t position = 0;
};

struct PrefixIndex::Node final : Entry {
  bool is_page() const override { return true; }
  std::unique_ptr<Entry> TakeOut() override;
  bool leaf() const override { return children.empty() && points.empty(); }

  size_t end = 0;           // the position after the page
  uint64_t chain = 0;       // hash of all pages up to this
  bool lost_point = false;  // a point here was evicted
  // By their chain hash.
  std::unordered_multimap<uint64_t, std::unique_ptr<Node>> children;
  std::vector<std::unique_ptr<Point>> points;
};

std::unique_ptr<PrefixIndex::Entry> PrefixIndex::Point::TakeOut() {
  auto& points = parent->points;
  const auto at =
      std::find_if(points.begin(), points.end(),
                   [&](const auto& point) { return point.get() == this; });
  std::unique_ptr<Entry> self = std::move(*at);
  points.erase(at);
  return self;
}

std::unique_ptr<PrefixIndex::Entry> PrefixIndex::Node::TakeOut() {
  auto [at, last] = parent->children.equal_range(chain);
  while (at->second.get() != this) ++at;
  std::unique_ptr<Entry> self = std::move(at->second);
  parent->children.erase(at);
  return self;
}

bool PrefixIndex::LessWorth::operator()(const Entry* a, const Entry* b) const {
  return std::tie(a->worth, a) < std::tie(b->worth, b);
}

// Reclaims blocks of one pool from the index as long as both exist.
class PrefixIndex::PoolReclaimer final : public Reclaimer {
 public:
  PoolReclaimer(std::weak_ptr<PrefixIndex> index, std::weak_ptr<BlockPool> pool)
      : index_(std::move(index)), pool_(std::move(pool)) {}
  bool expired() const { return pool_.expired(); }
  size_t Reclaim(size_t bytes) override {
    const std::shared_ptr<PrefixIndex> index = index_.lock();
    const std::shared_ptr<BlockPool> pool = pool_.lock();
    return index && pool ? index->Reclaim(pool.get(), bytes) : 0;
  }
  size_t KeptBytes() override {
    const std::shared_ptr<PrefixIndex> index = index_.lock();
    const std::shared_ptr<BlockPool> pool = pool_.lock();
    return index && pool ? index->PinnedBytes(pool.get()) : 0;
  }

 private:
  const std::weak_ptr<PrefixIndex> index_;
  const std::weak_ptr<BlockPool> pool_;
};

std::shared_ptr<PrefixIndex> PrefixIndex::Create(size_t budget_bytes) {
  return std::shared_ptr<PrefixIndex>(new PrefixIndex(budget_bytes));
}

PrefixIndex::PrefixIndex(size_t budget_bytes) : budget_bytes_(budget_bytes) {}

PrefixIndex::~PrefixIndex() { Clear(nullptr); }

PrefixIndex::Node* PrefixIndex::FindChild(Node* node,
                                          std::span<const int32_t> page,
                                          uint64_t hash) const {
  const auto [first, last] = node->children.equal_range(hash);
  for (auto at = first; at != last; ++at) {
    if (std::equal(page.begin(), page.end(), at->second->tokens.begin())) {
      return at->second.get();
    }
  }
  return nullptr;
}

PrefixMatch PrefixIndex::Match(const Address& root,
                               std::span<const int32_t> tokens, size_t limit) {
  PrefixMatch match;
  const MutexLock lock(mutex_);
  const auto tree = trees_.find(root);
  if (tree == trees_.end()) return match;
  Node* node = tree->second.get();
  Point* best = nullptr;
  while (true) {
    const std::span rest = tokens.subspan(node->end);
    const Entry* longest = nullptr;  // of the entries that are known in part
    size_t common = 0;
    const auto offer = [&](const Entry& entry) {
      const size_t with = CommonPrefix(entry.tokens, rest);
      if (with <= common && longest != nullptr) return;
      common = with;
      longest = &entry;
    };
    for (const auto& point : node->points) {
      offer(*point);
      if (point->position <= limit &&
          (best == nullptr || point->position > best->position) &&
          CommonPrefix(point->tokens, rest) == point->tokens.size()) {
        best = point.get();
      }
    }
    Node* next = nullptr;
    if (rest.size() >= kPageTokens) {
      const std::span page = rest.first(kPageTokens);
      const uint64_t chain = ChainHash(node->chain, page);
      next = FindChild(node, page, chain);
      match.evicted |= next == nullptr && ghosts_.contains(chain);
    }
    match.evicted |= node->lost_point;
    if (next == nullptr || next->end > limit) {
      for (const auto& [hash, child] : node->children) offer(*child);
      const size_t known = node->end + common;
      match.known = std::min(known, limit);
      match.parts = longest != nullptr && known < limit &&
                    common < longest->tokens.size();
      if (longest != nullptr && match.known > node->end) {
        match.pages.push_back({longest->layout, longest->held});
      }
      break;
    }
    node = next;
    Touch(node);
    match.pages.push_back({node->layout, node->held});
  }
  if (best == nullptr) return match;
  Touch(best);
  match.resume = best->position;
  match.at_resume = {best->layout, best->held};
  return match;
}

void PrefixIndex::Publish(const Address& root,
                          std::shared_ptr<const KvLayout> layout,
                          const std::shared_ptr<BlockPool>& pool,
                          std::span<const int32_t> tokens,
                          const KvContent& content,
                          std::span<const Checkpoint> points, double seconds,
                          PrefixNews* news, uint64_t* pin) {
  HeldSet full(content.groups.size());
  for (size_t g = 0; g < full.size(); ++g) {
    if (!content.groups[g]->forgets()) {
      full[g] = content.groups[g]->Export(content.computed);
    }
  }
  Register(pool);
  Victims victims;  // destroyed after the unlock
  const MutexLock lock(mutex_);
  Node* node = GetTree(root);
  // Points hang on the pages before them, so pages come first.
  for (const Checkpoint& point : points) {
    AddPages(node, tokens.first(point.position), layout, full, seconds, news);
    PrefixPart part{layout, HeldSet(full.size())};
    for (size_t g = 0; g < full.size(); ++g) {
      if ((*point.groups)[g]) {
        part.held[g] = (*point.groups)[g]->Export(point.position);
        continue;
      }
      for (const HeldBlock& held : full[g]) {
        if (held.begin < node->end || held.begin >= point.position) continue;
        part.held[g].push_back(held);
        part.held[g].back().end = std::min(held.end, point.position);
      }
    }
    if (news != nullptr) news->points.push_back({point.position, part});
    if (!AddPoint(node, tokens, point.position, std::move(part), seconds) &&
        news != nullptr) {
      news->points.pop_back();
    }
  }
  tokens = tokens.first(content.computed);
  AddPages(node, tokens, layout, full, seconds, news);
  if (pin != nullptr) *pin = PinAt(root, node, tokens, victims);
  KeepBudget(victims);
}

// Pins the point after `node`, which is the last whole page of the tokens, and
// all pages up to it.
uint64_t PrefixIndex::PinAt(const Address& root, Node* node,
                            std::span<const int32_t> tokens, Victims& victims) {
  Pinned pinned{root, {}};
  for (const auto& point : node->points) {
    if (point->position == tokens.size() &&
        std::equal(point->tokens.begin(), point->tokens.end(),
                   tokens.begin() + static_cast<ptrdiff_t>(node->end))) {
      pinned.entries.push_back(point.get());
    }
  }
  for (Entry* at = node; at->parent != nullptr; at = at->parent) {
    pinned.entries.push_back(at);
  }
  const uint64_t number = ++last_pin_;
  const auto pin = pins_.emplace(number, std::move(pinned)).first;
  for (Entry* entry : pin->second.entries) {
    if (entry->pins++ == 0) queue_.erase(entry);
  }
  const size_t all = PinnedBytesLocked(nullptr);
  if (all <= budget_bytes_) return number;
  const size_t bytes = BytesOf(pin->second.entries, nullptr);
  Unpin(pin);
  KeepBudget(victims);
  throw CacheFull(StrCat(
      "pin: the prompt takes ", bytes, " bytes, with what is pinned already ",
      all, ", expected at most ", budget_bytes_,
      " (unpin another, or use a prefix cache with more ram)"));
}

void PrefixIndex::Unpin(uint64_t pin) {
  const MutexLock lock(mutex_);
  const auto found = pins_.find(pin);
  if (found != pins_.end()) Unpin(found);
}

void PrefixIndex::Unpin(Pins::iterator pin) {
  const auto& entries = pin->second.entries;
  const auto goes = [](const Entry* entry) {
    return entry->pins == 1 && entry->leaf();
  };
  try {
    for (Entry* entry : entries) {
      if (goes(entry)) {
        SetWorth(entry);
        queue_.insert(entry);
      }
    }
  } catch (const std::bad_alloc&) {
    for (Entry* entry : entries) queue_.erase(entry);
    throw;
  }
  for (Entry* entry : entries) --entry->pins;
  pins_.erase(pin);
}

size_t PrefixIndex::PinnedBytes(uint64_t pin) const {
  const MutexLock lock(mutex_);
  const auto found = pins_.find(pin);
  return found == pins_.end() ? 0 : BytesOf(found->second.entries, nullptr);
}

size_t PrefixIndex::PinnedBytes(const BlockOwner* owner) const {
  const MutexLock lock(mutex_);
  return PinnedBytesLocked(owner);
}

size_t PrefixIndex::PinnedBytesLocked(const BlockOwner* owner) const {
  std::vector<Entry*> entries;
  for (const auto& [number, pin] : pins_) {
    entries.insert(entries.end(), pin.entries.begin(), pin.entries.end());
  }
  std::sort(entries.begin(), entries.end());
  entries.erase(std::unique(entries.begin(), entries.end()), entries.end());
  return BytesOf(entries, owner);
}

// Returns the bytes of different entries: of blocks of one owner, or of
// everything that the index counts for them.
size_t PrefixIndex::BytesOf(std::span<Entry* const> entries,
                            const BlockOwner* owner) {
  std::unordered_set<const Block*> blocks;
  size_t bytes = 0;
  for (const Entry* entry : entries) {
    if (owner == nullptr) bytes += OwnBytes(*entry);
    ForBlocks(entry->held, [&](const Block* block) {
      if (block->mapped || !blocks.insert(block).second) return;
      if (owner != nullptr && block->owner.get() != owner) return;
      bytes += block->size_bytes;
    });
  }
  return bytes;
}

void PrefixIndex::Add(const Address& root,
                      const std::shared_ptr<BlockPool>& pool,
                      std::span<const int32_t> tokens, const PrefixNews& found,
                      double seconds) {
  Register(pool);
  Victims victims;  // destroyed after the unlock
  const MutexLock lock(mutex_);
  Node* node = GetTree(root);
  auto next = found.pages.begin();
  const auto descend = [&](size_t end) REQUIRES(mutex_) {
    while (node->end + kPageTokens <= end) {
      const std::span page = tokens.subspan(node->end, kPageTokens);
      const uint64_t chain = ChainHash(node->chain, page);
      while (next != found.pages.end() && next->end <= node->end) ++next;
      Node* child = FindPage(node, page, chain);
      if (child == nullptr) {
        if (next == found.pages.end() || next->end != node->end + kPageTokens) {
          return false;  // the page before was evicted meanwhile
        }
        child = AddPage(node, page, chain, next->part, seconds);
      }
      node = child;
    }
    return true;
  };
  for (const PrefixEntry& point : found.points) {
    if (!descend(point.end)) break;
    AddPoint(node, tokens, point.end, point.part, seconds);
  }
  if (!found.pages.empty()) descend(found.pages.back().end);
  KeepBudget(victims);
}

PrefixIndex::Node* PrefixIndex::GetTree(const Address& root) {
  std::unique_ptr<Node>& tree = trees_[root];
  if (!tree) tree = std::make_unique<Node>();
  return tree.get();
}

void PrefixIndex::KeepBudget(Victims& victims) {
  while (stats_.bytes > budget_bytes_ && !queue_.empty()) {
    Evict(*queue_.begin(), victims);
  }
}

PrefixIndex::Node* PrefixIndex::FindPage(Node* node,
                                         std::span<const int32_t> page,
                                         uint64_t chain) {
  Node* const known = FindChild(node, page, chain);
  if (known != nullptr) Touch(known);
  return known;
}

PrefixIndex::Node* PrefixIndex::AddPage(Node* node,
                                        std::span<const int32_t> page,
                                        uint64_t chain, PrefixPart part,
                                        double seconds) {
  auto added = std::make_unique<Node>();
  added->parent = node;
  added->tokens.assign(page.begin(), page.end());
  added->layout = std::move(part.layout);
  added->held = std::move(part.held);
  added->end = node->end + kPageTokens;
  added->chain = chain;
  added->seconds = seconds * kPageTokens;
  Node* const child = added.get();
  node->children.emplace(chain, std::move(added));
  try {
    Insert(child);
  } catch (...) {
    child->TakeOut();
    throw;
  }
  ghosts_.erase(chain);
  ++stats_.pages;
  return child;
}

// Adds pages from `node` on, as long as there are whole ones.
void PrefixIndex::AddPages(Node*& node, std::span<const int32_t> tokens,
                           const std::shared_ptr<const KvLayout>& layout,
                           const HeldSet& full, double seconds,
                           PrefixNews* news) {
  const size_t blocks = kPageTokens / layout->block_tokens();
  while (tokens.size() - node->end >= kPageTokens) {
    const std::span page = tokens.subspan(node->end, kPageTokens);
    const uint64_t chain = ChainHash(node->chain, page);
    if (Node* known = FindPage(node, page, chain)) {
      node = known;
      continue;
    }
    PrefixPart part{layout, HeldSet(full.size())};
    for (size_t g = 0; g < full.size(); ++g) {
      if (full[g].empty()) continue;
      const size_t index = node->end / kPageTokens * blocks;
      const auto first = full[g].begin() + static_cast<ptrdiff_t>(index);
      part.held[g].assign(first, first + static_cast<ptrdiff_t>(blocks));
    }
    if (news != nullptr) {
      news->pages.push_back({node->end + kPageTokens, part});
    }
    node = AddPage(node, page, chain, std::move(part), seconds);
  }
}

// Adds a point. Returns false if that adds nothing.
bool PrefixIndex::AddPoint(Node* node, std::span<const int32_t> tokens,
                           size_t position, PrefixPart part, double seconds) {
  const std::span tail = tokens.subspan(node->end, position - node->end);
  size_t before = 0;  // the point from which one would resume instead
  for (const auto& other : node->points) {
    if (other->tokens.size() > tail.size() ||
        CommonPrefix(other->tokens, tail) < other->tokens.size()) {
      continue;
    }
    before = std::max(before, other->position);
    if (other->position == position) {
      Touch(other.get());
      return false;
    }
  }
  for (const Node* at = static_cast<Node*>(node->parent);
       at != nullptr && before == 0; at = static_cast<Node*>(at->parent)) {
    for (const auto& other : at->points) {
      const std::span behind = tokens.subspan(at->end, other->tokens.size());
      if (std::equal(behind.begin(), behind.end(), other->tokens.begin())) {
        before = std::max(before, other->position);
      }
    }
  }
  auto added = std::make_unique<Point>();
  added->parent = node;
  added->position = position;
  added->tokens.assign(tail.begin(), tail.end());
  added->layout = std::move(part.layout);
  added->held = std::move(part.held);
  added->seconds = seconds * static_cast<double>(position - before);
  bool empty = true;
  ForBlocks(added->held, [&](const Block*) { empty = false; });
  if (empty) return false;  // the pages before it have everything
  Point* const entry = added.get();
  node->points.push_back(std::move(added));
  try {
    Insert(entry);
  } catch (...) {
    entry->TakeOut();
    throw;
  }
  ++stats_.resume_points;
  return true;
}

// Counts the blocks of an entry that is in the tree. Throws std::bad_alloc; the
// caller takes the entry out again.
void PrefixIndex::Insert(Entry* entry) {
  size_t bytes = OwnBytes(*entry);
  size_t counted = 0;
  try {
    ForBlocks(entry->held, [&](const Block* block) REQUIRES(mutex_) {
      if (references_[block]++ == 0 && !block->mapped) {
        bytes += block->size_bytes;
      }
      ++counted;
    });
    entry->bytes = bytes;
    SetWorth(entry);
    queue_.insert(entry);
  } catch (...) {
    ForBlocks(entry->held, [&](const Block* block) REQUIRES(mutex_) {
      if (counted == 0) return;
      --counted;
      const auto found = references_.find(block);
      if (--found->second == 0) references_.erase(found);
    });
    throw;
  }
  ForBlocks(entry->held, [](const Block* block) {
    block->indexed.fetch_add(1, std::memory_order_relaxed);
  });
  stats_.bytes += bytes;
  ++stats_.published;
  // Its parent is not evicted before it.
  if (entry->parent->parent != nullptr) queue_.erase(entry->parent);
}

// Computes the worth of an entry: GreedyDual-Size-Frequency.
void PrefixIndex::SetWorth(Entry* entry) {
  ++entry->uses;
  entry->worth = worth_gone_ + entry->uses * entry->seconds /
                                   static_cast<double>(entry->bytes);
}

// Notes a use of the entry, which moves within the queue if it is there.
// Allocates nothing.
void PrefixIndex::Touch(Entry* entry) {
  auto place = queue_.extract(entry);
  SetWorth(entry);
  if (place) queue_.insert(std::move(place));
}

// Takes a leaf out of its tree. Its place in the queue goes to its parent if
// that is a leaf now; roots, which have no parent, stay. Only Clear removes an
// entry without a place, together with all that it hangs on. Allocates nothing
// that it needs.
std::unique_ptr<PrefixIndex::Entry> PrefixIndex::Remove(Entry* entry) {
  auto place = queue_.extract(entry);
  size_t bytes = OwnBytes(*entry);
  ForBlocks(entry->held, [&](const Block* block) REQUIRES(mutex_) {
    block->indexed.fetch_sub(1, std::memory_order_relaxed);
    const auto found = references_.find(block);
    if (--found->second > 0) return;
    references_.erase(found);
    if (!block->mapped) bytes += block->size_bytes;
  });
  stats_.bytes -= bytes;
  ++stats_.evictions;
  Node* const parent = entry->parent;
  std::unique_ptr<Entry> removed = entry->TakeOut();
  if (entry->is_page()) {
    --stats_.pages;
    try {
      if (ghosts_.size() == kMaxGhosts) ghosts_.clear();
      ghosts_.insert(static_cast<Node*>(entry)->chain);
    } catch (const std::bad_alloc&) {
      // Matches will not know that it was evicted.
    }
  } else {
    --stats_.resume_points;
    parent->lost_point = true;
  }
  if (place && parent->parent != nullptr && parent->leaf() &&
      parent->pins == 0) {
    place.value() = parent;
    queue_.insert(std::move(place));
  }
  return removed;
}

void PrefixIndex::Evict(Entry* entry, Victims& victims) {
  if (victims.size() == victims.capacity()) {
    victims.reserve(2 * victims.size() + 1);
  }
  worth_gone_ = std::max(worth_gone_, entry->worth);
  victims.push_back(Remove(entry));
}

// Whether the index alone holds a block of the entry. Sets `bytes` to what is
// freed when the entry is gone.
bool PrefixIndex::Frees(const Entry& entry, const BlockOwner* owner,
                        size_t& bytes) const {
  std::map<const Block*, uint32_t> mine;
  ForBlocks(entry.held, [&](const Block* block) { ++mine[block]; });
  bool alone = false;
  bytes = 0;
  for (const auto& [block, count] : mine) {
    if (block->owner.get() != owner) continue;
    const uint32_t indexed = references_.at(block);
    if (block->refs.load() != indexed) continue;
    alone = true;
    if (indexed == count) bytes += block->size_bytes;
  }
  return alone;
}

// Blocks that the holder refers to as well are freed only when it gives them
// up.
size_t PrefixIndex::Reclaim(const BlockOwner* owner, size_t bytes) {
  size_t freed = ReclaimEntries(owner, bytes);
  if (freed >= bytes) return freed;
  const std::shared_ptr<BlockHolder> other = holder();
  while (other && freed < bytes && other->GiveUp(owner, bytes - freed, freed)) {
    if (freed < bytes) freed += ReclaimEntries(owner, bytes - freed);
  }
  return freed;
}

size_t PrefixIndex::ReclaimEntries(const BlockOwner* owner, size_t bytes) {
  Victims victims;
  size_t freed = 0;
  const MutexLock lock(mutex_);
  bool found = true;
  while (freed < bytes && found) {
    found = false;
    for (auto at = queue_.begin(); at != queue_.end() && freed < bytes;) {
      Entry* const entry = *at++;
      size_t frees = 0;
      if (!Frees(*entry, owner, frees)) continue;
      freed += frees;
      Evict(entry, victims);
      found = true;  // its parent may follow
    }
  }
  return freed;
}

bool PrefixIndex::GiveUp(const BlockOwner* owner) {
  size_t freed = 0;
  const std::shared_ptr<BlockHolder> other = holder();
  const bool held =
      other && other->GiveUp(owner, std::numeric_limits<size_t>::max(), freed);
  Victims victims;
  const MutexLock lock(mutex_);
  const auto holds = [&](const Entry& entry) {
    bool any = false;
    ForBlocks(entry.held, [&](const Block* block) {
      any = any || block->owner.get() == owner;
    });
    return any;
  };
  for (bool found = true; found;) {
    found = false;
    for (auto at = queue_.begin(); at != queue_.end();) {
      Entry* const entry = *at++;
      if (!holds(*entry)) continue;
      Evict(entry, victims);
      found = true;
    }
  }
  return held || !victims.empty();
}

void PrefixIndex::Clear(const Address* root) {
  std::map<Address, std::unique_ptr<Node>> trees;
  Victims victims;
  const MutexLock lock(mutex_);
  std::erase_if(pins_, [&](const auto& pin) {
    return root == nullptr || pin.second.root == *root;
  });
  for (auto at = trees_.begin(); at != trees_.end();) {
    if (root != nullptr && at->first != *root) {
      ++at;
      continue;
    }
    std::vector<Node*> nodes{at->second.get()};
    for (size_t i = 0; i < nodes.size(); ++i) {
      for (const auto& [hash, child] : nodes[i]->children) {
        nodes.push_back(child.get());
      }
    }
    for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
      while (!(*node)->points.empty()) {
        Evict((*node)->points.back().get(), victims);
      }
      if ((*node)->parent != nullptr) Evict(*node, victims);
    }
    trees.insert(trees_.extract(at++));
  }
}

void PrefixIndex::Register(const std::shared_ptr<BlockPool>& pool) {
  std::shared_ptr<PoolReclaimer> added;
  {
    const MutexLock lock(mutex_);
    std::erase_if(reclaimers_,
                  [](const auto& entry) { return entry.second->expired(); });
    std::shared_ptr<PoolReclaimer>& reclaimer = reclaimers_[pool.get()];
    if (reclaimer) return;
    added = reclaimer = std::make_shared<PoolReclaimer>(weak_from_this(), pool);
  }
  pool->AddReclaimer(added);
}

PrefixIndexStats PrefixIndex::stats() const {
  const MutexLock lock(mutex_);
  PrefixIndexStats stats = stats_;
  stats.pinned = PinnedBytesLocked(nullptr);
  return stats;
}

}  // namespace gkv
