#include "store/prefix_loader.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <map>
#include <utility>

#include "base/error.h"

namespace gkv {
namespace {

constexpr size_t kHands = 2;
// Fewer positions are not worth loading: a step computes them in no time.
constexpr size_t kWorthLoading = 16;
// The most resume points that are tried, if one turns out to be useless.
constexpr size_t kAttempts = 4;
// The most bytes of pages that are held beside the blocks that they are copied
// to.
constexpr size_t kHeldBytes = size_t{32} << 20;
// How long a tier that hung is not asked after it has answered.
constexpr std::chrono::seconds kSuspension{10};
// The weight of the last measurement.
constexpr double kWeight = 0.25;
// A tier that is too slow to be asked may have become quicker: its times are
// improved by this each time.
constexpr double kForget = 0.9;

double SecondsSince(PrefixFetch::Clock::time_point begin) {
  return std::chrono::duration<double>(PrefixFetch::Clock::now() - begin)
      .count();
}

bool KeepsAll(const KvLayout& layout) {
  return std::all_of(
      layout.groups().begin(), layout.groups().end(),
      [](const KvGroup& group) { return group.kind == LayerKind::kFull; });
}

size_t PageBytes(const KvLayout& layout) {
  return layout.bytes_per_token(LayerKind::kFull) * kPageTokens;
}

}  // namespace

void PrefixFetch::Wait() {
  MutexLock lock(mutex_);
  while (pending()) changed_.WaitUntil(lock, deadline());
}

PrefixNews PrefixFetch::Take() {
  const MutexLock lock(mutex_);
  return done() && !given_up_ ? std::exchange(found_, {}) : PrefixNews();
}

PrefixLoader::PrefixLoader(std::shared_ptr<PrefixIndex> index,
                           PrefixTiers tiers, std::vector<PrefixTier> names,
                           std::shared_ptr<PrefixWriter> writer,
                           std::chrono::milliseconds time_out, bool weighs)
    : index_(std::move(index)),
      tiers_(std::move(tiers)),
      names_(std::move(names)),
      writer_(std::move(writer)),
      time_out_(time_out),
      weighs_(weighs),
      paces_(tiers_.size()) {}

bool PrefixLoader::Usable(size_t tier, Clock::time_point now) const {
  return paces_[tier].hung == 0 && paces_[tier].suspended_until <= now;
}

std::shared_ptr<PrefixFetch> PrefixLoader::Fetch(PrefixRequest request) {
  const Clock::time_point now = Clock::now();
  auto fetch = std::make_shared<PrefixFetch>(std::move(request), time_out_);
  {
    const MutexLock lock(mutex_);
    if (closing_ || process_.InChild()) return nullptr;
    LeaveHung();
    bool any = false;
    for (size_t t = 0; t < tiers_.size(); ++t) any = any || Usable(t, now);
    if (!any) return nullptr;
    std::erase_if(fetches_, [](const auto& f) { return f.expired(); });
    fetches_.push_back(fetch);
    queue_.push_back(fetch);
    try {
      Dispatch();
    } catch (...) {
      queue_.pop_back();
      throw;
    }
    ++stats_.fetches;
  }
  return fetch;
}

// Has idle workers look for fetches, as many as there are fetches. Throws
// std::bad_alloc and std::system_error if no worker looks then.
void PrefixLoader::Dispatch() {
  std::erase_if(hands_, [](Hand& hand) {
    return hand.lost && hand.worker.Wait(Clock::time_point());
  });
  auto present = static_cast<size_t>(std::count_if(
      hands_.begin(), hands_.end(), [](const Hand& h) { return !h.lost; }));
  bool any_busy = false;
  std::exception_ptr error;
  try {
    for (; present < kHands; ++present) hands_.emplace_back();
  } catch (const std::bad_alloc&) {
    error = std::current_exception();
  }
  size_t wanted = queue_.size();
  for (Hand& hand : hands_) {
    if (hand.lost) continue;
    if (!hand.busy && wanted > 0) {
      try {
        hand.worker.Post(
            [self = shared_from_this(), &hand] { self->RunFetches(hand); });
        hand.busy = true;
        --wanted;
      } catch (const std::exception&) {
        error = std::current_exception();
      }
    }
    any_busy = any_busy || hand.busy;
  }
  if (error && !any_busy) std::rethrow_exception(error);
}

void PrefixLoader::TimedOut(PrefixFetch& fetch) {
  fetch.Abandon();
  const MutexLock lock(mutex_);
  ++stats_.timeouts;
  std::erase_if(queue_, [&](const auto& f) { return f.get() == &fetch; });
  LeaveHung();
}

// Replaces each worker that a tier does not answer.
void PrefixLoader::LeaveHung() {
  const Clock::time_point now = Clock::now();
  for (Hand& hand : hands_) {
    if (hand.calling == 0 || hand.lost || now < hand.since + time_out_) {
      continue;
    }
    Pace& pace = paces_[hand.calling - 1];
    ++pace.stats.timeouts;
    ++pace.hung;
    hand.lost = true;
  }
  if (closing_ || queue_.empty()) return;
  try {
    Dispatch();
  } catch (const std::exception&) {
    // The next fetch tries again.
  }
}

// Takes the next fetch from the queue. Fetches that begin alike run one after
// the other: the second finds in RAM what the first one loads.
std::shared_ptr<PrefixFetch> PrefixLoader::NextFetch() {
  const auto alike = [](const PrefixFetch& a, const PrefixFetch& b) {
    const size_t size = std::min(
        {a.request_.tokens.size(), b.request_.tokens.size(), kPageTokens});
    return a.request_.id == b.request_.id &&
           std::equal(a.request_.tokens.begin(),
                      a.request_.tokens.begin() + static_cast<ptrdiff_t>(size),
                      b.request_.tokens.begin());
  };
  for (auto at = queue_.begin(); at != queue_.end(); ++at) {
    if (std::any_of(hands_.begin(), hands_.end(), [&](const Hand& hand) {
          return hand.fetch != nullptr && !hand.lost &&
                 alike(*hand.fetch, **at);
        })) {
      continue;
    }
    std::shared_ptr<PrefixFetch> fetch = std::move(*at);
    queue_.erase(at);
    return fetch;
  }
  return nullptr;
}

// Takes fetches from the queue until none is left that it may take.
void PrefixLoader::RunFetches(Hand& hand) {
  MutexLock lock(mutex_);
  while (!closing_ && !hand.lost) {
    std::shared_ptr<PrefixFetch> fetch = NextFetch();
    if (!fetch) break;
    hand.fetch = fetch.get();
    fetch->NoteProgress();
    lock.Unlock();
    bool failed = false;
    try {
      Run(hand, *fetch);
    } catch (const std::exception&) {
      failed = true;  // no memory: the prefix is computed
    }
    Finish(*fetch, failed);
    lock.Lock();
    stats_.failed += failed;
    hand.fetch = nullptr;
    lock.Unlock();
    fetch.reset();
    lock.Lock();
    if (closing_ || queue_.empty()) continue;
    try {
      Dispatch();  // several that begin alike may go on now
    } catch (const std::exception&) {
      // This worker takes them, or the next fetch wakes another.
    }
  }
  hand.busy = false;
}

void PrefixLoader::Finish(PrefixFetch& fetch, bool failed) {
  {
    const MutexLock lock(fetch.mutex_);
    if (fetch.found_.points.empty() && fetch.found_.pages.empty()) {
      fetch.found_ = {};
    }
    if (failed) fetch.given_up_ = true;
    fetch.done_.store(true, std::memory_order_release);
  }
  fetch.changed_.NotifyAll();
  if (!fetch.abandoned_ && fetch.request_.on_done) fetch.request_.on_done();
}

// Calls a tier. Returns false if the fetch is not to go on.
template <typename Fn>
bool PrefixLoader::Ask(Hand& hand, size_t tier, const Fn& ask) {
  {
    const MutexLock lock(mutex_);
    if (closing_ || hand.lost || hand.fetch->abandoned_) return false;
    if (!Usable(tier, Clock::now())) return true;
    hand.calling = tier + 1;
    hand.since = Clock::now();
    hand.fetch->NoteProgress();  // its time begins now
  }
  const auto end = [&] {
    const MutexLock lock(mutex_);
    hand.calling = 0;
    if (!hand.lost) {
      // Queued fetches get more time: the loader makes progress.
      for (const auto& waiting : queue_) waiting->NoteProgress();
      return true;
    }
    --paces_[tier].hung;
    paces_[tier].suspended_until = Clock::now() + kSuspension;
    return false;
  };
  try {
    ask();
  } catch (...) {
    end();
    throw;
  }
  return end();
}

void PrefixLoader::NoteLatency(size_t tier, double seconds) {
  const MutexLock lock(mutex_);
  double& latency = paces_[tier].stats.latency;
  latency = latency == 0 ? seconds : latency + kWeight * (seconds - latency);
}

void PrefixLoader::NoteRate(size_t tier, double seconds, size_t bytes) {
  const MutexLock lock(mutex_);
  PrefixTierStats& stats = paces_[tier].stats;
  const double rate = static_cast<double>(bytes) /
                      std::max(seconds - stats.latency, seconds / 16 + 1e-9);
  stats.rate =
      stats.rate == 0 ? rate : stats.rate + kWeight * (rate - stats.rate);
}

// Whether loading is quicker than computing the same positions.
bool PrefixLoader::WorthIt(PrefixFetch& fetch, size_t tier, size_t begin,
                           size_t position) {
  if (!weighs_) return true;
  const PrefixRequest& request = fetch.request_;
  const KvLayout& layout = *request.layout;
  const auto bytes = static_cast<double>(
      (position - begin) * layout.bytes_per_token(LayerKind::kFull) +
      layout.checkpoint_bytes());
  const MutexLock lock(mutex_);
  PrefixTierStats& stats = paces_[tier].stats;
  double seconds = 2 * stats.latency;
  if (stats.rate > 0) seconds += bytes / stats.rate;
  if (seconds <=
      request.seconds * static_cast<double>(position - request.start)) {
    return true;
  }
  stats.latency *= kForget;
  stats.rate /= kForget;
  ++stats_.cheaper;
  fetch.cheaper_ = true;
  return false;
}

void PrefixLoader::Run(Hand& hand, PrefixFetch& fetch) {
  const PrefixRequest& request = fetch.request_;
  const KvLayout& layout = *request.layout;
  const std::span<const int32_t> tokens = request.tokens;
  size_t start = request.start;
  size_t begin = 0;  // end of the whole pages that RAM has
  {
    const PrefixMatch match =
        index_->Match(request.id.Root(layout), tokens, request.limit);
    start = std::max(start, match.resume);
    begin = match.known / kPageTokens * kPageTokens;
  }
  std::vector<size_t> candidates = ResumeCandidates(
      tokens, request.turn_ends, request.boundaries, request.limit);
  std::erase_if(candidates,
                [&](size_t p) { return p < start + kWorthLoading; });
  if (candidates.empty()) return;
  const ObjectChain chain(request.id, layout, tokens.first(request.limit));
  std::vector<ObjectKey> keys;
  for (const size_t p : candidates) {
    // A model of full layers alone needs no resume point at the end of a page.
    const bool page = KeepsAll(layout) && p % kPageTokens == 0;
    keys.push_back(page ? chain.PageKey(p / kPageTokens - 1)
                        : chain.ResumeKey(p));
  }
  // The first tier that has each key.
  std::vector<size_t> where(keys.size(), tiers_.size());
  for (size_t t = 0; t < tiers_.size(); ++t) {
    std::vector<uint8_t> found(keys.size());
    const auto ask = [&] {
      const Clock::time_point asked = Clock::now();
      tiers_[t]->Has(keys, found);
      NoteLatency(t, SecondsSince(asked));
    };
    if (!Ask(hand, t, ask)) return;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (found[i] != 0) where[i] = std::min(where[i], t);
    }
  }
  size_t attempts = 0;
  for (size_t i = 0; i < candidates.size() && attempts < kAttempts; ++i) {
    if (where[i] == tiers_.size()) continue;
    const size_t first =
        std::min(begin, candidates[i] / kPageTokens * kPageTokens);
    if (!WorthIt(fetch, where[i], first, candidates[i])) return;
    ++attempts;
    if (TryPoint(hand, fetch, chain, candidates[i], first)) return;
    const MutexLock lock(fetch.mutex_);
    if (fetch.given_up_) return;
    fetch.found_ = {};
  }
}

