#include "engine/prefix_use.h"

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

#include "base/rounding.h"

namespace gkv {
namespace {

// Long prompts leave resume points at multiples of this, others in their middle.
constexpr size_t kPointDistance = 4096;
// A point in the middle is for prompts that may never come. It is left where so
// many windows fit into RAM's budget: it must not push out what is certain.
constexpr size_t kWindowsForMiddle = 8;
// Fewer tokens are worth neither a wait nor a resume point.
constexpr size_t kLeastShared = 64;

void TellChanged(WakeUp& wake_up) {
  {
    const MutexLock lock(wake_up.mutex);
    wake_up.prefix_changed = true;
  }
  wake_up.changed.NotifyAll();
}

}  // namespace

PrefixUse::PrefixUse(PrefixAccess access, TokenStream& stream, size_t limit)
    : access_(std::move(access)), stream_(stream), limit_(limit) {
  if (access_.view) prompt_ = cache().tokens();
}

bool PrefixUse::Follow(PrefixUse& earlier,
                       const std::shared_ptr<WakeUp>& wake_up) {
  leader_ = nullptr;
  if (!reads() || !earlier.leads() ||
      !access_.view->Same(*earlier.access_.view)) {
    return false;
  }
  const size_t limit = std::min(limit_, earlier.prompt_.size());
  const auto end = prompt_.begin() + static_cast<ptrdiff_t>(limit);
  const auto common = static_cast<size_t>(
      std::mismatch(prompt_.begin(), end, earlier.prompt_.begin()).first -
      prompt_.begin());
  if (common <= earlier.lead_->reached + kLeastShared ||
      common <= cache().next_position_for_logits() + kLeastShared ||
      cache().layout().hash() != earlier.cache().layout().hash()) {
    return false;
  }
  const PrefixOffer known = access_.view->Find(cache(), prompt_, limit_);
  if (common <= known.start + kLeastShared) return false;
  earlier.AddPoint(common);
  Lead& lead = *earlier.lead_;
  lead.first_awaited = std::min(lead.first_awaited, common);
  lead.last_awaited = std::max(lead.last_awaited, common);
  lead.wake_up = wake_up;
  leader_ = earlier.lead_;
  awaited_ = common;
  return true;
}

bool PrefixUse::Fetch(const std::shared_ptr<WakeUp>& wake_up) {
  if (!reads() || std::exchange(fetched_, true)) return false;
  try {
    fetch_ = access_.view->Fetch(
        cache(), prompt_, limit_, access_.boundaries,
        [wake_up] { TellChanged(*wake_up); });
  } catch (const std::bad_alloc&) {
  } catch (const std::system_error&) {
    // The request computes what it would have found.
  }
  return fetches();
}

bool PrefixUse::Resume(size_t limit) {
  leader_ = nullptr;
  if (!access_.view) return false;
  bool took = false;
  const bool again = std::exchange(resumed_, true);
  try {
    took = TakeOver(limit, again);
  } catch (const std::bad_alloc&) {
    // The request computes what it would have found.
  }
  EndFetch();
  return took;
}

bool PrefixUse::TakeOver(size_t limit, bool again) {
  PrefixView& view = *access_.view;
  std::vector<int32_t> all;
  if (again) all = cache().tokens();
  const std::span<const int32_t> tokens = again ? all : prompt_;
  size_t next = cache().next_position_for_logits();
  size_t parts_at = 0;
  bool took = false;
  if (reads()) {
    const size_t before = next;
    PrefixOffer offer = view.Find(cache(), tokens, limit, fetch_.get());
    // A second request has this prefix: others may come.
    if (offer.match.parts || offer.match.known == limit) {
      parts_at = offer.match.known;
    }
    PrefixHit hit;
    const bool cheaper = offer.start == 0 && fetch_ && fetch_->cheaper();
    const PrefixMiss miss =
        cheaper ? PrefixMiss::kCheaper : PrefixView::MissOf(offer, limit);
    if (offer.start > 0 &&
        view.Take(cache(), stream_.transaction().lock(), offer)) {
      took = true;
      next = cache().next_position_for_logits();
      warm_end_ = cache().computed();
      hit = PrefixView::HitOf(offer, before, next);
    }
    if (next < limit) hit.miss = miss;
    if (!again) {
      stream_.set_cached_tokens(next, hit);
      view.cache().Count(limit, hit);
    }
  }
  if (again || !access_.writes()) return took;
  try {
    points_ = view.ChoosePoints(tokens, access_.boundaries, next);
    if (parts_at > next + kLeastShared) AddPoint(parts_at);
    AddNearPoints(tokens.size(), next);
    lead_ = std::make_shared<Lead>(Lead{.reached = next});
  } catch (const std::bad_alloc&) {
    // Others compute what they would have found.
  }
  return took;
}

// Ends the fetch, which may not be done in time.
void PrefixUse::EndFetch() {
  if (!fetch_) return;
  if (!fetch_->done()) access_.view->cache().loader()->TimedOut(*fetch_);
  fetch_ = nullptr;
}

void PrefixUse::AddPoint(size_t position) {
  points_.insert(std::lower_bound(points_.begin(), points_.end(), position),
                 position);
}

// Adds points for the next prompt that is equal to this one, or is until its
// middle: other points may all lie beyond what it has in common with this one.
// `next` is the first position to compute of `length` tokens.
void PrefixUse::AddNearPoints(size_t length, size_t next) {
  const KvLayout& layout = cache().layout();
  size_t window = 0;  // the least of all; 0: nothing is forgotten
  bool shares = true;  // whether points that are near share their blocks
  for (const KvGroup& group : layout.groups()) {
    if (group.kind == LayerKind::kRecurrent) shares = false;
    if (group.window == 0) continue;
    window = window == 0 ? group.window : std::min(window, group.window);
  }
  // Layers that forget nothing need no points.
  if (window == 0 && shares) return;
  if (length <= next + kLeastShared + 1) return;
  const size_t last = length - 1;  // which every prompt computes
  const auto add = [&](size_t position) {
    if (std::binary_search(points_.begin(), points_.end(), position)) return;
    AddPoint(position);
  };
  if (last < kPageTokens) {
    // There are no pages, and the request may forget this position later.
    if (points_.empty()) {
      add(last);
      ram_point_ = last;
    }
  } else if (shares && last <= window) {
    // The window holds all of the prompt: points take hardly any memory.
    for (size_t p = RoundUp(next + 1, kPageTokens); p < last;
         p += kPageTokens) {
      add(p);
    }
  } else if (last - next >= 2 * kPageTokens &&
             RoundUp(next + 1, kPointDistance) > last &&
             access_.view->cache().index().budget_bytes() / kWindowsForMiddle >=
                 layout.checkpoint_bytes()) {
    // A point of its own takes the window's bytes: one, in the middle.
    const size_t middle = RoundUp(next + (last - next) / 2, kPageTokens);
    if (middle < last) add(middle);
  }
}

std::vector<size_t> PrefixUse::PointsIn(size_t begin, size_t end) const {
  std::vector<size_t> points;
  // A step over what was computed before may be a warm-up.
  if (!takes_points_ || !access_.writes() || begin < cache().computed()) {
    return points;
  }
  for (const size_t p : points_) {
    if (p > begin && p <= end) points.push_back(p);
  }
  const size_t far = RoundUp(begin + 1, kPointDistance);
  if (far <= end) points.push_back(far);
  std::sort(points.begin(), points.end());
  points.erase(std::unique(points.begin(), points.end()), points.end());
  return points;
}

void PrefixUse::Publish(std::span<const Checkpoint> points,
                        size_t next) noexcept {
  // The content is right at the end of a warm-up.
  const bool warm = next == warm_end_ && access_.writes();
  if (!points.empty() || warm) {
    access_.view->Publish(cache(), points, warm, ram_point_);
  }
  if (!lead_) return;
  const size_t before = std::exchange(lead_->reached, next);
  if (next >= lead_->first_awaited && before < lead_->last_awaited) {
    TellChanged(*lead_->wake_up);
  }
}

void PrefixUse::NoteSpeed(double seconds) const {
  if (access_.view) access_.view->set_seconds_per_token(seconds);
}

bool PrefixUse::GiveUpIndexed() {
  if (!access_.view) return false;
  const bool took = std::exchange(takes_points_, false);
  return access_.view->GiveUp(cache()) || took;
}

bool PrefixUse::Leave() {
  if (!reads() && !access_.writes()) return false;
  access_.mode = PrefixMode::kOff;
  return true;
}

void PrefixUse::End(bool computed) noexcept {
  if (fetch_) fetch_->Abandon();
  fetch_ = nullptr;
  if (computed && access_.writes()) {
    access_.view->Publish(cache(), {}, true);
  }
  if (!lead_) return;
  lead_->over = true;
  if (lead_->reached < lead_->last_awaited) TellChanged(*lead_->wake_up);
  lead_ = nullptr;
}

}  // namespace gkv
