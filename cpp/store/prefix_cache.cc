#include "store/prefix_cache.h"

#include <algorithm>
#include <new>
#include <optional>
#include <utility>

#include "base/error.h"

namespace gkv {
namespace {

// Fewer positions take a step no time.
constexpr size_t kWorthTaking = 16;

// Blocks that a cache of `layout` on `pool` may refer to, of what was kept in
// others: itself, or a copy.
void Append(const PrefixPart& part, const KvLayout& layout,
            const std::shared_ptr<BlockPool>& pool, size_t group, size_t end,
            std::vector<HeldBlock>& out) {
  std::vector<HeldBlock> held;
  bool usable = part.layout->block_tokens() == layout.block_tokens();
  for (const HeldBlock& block : part.held[group]) {
    if (block.begin >= end && block.begin != block.end) break;
    held.push_back(block);
    held.back().end = std::min(held.back().end, end);
    usable = usable && (block.block.get()->mapped ||
                        block.block.get()->owner == pool);
  }
  if (!usable) held = CopyHeld(*part.layout, held, layout, group, *pool);
  std::move(held.begin(), held.end(), std::back_inserter(out));
}

}  // namespace

void PrefixCache::Count(size_t prompt_tokens, const PrefixHit& hit) {
  const std::lock_guard lock(mutex_);
  ++stats_.requests;
  stats_.prompt_tokens += prompt_tokens;
  stats_.ram_tokens += hit.ram;
  ++stats_.misses[static_cast<size_t>(hit.miss)];
}

PrefixStats PrefixCache::stats() const {
  PrefixStats stats;
  {
    const std::lock_guard lock(mutex_);
    stats = stats_;
  }
  stats.ram = index_->stats();
  return stats;
}

PrefixView::PrefixView(std::shared_ptr<PrefixCache> cache,
                       const Hash128& fingerprint,
                       std::span<const uint8_t> salt,
                       std::vector<int32_t> turn_ends)
    : cache_(std::move(cache)),
      fingerprint_(fingerprint),
      salt_(SaltDigest(salt)),
      turn_ends_(std::move(turn_ends)) {}

PrefixOffer PrefixView::Find(const KVCache& cache,
                             std::span<const int32_t> tokens,
                             size_t limit) const {
  PrefixOffer offer;
  // Another arithmetic gives other bits: kernels may have changed to it.
  if (cache.fingerprint() != fingerprint_) return offer;
  offer.match = cache_->index().Match(Root(cache.layout()), tokens, limit);
  const PrefixMatch& match = offer.match;
  // Where a warm-up behind the last known position would begin.
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

bool PrefixView::Take(KVCache& cache, const RunLock& lock,
                      PrefixOffer offer) const {
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

PrefixMiss PrefixView::MissOf(const PrefixOffer& offer, size_t limit) {
  const PrefixMatch& match = offer.match;
  if (offer.cheaper) return PrefixMiss::kCheaper;
  if (match.known >= limit) return PrefixMiss::kNoResumePoint;
  return match.evicted ? PrefixMiss::kEvicted : PrefixMiss::kDivergent;
}

void PrefixView::Publish(const KVCache& cache,
                         std::span<const Checkpoint> points,
                         bool at_end) const noexcept {
  try {
    const KvContent content = cache.Export();
    if (content.fingerprint != fingerprint_) return;
    std::vector<Checkpoint> all(points.begin(), points.end());
    const size_t end = content.computed;
    if (at_end && end > 0) {
      auto groups = CheckpointGroups(content.groups, end);
      if (groups) all.push_back({end, end, std::move(groups)});
    }
    std::vector<int32_t> tokens(end);
    content.log.Copy(0, tokens);
    cache_->index().Publish(Root(cache.layout()), cache.layout_ptr(),
                            cache.pool_ptr(), tokens, content, all,
                            seconds_per_token_);
  } catch (const std::bad_alloc&) {
    // It will be computed again.
  }
}

std::vector<size_t> PrefixView::Points(std::span<const int32_t> tokens,
                                       std::span<const size_t> boundaries,
                                       size_t begin) const {
  std::vector<size_t> points;
  for (const size_t boundary : boundaries) {
    if (boundary > begin && boundary < tokens.size()) {
      points.push_back(boundary);
    }
  }
  if (!tokens.empty()) {
    for (const size_t p : ResumeCandidates(tokens, turn_ends_, {},
                                           tokens.size() - 1, 1)) {
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

}  // namespace gkv