// Returns objects parallel to `wanted`, each from the first tier that has it
// sound.
std::vector<std::optional<PrefixLoader::Piece>> PrefixLoader::LoadAll(
    Hand& hand, PrefixFetch& fetch, std::span<const Wanted> wanted) {
  std::vector<std::optional<Piece>> pieces(wanted.size());
  for (size_t t = 0; t < tiers_.size(); ++t) {
    std::vector<size_t> at;
    std::vector<ObjectKey> keys;
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (pieces[i]) continue;
      at.push_back(i);
      keys.push_back(wanted[i].key);
    }
    if (keys.empty()) break;
    std::vector<Loaded> loaded;
    const auto ask = [&] {
      const Clock::time_point asked = Clock::now();
      loaded = tiers_[t]->Load(keys);
      size_t bytes = 0;
      for (const Loaded& one : loaded) bytes += one.object.bytes.size();
      if (bytes > 0) NoteRate(t, SecondsSince(asked), bytes);
    };
    if (!Ask(hand, t, ask)) return {};
    std::vector<ObjectKey> damaged;
    uint64_t loads = 0;
    for (size_t k = 0; k < loaded.size() && k < at.size(); ++k) {
      if (loaded[k].state != LoadState::kHit) continue;
      const Wanted& want = wanted[at[k]];
      try {
        ObjectHead head =
            DecodeHead(loaded[k].object.bytes, *fetch.request_.layout);
        if (head == want.head) {
          pieces[at[k]] = {std::move(loaded[k].object), std::move(head), t};
          ++loads;
          continue;
        }
        damaged.push_back(want.key);  // another object under its name
      } catch (const Mismatch&) {
        // An object of another version is not ours to judge.
      } catch (const Error&) {
        damaged.push_back(want.key);
      }
    }
    {
      const MutexLock lock(mutex_);
      paces_[t].stats.loads += loads;
      paces_[t].stats.damaged += damaged.size();
    }
    const auto tell = [&] {
      for (const ObjectKey& key : damaged) tiers_[t]->Damaged(key);
    };
    if (!damaged.empty() && !Ask(hand, t, tell)) return {};
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i] && pieces[i]->tier > 0) {
      writer_->Promote(wanted[i].key, pieces[i]->object, pieces[i]->tier);
    }
  }
  return pieces;
}

