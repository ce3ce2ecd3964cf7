#include "store/prefix_cache.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/worker.h"

namespace gkv {
namespace {

// By PrefixTier.
constexpr std::string_view kTierNames[kPrefixTiers] = {"ram", "shared", "disk",
                                                       "remote"};

// Fewer positions are not worth taking over: a step computes them in no time.
constexpr size_t kWorthTaking = 16;

// Appends blocks that a cache of `layout` on `pool` may refer to: the blocks of
// `part` themselves, or copies.
void Append(const PrefixPart& part, const KvLayout& layout,
            const std::shared_ptr<BlockPool>& pool, size_t group, size_t end,
            std::vector<HeldBlock>& out) {
  std::vector<HeldBlock> held;
  bool usable = part.layout->block_tokens() == layout.block_tokens();
  for (const HeldBlock& block : part.held[group]) {
    if (block.begin >= end && block.begin != block.end) break;
    held.push_back(block);
    held.back().end = std::min(held.back().end, end);
    usable = usable &&
             (block.block.get()->mapped || block.block.get()->owner == pool);
  }
  if (!usable) held = CopyHeld(*part.layout, held, layout, group, *pool);
  std::move(held.begin(), held.end(), std::back_inserter(out));
}

// Adds what was fetched to a match, if it begins within the known tokens and
// reaches the match's resume point at least.
void AddFetched(PrefixNews fetched, PrefixMatch& match) {
  const bool has_point = !fetched.points.empty();
  if (!has_point && fetched.pages.empty()) return;
  const size_t end =
      has_point ? fetched.points[0].end : fetched.pages.back().end;
  const size_t begin = fetched.pages.empty()
                           ? end / kPageTokens * kPageTokens
                           : fetched.pages.front().end - kPageTokens;
  if (end < match.resume || match.known < begin) return;
  if (match.known < end) {
    match.pages.resize(begin / kPageTokens);
    for (const PrefixEntry& page : fetched.pages) {
      match.pages.push_back(page.part);
    }
    if (has_point) match.pages.push_back(fetched.points[0].part);
    match.known = end;
    match.parts = false;
  }
  // Even if the index has it by now, it came from a tier below.
  const auto mark = [&](size_t page, PrefixTier tier) {
    if (page < match.pages.size()) match.pages[page].tier = tier;
  };
  for (const PrefixEntry& page : fetched.pages) {
    mark(page.end / kPageTokens - 1, page.part.tier);
  }
  if (end % kPageTokens != 0) {
    mark(end / kPageTokens, fetched.points[0].part.tier);
  }
  if (!has_point) return;
  match.resume = end;
  match.at_resume = std::move(fetched.points[0].part);
}

}  // namespace

PrefixCache::PrefixCache(size_t ram_bytes, PrefixTiers tiers,
                         const PrefixTierOptions& options)
    : index_(PrefixIndex::Create(ram_bytes)), tiers_(std::move(tiers)) {
  for (const auto& tier : tiers_) {
    const auto name =
        std::find(std::begin(kTierNames), std::end(kTierNames), tier->tier());
    const auto which = static_cast<PrefixTier>(name - std::begin(kTierNames));
    if (name == std::end(kTierNames) || which == PrefixTier::kRam) {
      throw InvalidArgument(StrCat("a tier of the prefix cache is '",
                                   tier->tier(),
                                   "', expected shared, disk or remote"));
    }
    if (std::find(names_.begin(), names_.end(), which) != names_.end()) {
      throw InvalidArgument(StrCat("the prefix cache has two tiers '",
                                   tier->tier(), "', expected one"));
    }
    names_.push_back(which);
  }
  if (tiers_.empty()) return;
  transfer_ = std::make_shared<Transfer>(index_, tiers_, names_, options);
  index_->set_holder(transfer_);
}

void PrefixCache::Count(size_t prompt_tokens, const PrefixHit& hit) {
  const MutexLock lock(mutex_);
  ++stats_.requests;
  stats_.prompt_tokens += prompt_tokens;
  stats_.tokens.ram += hit.ram;
  stats_.tokens.shared += hit.shared;
  stats_.tokens.disk += hit.disk;
  stats_.tokens.remote += hit.remote;
  ++stats_.misses[static_cast<size_t>(hit.miss)];
}

PrefixStats PrefixCache::stats() const {
  PrefixStats stats;
  {
    const MutexLock lock(mutex_);
    stats = stats_;
  }
  stats.ram = index_->stats();
  if (!has_tiers()) return stats;
  stats.writer = transfer_->writer->stats();
  stats.loader = transfer_->loader->stats();
  for (size_t t = 0; t < tiers_.size(); ++t) {
    stats.tiers.push_back(
        {names_[t], tiers_[t]->stats(), stats.loader.tiers[t]});
  }
  return stats;
}

bool PrefixCache::Flush(std::chrono::nanoseconds time_out) {
  return !has_tiers() ||
         transfer_->writer->Flush(PrefixWriter::Clock::now() + time_out);
}

// Throws in a child of fork(), where locks of tiers may be held for ever.
void PrefixCache::CheckTiers() const {
  if (!process_.InChild()) return;
  throw Error(
      "prefix cache: the process that was forked has its tiers; expected a "
      "prefix cache that this process made");
}

// Tiers that are being cleared, each on a thread of its own, which is left
// alone if the tier does not answer.
class PrefixCache::Clearing {
 public:
  explicit Clearing(size_t tiers) : results_(tiers) {}

