#include "store/prefix_writer.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <map>
#include <utility>

namespace gkv {

// A queued write. Its references to blocks count as those of an index: it gives
// them up when asked to.
struct PrefixWriter::Job {
  Job() = default;
  Job(const Job&) = delete;
  ~Job() { CountBlocks(-1); }

  void CountBlocks(int by) {
    ForBlocks(addition.news, [&](const Block* block) {
      block->indexed.fetch_add(static_cast<uint32_t>(by),
                               std::memory_order_relaxed);
    });
  }
  size_t Objects() const {
    return addition.news.pages.size() + addition.news.points.size() +
           (promoted ? 1 : 0);
  }
  size_t Bytes() const {
    size_t bytes = promoted ? promoted->bytes.size() : 0;
    ForBlocks(addition.news,
              [&](const Block* block) { bytes += block->size_bytes; });
    return bytes;
  }
  // Takes its references away.
  PrefixNews GiveUp() {
    CountBlocks(-1);
    given_up = true;
    return std::exchange(addition.news, {});
  }

  PrefixAddition addition;
  size_t bytes = 0;       // as counted in the queue
  bool given_up = false;  // the blocks are gone
  // Or an encoded object for the first `tiers` tiers.
  std::optional<StoredBytes> promoted;
  ObjectKey key;
  size_t tiers = 0;
};

struct PrefixWriter::Item {
  ObjectKey key;
  ObjectHead head;
  bool of_page = false;        // a page of the addition, else of a point
  size_t end = 0;              // the end of the entry that has the blocks
  std::vector<uint8_t> lacks;  // [tiers]
};

PrefixWriter::PrefixWriter(std::shared_ptr<PrefixIndex> index,
                           PrefixTiers tiers, size_t max_bytes)
    : index_(std::move(index)),
      tiers_(std::move(tiers)),
      max_bytes_(max_bytes) {}

PrefixWriter::~PrefixWriter() = default;

void PrefixWriter::Write(PrefixAddition addition) {
  if (addition.news.pages.empty() && addition.news.points.empty()) return;
  auto job = std::make_unique<Job>();
  job->addition = std::move(addition);
  job->CountBlocks(1);
  Enqueue(std::move(job));
}

void PrefixWriter::Promote(const ObjectKey& key, StoredBytes object,
                           size_t tiers) {
  auto job = std::make_unique<Job>();
  job->promoted = std::move(object);
  job->key = key;
  job->tiers = tiers;
  Enqueue(std::move(job));
}

void PrefixWriter::Enqueue(std::unique_ptr<Job> job) {
  job->bytes = job->Bytes();
  std::vector<std::unique_ptr<Job>> victims;  // destroyed after the unlock
  {
    const MutexLock lock(mutex_);
    if (closed_ || worker_.in_child()) return;
    queue_.push_back(std::move(job));
    if (!busy_) {
      try {
        worker_.Post([self = shared_from_this()] { self->WriteQueue(); });
      } catch (...) {
        job = std::move(queue_.back());  // destroyed without the lock
        queue_.pop_back();
        throw;
      }
      busy_ = true;
    }
    stats_.queued += queue_.back()->Objects();
    stats_.queued_bytes += queue_.back()->bytes;
    MakeRoom(victims);
  }
}

// Drops the oldest jobs. The newest stays, however large.
void PrefixWriter::MakeRoom(std::vector<std::unique_ptr<Job>>& victims) {
  while (stats_.queued_bytes > max_bytes_ && queue_.size() > 1) {
    victims.push_back(std::move(queue_.front()));
    queue_.pop_front();
    stats_.queued -= victims.back()->Objects();
    stats_.queued_bytes -= victims.back()->bytes;
    stats_.dropped += victims.back()->Objects();
  }
}

// Writes until the queue is empty.
void PrefixWriter::WriteQueue() {
  MutexLock lock(mutex_);
  while (!queue_.empty()) {
    std::unique_ptr<Job> job = std::move(queue_.front());
    queue_.pop_front();
    stats_.queued -= job->Objects();
    stats_.queued_bytes -= job->bytes;
    current_ = job.get();
    lock.Unlock();
    bool failed = false;
    try {
      Run(*job);
    } catch (const std::exception&) {
      failed = true;  // RAM may still have it, or it is computed
    }
    lock.Lock();
    current_ = nullptr;
    ++ended_;
    stats_.failed += failed;
    // The job's references are destroyed without the lock: GiveUp waits for it.
    encoding_ = true;
    lock.Unlock();
    job.reset();
    lock.Lock();
    encoding_ = false;
    changed_.NotifyAll();
  }
  busy_ = false;
}

void PrefixWriter::Run(Job& job) {
  if (job.promoted) {
    std::vector<uint8_t> to(tiers_.size());
    std::fill_n(to.begin(), job.tiers, uint8_t{1});
    return Put(job.key, *job.promoted, to);
  }
  const ObjectChain chain(job.addition.id, *job.addition.layout,
                          job.addition.tokens);
  std::vector<Item> items = ItemsOf(job, chain);
  std::vector<ObjectKey> keys;
  for (const Item& item : items) keys.push_back(item.key);
  std::vector<uint8_t> found(keys.size());
  for (const auto& tier : tiers_) {
    std::fill(found.begin(), found.end(), uint8_t{0});
    tier->Has(keys, found);
    for (size_t i = 0; i < items.size(); ++i) {
      items[i].lacks.push_back(found[i] == 0);
    }
  }
  FindMissing(job, items);
  // The end of the first page that is nowhere.
  size_t broken = std::numeric_limits<size_t>::max();
  uint64_t dropped = 0;
  for (const Item& item : items) {
    if (std::none_of(item.lacks.begin(), item.lacks.end(),
                     [](uint8_t lacks) { return lacks != 0; })) {
      continue;
    }
    std::optional<StoredBytes> object;
    if (item.head.end <= broken) object = Encode(job, item);
    if (object) {
      Put(item.key, *object, item.lacks);
      continue;
    }
    ++dropped;
    // Without the page, nobody could use what hangs on it.
    if (item.of_page) broken = std::min<size_t>(broken, item.head.end);
  }
  const MutexLock lock(mutex_);
  if (!left_) stats_.dropped += dropped;  // else Close has counted them
}

// Returns the objects of a job in the order of writing. They refer to the job's
// entries by their ends.
std::vector<PrefixWriter::Item> PrefixWriter::ItemsOf(
    const Job& job, const ObjectChain& chain) {
  std::vector<Item> items;
  const KvLayout& layout = *job.addition.layout;
  // The blocks may be given up meanwhile.
  const MutexLock lock(mutex_);
  const PrefixNews& news = job.addition.news;
  size_t pages = news.pages.empty() ? 0 : news.pages.back().end / kPageTokens;
  for (const PrefixEntry& point : news.points) {
    pages = std::max(pages, point.end / kPageTokens);
  }
  if (layout.bytes_per_token(LayerKind::kFull) == 0) pages = 0;
  for (size_t page = 0; page < pages; ++page) {
    items.push_back({chain.PageKey(page),
                     chain.PageHead(page),
                     true,
                     (page + 1) * kPageTokens,
                     {}});
  }
  for (const PrefixEntry& point : news.points) {
    ObjectHead head = chain.ResumeHead(point.end);
    for (size_t g = 0; g < layout.groups().size(); ++g) {
      const size_t window = layout.groups()[g].window;
      if (window == 0) continue;
      const auto& held = point.part.held[g];
      const SlidingRange range = SlidingRangeAt(
          window, held.empty() ? point.end : held.front().begin, point.end);
      head.sliding.push_back(range);
      if (range.from >= head.begin) continue;
      for (size_t page = range.own / kPageTokens;
           page < head.begin / kPageTokens; ++page) {
        items.push_back({chain.WindowKey(page, window),
                         chain.WindowHead(page, window),
                         false,
                         point.end,
                         {}});
      }
    }
    std::sort(head.sliding.begin(), head.sliding.end(),
              [](const auto& a, const auto& b) { return a.window < b.window; });
    items.push_back(
        {chain.ResumeKey(point.end), std::move(head), false, point.end, {}});
  }
  return items;
}

// Adds to the job pages that a tier lacks and the index has.
void PrefixWriter::FindMissing(Job& job, std::span<const Item> items) {
  size_t end = 0;
  const auto lacks = [](const Item& item) {
    return std::find(item.lacks.begin(), item.lacks.end(), uint8_t{1}) !=
           item.lacks.end();
  };
  {
    const MutexLock lock(mutex_);
    const auto& pages = job.addition.news.pages;
    for (const Item& item : items) {
      if (item.of_page && lacks(item) &&
          std::none_of(pages.begin(), pages.end(), [&](const auto& page) {
            return page.end == item.end;
          })) {
        end = item.end;
      }
    }
    if (end == 0 || job.given_up) return;
    encoding_ = true;
  }
  PrefixNews more;
  {
    const PrefixMatch match =
        index_->Match(job.addition.id.Root(*job.addition.layout),
                      std::span(job.addition.tokens).first(end), end);
    for (const Item& item : items) {
      const size_t page = item.end / kPageTokens - 1;
      if (item.of_page && lacks(item) && page < match.known / kPageTokens) {
        more.pages.push_back({item.end, match.pages[page]});
      }
    }
  }
  {
    const MutexLock lock(mutex_);
    encoding_ = false;
    auto& pages = job.addition.news.pages;
    for (PrefixEntry& page : more.pages) {
      if (std::any_of(pages.begin(), pages.end(), [&](const auto& known) {
            return known.end == page.end;
          })) {
        continue;
      }
      for (const auto& group : page.part.held) {
        for (const HeldBlock& held : group) {
          held.block.get()->indexed.fetch_add(1, std::memory_order_relaxed);
        }
      }
      pages.push_back(std::move(page));
    }
  }
  changed_.NotifyAll();
}

// Returns the bytes of an object; none if its blocks were given up.
std::optional<StoredBytes> PrefixWriter::Encode(Job& job, const Item& item) {
  PrefixPart part;
  {
    const MutexLock lock(mutex_);
    const PrefixNews& news = job.addition.news;
    const auto& entries = item.of_page ? news.pages : news.points;
    const auto entry =
        std::find_if(entries.begin(), entries.end(),
                     [&](const auto& e) { return e.end == item.end; });
    if (entry == entries.end()) return std::nullopt;
    part = entry->part;
    encoding_ = true;
  }
  std::optional<StoredBytes> object;
  std::exception_ptr error;
  try {
    object = EncodeObject(item.head, *part.layout, part.held);
  } catch (...) {
    error = std::current_exception();
  }
  part = {};
  {
    const MutexLock lock(mutex_);
    encoding_ = false;
  }
  changed_.NotifyAll();
  if (error) std::rethrow_exception(error);
  return object;
}

void PrefixWriter::Put(const ObjectKey& key, const StoredBytes& object,
                       std::span<const uint8_t> to) {
  for (size_t t = 0; t < tiers_.size(); ++t) {
    if (to[t] != 0) tiers_[t]->Put(key, object);
  }
  const MutexLock lock(mutex_);
  ++stats_.written;
}

bool PrefixWriter::GiveUp(const BlockOwner* owner, size_t bytes,
                          size_t& freed) {
  std::vector<PrefixNews> victims;  // destroyed after the unlock
  bool any = false;
  size_t given = 0;
  const auto holds = [&](const Job& job) {
    bool found = false;
    ForBlocks(job.addition.news, [&](const Block* block) {
      found = found || block->owner.get() == owner;
    });
    return found;
  };
  {
    MutexLock lock(mutex_);
    // In a child of fork() nobody encodes or writes.
    while (encoding_ && !worker_.in_child()) changed_.Wait(lock);
    const auto take = [&](Job& job) {
      any = true;
      ForBlocks(job.addition.news, [&](const Block* block) {
        if (block->owner.get() == owner) given += block->size_bytes;
      });
      victims.push_back(job.GiveUp());
    };
    for (auto job = queue_.begin(); job != queue_.end() && given < bytes;) {
      if (!holds(**job)) {
        ++job;
        continue;
      }
      stats_.queued -= (*job)->Objects();
      stats_.queued_bytes -= (*job)->bytes;
      stats_.dropped += (*job)->Objects();
      take(**job);
      job = queue_.erase(job);
    }
    // The present job is the last to go; the worker counts it.
    if (given < bytes && current_ != nullptr && holds(*current_)) {
      take(*current_);
    }
  }
  std::map<const Block*, uint32_t> mine;
  for (const PrefixNews& news : victims) {
    ForBlocks(news, [&](const Block* block) { ++mine[block]; });
  }
  for (const auto& [block, count] : mine) {
    if (block->owner.get() == owner && block->refs.load() == count) {
      freed += block->size_bytes;
    }
  }
  return any;
}

bool PrefixWriter::Flush(Clock::time_point until) {
  if (worker_.in_child()) return true;
  if (!worker_.Wait(until)) return false;
  {
    const MutexLock lock(mutex_);
    if (left_) return true;
  }
  for (const auto& tier : tiers_) tier->Flush();
  return true;
}

bool PrefixWriter::Drop(Clock::time_point until) {
  if (worker_.in_child()) return true;
  bool running = false;
  uint64_t ended = 0;
  {
    std::deque<std::unique_ptr<Job>> victims;  // destroyed without the lock
    PrefixNews current;
    MutexLock lock(mutex_);
    while (encoding_) changed_.Wait(lock);
    for (const auto& job : queue_) stats_.dropped += job->Objects();
    stats_.queued = stats_.queued_bytes = 0;
    queue_.swap(victims);
    running = current_ != nullptr;
    ended = ended_;
    if (running) current = current_->GiveUp();
  }
  MutexLock lock(mutex_);
  while (running && ended_ == ended && !left_) {
    if (!changed_.WaitUntil(lock, until)) return ended_ != ended || left_;
  }
  return true;
}

uint64_t PrefixWriter::Close(Clock::time_point until) {
  if (worker_.in_child()) return 0;
  {
    const MutexLock lock(mutex_);
    if (std::exchange(closed_, true)) return 0;
  }
  if (worker_.Wait(until)) return 0;
  uint64_t dropped = 0;
  {
    std::deque<std::unique_ptr<Job>> victims;  // destroyed without the lock
    PrefixNews current;
    MutexLock lock(mutex_);
    while (encoding_) changed_.Wait(lock);
    for (const auto& job : queue_) dropped += job->Objects();
    queue_.swap(victims);
    if (current_ != nullptr) {
      dropped += current_->Objects();
      current = current_->GiveUp();
    }
    stats_.queued = stats_.queued_bytes = 0;
    stats_.dropped += dropped;
    left_ = true;
  }
  changed_.NotifyAll();
  worker_.Abandon();
  return dropped;
}

PrefixWriterStats PrefixWriter::stats() const {
  const MutexLock lock(mutex_);
  return stats_;
}

}  // namespace gkv