// Adds a part to what was found. Returns false if the fetch was given up.
bool PrefixLoader::Keep(PrefixFetch& fetch, bool point, size_t end,
                        PrefixPart part) {
  const MutexLock lock(fetch.mutex_);
  if (fetch.given_up_) return false;
  auto& entries = point ? fetch.found_.points : fetch.found_.pages;
  entries.push_back({end, std::move(part)});
  return true;
}

// Loads what RAM, which has pages up to `begin`, lacks for resuming at
// `position`. Returns false if an object is missing.
bool PrefixLoader::TryPoint(Hand& hand, PrefixFetch& fetch,
                            const ObjectChain& chain, size_t position,
                            size_t begin) {
  const PrefixRequest& request = fetch.request_;
  const auto& layout = request.layout;
  const bool has_full = layout->bytes_per_token(LayerKind::kFull) > 0;
  const size_t pages = position / kPageTokens;
  PrefixPart point{layout, HeldSet(layout->groups().size())};
  const auto add = [&](const Piece& piece) {
    HeldSet held =
        DecodeBlocks(piece.object, piece.head, *layout, *request.pool);
    for (size_t g = 0; g < held.size(); ++g) {
      std::move(held[g].begin(), held[g].end(),
                std::back_inserter(point.held[g]));
    }
  };
  const bool has_point = !KeepsAll(*layout) || position % kPageTokens != 0;
  if (has_point) {
    Wanted want{chain.ResumeKey(position), chain.ResumeHead(position)};
    const auto loaded = LoadAll(hand, fetch, {&want, 1});
    if (loaded.empty() || !loaded[0]) return false;
    point.tier = names_[loaded[0]->tier];
    add(*loaded[0]);
    std::vector<Wanted> windows;
    for (const SlidingRange& range : loaded[0]->head.sliding) {
      if (range.from >= loaded[0]->head.begin) continue;
      for (size_t page = pages; page-- > range.own / kPageTokens;) {
        windows.push_back({chain.WindowKey(page, range.window),
                           chain.WindowHead(page, range.window)});
      }
    }
    if (!windows.empty()) {
      const auto found = LoadAll(hand, fetch, windows);
      if (found.empty()) return false;
      for (const auto& piece : found) {
        if (!piece) return false;
      }
      for (const auto& piece : found) add(*piece);
    }
    for (auto& group : point.held) {
      std::sort(group.begin(), group.end(),
                [](const auto& a, const auto& b) { return a.begin < b.begin; });
    }
    const PrefixTier tier = point.tier;
    if (!Keep(fetch, true, position, std::move(point))) return false;
    point = {layout, {}, tier};
  }
  // Leaf first, several at a time.
  std::vector<PrefixEntry> entries(pages - begin / kPageTokens);
  for (size_t i = 0; i < entries.size(); ++i) {
    entries[i].end = begin + (i + 1) * kPageTokens;
    entries[i].part = {layout, HeldSet(layout->groups().size()), point.tier};
  }
  const size_t batch = std::max<size_t>(
      1, kHeldBytes / std::max<size_t>(1, PageBytes(*layout)));
  for (size_t last = has_full ? entries.size() : 0; last > 0;) {
    const size_t first = last > batch ? last - batch : 0;
    std::vector<Wanted> want;
    for (size_t i = last; i-- > first;) {
      const size_t page = begin / kPageTokens + i;
      want.push_back({chain.PageKey(page), chain.PageHead(page)});
    }
    auto found = LoadAll(hand, fetch, want);
    if (found.empty()) return false;
    for (size_t i = 0; i < found.size(); ++i) {
      if (!found[i]) return false;
      PrefixEntry& entry = entries[last - 1 - i];
      entry.part.held = DecodeBlocks(found[i]->object, found[i]->head, *layout,
                                     *request.pool);
      entry.part.tier = names_[found[i]->tier];
      found[i].reset();
      if (!Keep(fetch, false, entry.end, std::move(entry.part))) return false;
    }
    last = first;
  }
  PrefixNews news;
  {
    const MutexLock lock(fetch.mutex_);
    if (fetch.given_up_) return false;
    if (!has_full) fetch.found_.pages = std::move(entries);
    std::sort(fetch.found_.pages.begin(), fetch.found_.pages.end(),
              [](const auto& a, const auto& b) { return a.end < b.end; });
    news = fetch.found_;
  }
  index_->Add(request.id.Root(*layout), request.pool, request.tokens, news,
              request.seconds);
  const MutexLock lock(mutex_);
  ++stats_.hits;
  return true;
}