  // Begins to clear a tier. If too many threads are stuck in tiers that do not
  // answer, there is no answer, and no wait for it.
  static void Begin(const std::shared_ptr<Clearing>& self, size_t tier,
                    std::shared_ptr<BlockStore> store,
                    const std::shared_ptr<std::atomic<size_t>>& running) {
    const bool full = running->fetch_add(1) >= kMostClearing;
    std::shared_ptr<void> place(nullptr, [running](void*) { --*running; });
    if (full) return;
    const MutexLock lock(self->mutex_);
    try {
      RunElsewhere([self, tier, store = std::move(store),
                     place = std::move(place)]() mutable {
        const Cleared result = store->Clear(nullptr);
        store.reset();
        place.reset();
        const MutexLock lock(self->mutex_);
        self->results_[tier] = result;
        --self->pending_;
        self->changed_.NotifyAll();
      });
      ++self->pending_;
    } catch (const std::exception&) {
      self->results_[tier] = Cleared::kFailed;
    }
  }

  // Returns the results by tier; none for a tier that has not answered.
  std::vector<std::optional<Cleared>> Wait(Clock::time_point until) {
    MutexLock lock(mutex_);
    while (pending_ != 0 && changed_.WaitUntil(lock, until)) {
    }
    return results_;
  }

 private:
  static constexpr size_t kMostClearing = 16;

  Mutex mutex_{AtFork::kLeaves};
  Condition changed_{mutex_};
  size_t pending_ GUARDED_BY(mutex_) = 0;
  std::vector<std::optional<Cleared>> results_ GUARDED_BY(mutex_);
};

void PrefixCache::Clear(std::chrono::nanoseconds time_out) {
  const Clock::time_point until = Clock::now() + time_out;
  if (transfer_) CheckTiers();
  index_->Clear(nullptr);
  if (!transfer_) return;
  const bool dropped = transfer_->writer->Drop(until);
  ClearTiers(names_, until);
  if (dropped) return;
  throw Error(
      "prefix cache: not all is cleared: a write that was under way has not "
      "ended in time, and may still end");
}

void PrefixCache::Clear(PrefixTier tier, std::chrono::nanoseconds time_out) {
  if (tier == PrefixTier::kRam) return index_->Clear(nullptr);
  if (std::find(names_.begin(), names_.end(), tier) == names_.end()) {
    throw InvalidArgument(StrCat("the prefix cache has no tier '",
                                 kTierNames[static_cast<size_t>(tier)], "'"));
  }
  CheckTiers();
  ClearTiers(std::span(&tier, 1), Clock::now() + time_out);
}

void PrefixCache::ClearTiers(std::span<const PrefixTier> names,
                             Clock::time_point until) {
  const auto clearing = std::make_shared<Clearing>(names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    const auto at = std::find(names_.begin(), names_.end(), names[i]);
    Clearing::Begin(clearing, i,
                    tiers_[static_cast<size_t>(at - names_.begin())],
                    clearing_);
  }
  const std::vector<std::optional<Cleared>> results = clearing->Wait(until);
  std::string left;
  for (size_t i = 0; i < names.size(); ++i) {
    if (results[i] == Cleared::kAll) continue;
    std::string_view why = " failed";
    if (!results[i]) {
      why = " has not answered in time, and may go on with it";
    } else if (*results[i] == Cleared::kUnable) {
      why = " cannot: its client has no delete_some";
    }
    left += StrCat(left.empty() ? "" : "; ",
                   kTierNames[static_cast<size_t>(names[i])], why);
  }
  if (left.empty()) return;
  throw Error(StrCat("prefix cache: not all is cleared: ", left));
}

uint64_t PrefixCache::RemoveBranch(const ObjectBranch& branch) {
  if (transfer_) CheckTiers();
  Flush();
  uint64_t removed = 0;
  for (const auto& tier : tiers_) removed += tier->RemoveBranch(branch);
  return removed;
}

uint64_t PrefixCache::Close(std::chrono::nanoseconds time_out) {
  if (!transfer_) return 0;
  const PrefixWriter::Clock::time_point until =
      PrefixWriter::Clock::now() + time_out;
  transfer_->loader->Close(until);
  return transfer_->writer->Close(until);
}

PrefixView::PrefixView(std::shared_ptr<PrefixCache> cache,
                       const Hash128& fingerprint,
                       std::span<const uint8_t> salt,
                       std::vector<int32_t> turn_ends)
    : cache_(std::move(cache)),
      id_{fingerprint, SaltDigest(salt)},
      turn_ends_(std::move(turn_ends)) {}

PrefixOffer PrefixView::Find(const Conversation& cache,
                             std::span<const int32_t> tokens, size_t limit,
                             PrefixFetch* fetch) const {
  PrefixOffer offer;
  // Another arithmetic gives other bits: the cache may come from other kernels.
  if (cache.fingerprint() != id_.fingerprint) return offer;
  offer.match = cache_->index().Match(Root(cache.layout()), tokens, limit);
  if (fetch != nullptr) AddFetched(fetch->Take(), offer.match);
  const PrefixMatch& match = offer.match;
  for (const PrefixPart& part : match.pages) offer.found.push_back(part.tier);
  // Where a warm-up for the position after the known ones would begin.
  size_t warm_up = match.known;
  bool keeps_all = false;
  bool forgets = false;
  for (const auto& group : MakeGroups(cache.layout_ptr(), cache.pool_ptr())) {
    keeps_all = keeps_all || !group->forgets();
    forgets = forgets || group->forgets();
    if (group->forgets()) warm_up = group->ColdStart(warm_up);
  }
  if (!keeps_all) warm_up = 0;
  offer.start = std::max(match.resume, warm_up);
  offer.computed = warm_up > match.resume ? match.known : match.resume;
  const size_t own = cache.next_position_for_logits();
  if (offer.start < own + kWorthTaking) {
    offer.cheaper = offer.start > own;
    offer.start = 0;
  }
  return offer;
}

bool PrefixView::Take(Conversation& cache, const RunLock& lock,
                      const PrefixOffer& offer) const {
  try {
    KvContent content = cache.Export();
    const KvLayout& layout = cache.layout();
    GroupSet groups = MakeGroups(cache.layout_ptr(), cache.pool_ptr());
    const bool at_resume = offer.start == offer.match.resume;
    for (size_t g = 0; g < groups.size(); ++g) {
      std::vector<HeldBlock> held;
      if (!groups[g]->forgets()) {
        if (content.computed >= offer.computed) {
          groups[g] = std::move(content.groups[g]);
          continue;
        }
        for (const PrefixPart& part : offer.match.pages) {
          Append(part, layout, cache.pool_ptr(), g, offer.computed, held);
        }
      } else if (at_resume) {
        Append(offer.match.at_resume, layout, cache.pool_ptr(), g, offer.start,
               held);
      }
      groups[g]->Adopt(std::move(held));
    }
    content.groups = std::move(groups);
    content.computed = std::max(content.computed, offer.computed);
    cache.Adopt(lock, std::move(content));
    return true;
  } catch (const CacheFull&) {
  } catch (const std::bad_alloc&) {
  }
  return false;
}

std::shared_ptr<PrefixFetch> PrefixView::Fetch(
    const Conversation& cache, std::span<const int32_t> tokens, size_t limit,
    std::span<const size_t> boundaries, std::function<void()> on_done) const {
  PrefixLoader* const loader = cache_->loader();
  if (loader == nullptr || cache.fingerprint() != id_.fingerprint) {
    return nullptr;
  }
  const PrefixOffer known = Find(cache, tokens, limit);
  const size_t start = std::max(known.start, cache.next_position_for_logits());
  if (limit < start + kWorthTaking) return nullptr;
  return loader->Fetch({id_,
                        cache.layout_ptr(),
                        cache.pool_ptr(),
                        {tokens.begin(), tokens.end()},
                        limit,
                        turn_ends_,
                        {boundaries.begin(), boundaries.end()},
                        start,
                        seconds_per_token_,
                        std::move(on_done)});
}

PrefixHit PrefixView::HitOf(const PrefixOffer& offer, size_t begin,
                            size_t end) {
  PrefixHit hit;
  for (size_t p = begin; p < end;) {
    const size_t page = p / kPageTokens;
    const size_t next = std::min(end, (page + 1) * kPageTokens);
    const bool paged = page < offer.found.size();
    hit.of(paged ? offer.found[page] : PrefixTier::kRam) += next - p;
    p = next;
  }
  return hit;
}

PrefixMiss PrefixView::MissOf(const PrefixOffer& offer, size_t limit) {
  const PrefixMatch& match = offer.match;
  if (offer.cheaper) return PrefixMiss::kCheaper;
  if (match.known >= limit) return PrefixMiss::kNoResumePoint;
  return match.evicted ? PrefixMiss::kEvicted : PrefixMiss::kDivergent;
}

void PrefixView::Publish(const Conversation& cache,
                         std::span<const Checkpoint> points, bool at_end,
                         size_t ram_only) const noexcept {
  try {
    TakeIn(cache, points, at_end, ram_only, nullptr);
  } catch (const std::bad_alloc&) {
    // It will be computed again.
  }
}

uint64_t PrefixView::Pin(const Conversation& cache) const {
  uint64_t pin = 0;
  TakeIn(cache, {}, true, 0, &pin);
  if (pin == 0) {
    throw Mismatch(
        "pin: the conversation was computed with other weights or kernels, "
        "expected those of this model");
  }
  return pin;
}

void PrefixView::TakeIn(const Conversation& cache,
                        std::span<const Checkpoint> points, bool at_end,
                        size_t ram_only, uint64_t* pin) const {
  const KvContent content = cache.Export();
  if (content.fingerprint != id_.fingerprint) return;
  std::vector<Checkpoint> all(points.begin(), points.end());
  const size_t end = content.computed;
  if (at_end && end > 0) {
    auto groups = CheckpointGroups(content.groups, end);
    if (groups) all.push_back({end, end, std::move(groups)});
  }
  std::vector<int32_t> tokens(end);
  content.log.Copy(0, tokens);
  PrefixWriter* const writer = cache_->writer();
  PrefixNews news;
  cache_->index().Publish(Root(cache.layout()), cache.layout_ptr(),
                          cache.pool_ptr(), tokens, content, all,
                          seconds_per_token_, writer ? &news : nullptr, pin);
  if (writer == nullptr) return;
  std::erase_if(news.points, [&](const PrefixEntry& point) {
    return point.end == ram_only;
  });
  try {
    writer->Write(
        {id_, cache.layout_ptr(), std::move(tokens), std::move(news)});
  } catch (const std::bad_alloc&) {
    // It stays in RAM.
  } catch (const std::system_error&) {
    // There is no thread for the writer.
  }
}

std::vector<size_t> PrefixView::ChoosePoints(std::span<const int32_t> tokens,
                                             std::span<const size_t> boundaries,
                                             size_t begin) const {
  std::vector<size_t> points;
  for (const size_t boundary : boundaries) {
    if (boundary > begin && boundary < tokens.size()) {
      points.push_back(boundary);
    }
  }
  if (!tokens.empty()) {
    for (const size_t p :
         ResumeCandidates(tokens, turn_ends_, {}, tokens.size() - 1, 1)) {
      if (p > begin) points.push_back(p);
    }
  }
  std::sort(points.begin(), points.end());
  points.erase(std::unique(points.begin(), points.end()), points.end());
  return points;
}

void PrefixView::Clear(const KvLayout& layout) const {
  const Address root = Root(layout);
  cache_->index().Clear(&root);
}

uint64_t PrefixView::Remove(const KvLayout& layout,
                            std::span<const int32_t> tokens,
                            size_t shared) const {
  if (shared >= tokens.size()) return 0;
  const ObjectChain chain(id_, layout, tokens);
  const ObjectHead head = chain.ResumeHead(shared);
  ObjectBranch branch{id_.salt, head.parent, head.begin, {}, {}};
  const auto stem = tokens.subspan(head.begin, shared + 1 - head.begin);
  branch.tokens.assign(stem.begin(), stem.end());
  for (size_t page = shared / kPageTokens; page < tokens.size() / kPageTokens;
       ++page) {
    branch.pages.push_back(chain.PageKey(page).address);
  }
  return cache_->RemoveBranch(branch);
}

}  // namespace gkv