bool PrefixLoader::GiveUp(const BlockOwner* owner, size_t bytes,
                          size_t& freed) {
  std::vector<std::shared_ptr<PrefixFetch>> fetches;
  // a thread that is gone may hold its lock
  if (process_.InChild()) return false;
  {
    const MutexLock lock(mutex_);
    for (const auto& weak : fetches_) {
      if (auto fetch = weak.lock()) fetches.push_back(std::move(fetch));
    }
  }
  size_t given = 0;
  bool any = false;
  for (const auto& fetch : fetches) {
    if (given >= bytes) break;
    PrefixNews victim;
    {
      const MutexLock lock(fetch->mutex_);
      bool holds = false;
      ForBlocks(fetch->found_, [&](const Block* block) {
        holds = holds || block->owner.get() == owner;
      });
      if (!holds) continue;
      fetch->given_up_ = true;
      victim = std::exchange(fetch->found_, {});
    }
    any = true;
    std::map<const Block*, uint32_t> mine;
    ForBlocks(victim, [&](const Block* block) { ++mine[block]; });
    for (const auto& [block, count] : mine) {
      if (block->owner.get() != owner) continue;
      given += block->size_bytes;
      if (block->refs.load() == count) freed += block->size_bytes;
    }
  }
  return any;
}

void PrefixLoader::Close(Clock::time_point until) {
  if (process_.InChild()) return;
  std::deque<std::shared_ptr<PrefixFetch>> left;
  std::list<Hand>* hands = nullptr;  // the list does not change from now on
  {
    const MutexLock lock(mutex_);
    closing_ = true;
    left.swap(queue_);
    hands = &hands_;
  }
  for (const auto& fetch : left) Finish(*fetch, false);
  for (Hand& hand : *hands) {
    if (!hand.worker.Wait(until)) hand.worker.Abandon();
  }
}

PrefixLoaderStats PrefixLoader::stats() const {
  const MutexLock lock(mutex_);
  PrefixLoaderStats stats = stats_;
  for (const Pace& pace : paces_) stats.tiers.push_back(pace.stats);
  return stats;
}

}  // namespace gkv
