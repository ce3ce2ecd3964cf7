#include <pybind11/stl.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <string>

#include "bindings/bindings.h"
#include "engine/gemma.h"
#include "store/block_store.h"
#include "store/prefix_cache.h"

namespace gkv {
namespace {

constexpr const char* kMissNames[kPrefixMisses] = {
    "", "divergent", "evicted", "no resume point", "cheaper to compute"};

constexpr const char* kTierNames[kPrefixTiers] = {"ram", "shared", "disk",
                                                  "remote"};

PrefixTier TierOf(const std::string& name) {
  for (size_t i = 0; i < kPrefixTiers; ++i) {
    if (name == kTierNames[i]) return static_cast<PrefixTier>(i);
  }
  throw InvalidArgument(
      StrCat("tier is '", name, "', expected ram, shared, disk or remote"));
}

std::chrono::nanoseconds Nanoseconds(double seconds) {
  return std::chrono::nanoseconds(std::llround(seconds * 1e9));
}

py::dict DictOf(const StoreStats& stats) {
  py::dict all;
  all["hits"] = stats.hits;
  all["misses"] = stats.misses;
  all["not_ready"] = stats.not_ready;
  all["writes"] = stats.writes;
  all["failed_writes"] = stats.failed_writes;
  all["evictions"] = stats.evictions;
  all["damaged"] = stats.damaged;
  all["entries"] = stats.entries;
  all["bytes"] = stats.bytes;
  all["queued"] = stats.queued;
  all["paused"] = stats.paused;
  return all;
}

py::dict StatsOf(const PrefixCache& cache) {
  const PrefixStats stats = [&] {
    const GilReleased no_gil;
    return cache.stats();
  }();
  py::dict misses;
  for (size_t i = 1; i < kPrefixMisses; ++i) {
    misses[kMissNames[i]] = stats.misses[i];
  }
  py::dict all;
  all["requests"] = stats.requests;
  all["prompt_tokens"] = stats.prompt_tokens;
  all["tokens"] = TokensByTier(stats.tokens);
  all["misses"] = misses;
  all["ram_bytes"] = stats.ram.bytes;
  all["pinned_bytes"] = stats.ram.pinned;
  all["ram_pages"] = stats.ram.pages;
  all["ram_resume_points"] = stats.ram.resume_points;
  all["published"] = stats.ram.published;
  all["evictions"] = stats.ram.evictions;
  py::dict tiers;
  for (const PrefixStats::Tier& tier : stats.tiers) {
    py::dict one = DictOf(tier.store);
    one["timeouts"] = tier.loading.timeouts;
    one["latency_s"] = tier.loading.latency;
    one["bytes_per_s"] = tier.loading.rate;
    tiers[kTierNames[static_cast<size_t>(tier.tier)]] = one;
  }
  all["tiers"] = tiers;
  all["queued"] = stats.writer.queued;
  all["queued_bytes"] = stats.writer.queued_bytes;
  all["written"] = stats.writer.written;
  all["dropped"] = stats.writer.dropped;
  all["failed"] = stats.writer.failed + stats.loader.failed;
  all["fetches"] = stats.loader.fetches;
  all["fetched"] = stats.loader.hits;
  all["timeouts"] = stats.loader.timeouts;
  return all;
}

py::dict StoreStatsOf(const BlockStore& store) {
  StoreStats stats;
  {
    const GilReleased no_gil;
    stats = store.stats();
  }
  return DictOf(stats);
}

// Waits for what the tiers below RAM have.
std::shared_ptr<PrefixFetch> FetchNow(const PrefixView& view,
                                      const KVCache& cache,
                                      std::span<const int32_t> tokens,
                                      size_t limit) {
  const auto fetch = view.Fetch(cache, tokens, limit, {}, {});
  if (!fetch) return nullptr;
  fetch->Wait();
  if (!fetch->done()) view.cache().loader()->TimedOut(*fetch);
  return fetch;
}

void Match(const Gemma& gemma, KVCache& cache, const TokenArray& array) {
  const std::span tokens(array.data(), static_cast<size_t>(array.size()));
  const GilReleased no_gil;
  const auto& view = gemma.prefix_view();
  if (!view || tokens.empty()) return;
  const RunLock lock = cache.Lock(&CheckSignals);
  cache.Bind(gemma.fingerprint());
  cache.Append(lock, tokens);
  const size_t limit = tokens.size() - 1;
  const auto fetch = FetchNow(*view, cache, tokens, limit);
  const PrefixOffer offer = view->Find(cache, tokens, limit, fetch.get());
  size_t known = offer.start;
  if (known > 0 && !view->Take(cache, lock, offer)) known = 0;
  cache.Truncate(lock, known);
}

// Brings what the tiers below RAM have of the tokens into RAM. The cache, which
// is empty, says in which blocks. Returns how many are known there then.
size_t Prefetch(const Gemma& gemma, KVCache& cache, const TokenArray& array) {
  const std::span tokens(array.data(), static_cast<size_t>(array.size()));
  const GilReleased no_gil;
  const auto& view = gemma.prefix_view();
  if (!view || tokens.empty()) return 0;
  const RunLock lock = cache.Lock(&CheckSignals);
  cache.Bind(gemma.fingerprint());
  const size_t limit = tokens.size() - 1;
  FetchNow(*view, cache, tokens, limit);
  return view->Find(cache, tokens, limit).start;
}

}  // namespace

py::dict TokensByTier(PrefixHit hit) {
  py::dict tokens;
  for (size_t i = 0; i < kPrefixTiers; ++i) {
    const size_t count = hit.of(static_cast<PrefixTier>(i));
    if (count > 0) tokens[kTierNames[i]] = count;
  }
  return tokens;
}

const char* NameOf(PrefixMiss miss) {
  return kMissNames[static_cast<size_t>(miss)];
}

void RegisterPrefix(py::module_& module) {
  py::class_<BlockStore, std::shared_ptr<BlockStore>>(module, "BlockStore")
      .def_property_readonly("tier", &BlockStore::tier)
      .def("flush", &BlockStore::Flush, py::call_guard<GilReleased>())
      .def(
          "clear",
          [](BlockStore& store) {
            return store.Clear(nullptr) == Cleared::kAll;
          },
          py::call_guard<GilReleased>())
      .def("stats", &StoreStatsOf);
  RegisterFolderStore(module);

  py::class_<PrefixCache, std::shared_ptr<PrefixCache>>(module, "PrefixCache")
      .def(py::init([](size_t ram_bytes, const PrefixTiers& tiers) {
             return Unlocked(std::make_shared<PrefixCache>(ram_bytes, tiers));
           }),
           py::arg("ram_bytes"), py::arg("tiers") = PrefixTiers())
      .def_property_readonly(
          "ram_bytes",
          [](const PrefixCache& cache) { return cache.index().budget_bytes(); })
      .def("stats", &StatsOf)
      .def(
          "pinned_bytes",
          [](const PrefixCache& cache, uint64_t pin) {
            return cache.index().PinnedBytes(pin);
          },
          py::arg("pin"), py::call_guard<GilReleased>())
      .def(
          "unpin",
          [](const PrefixCache& cache, uint64_t pin) {
            cache.index().Unpin(pin);
          },
          py::arg("pin"), py::call_guard<GilReleased>())
      .def(
          "flush",
          [](PrefixCache& cache, double timeout_s) {
            return cache.Flush(Nanoseconds(timeout_s));
          },
          py::arg("timeout_s"), py::call_guard<GilReleased>())
      .def(
          "close",
          [](PrefixCache& cache, double timeout_s) {
            return cache.Close(Nanoseconds(timeout_s));
          },
          py::arg("timeout_s"), py::call_guard<GilReleased>())
      .def(
          "clear",
          [](PrefixCache& cache, const std::optional<std::string>& tier,
             double timeout_s) {
            if (!tier) return cache.Clear(Nanoseconds(timeout_s));
            cache.Clear(TierOf(*tier), Nanoseconds(timeout_s));
          },
          py::arg("tier"), py::arg("timeout_s"), py::call_guard<GilReleased>());

  module.def(
      "with_prefix_cache",
      [](const Gemma& gemma, const std::shared_ptr<PrefixCache>& cache,
         const std::string& salt) {
        const auto tenant = gemma.WithSalt(AsBytes(salt));
        return Unlocked(tenant->WithPrefix(
            cache ? gemma.MakePrefixView(cache, AsBytes(salt)) : nullptr));
      },
      py::arg("engine"), py::arg("cache"), py::arg("salt"),
      "The same model for a tenant, whose requests use the cache; None: "
      "none.");
  module.def("prefix_match", &Match, py::arg("engine"), py::arg("cache"),
             py::arg("tokens"),
             "Fills an empty cache with what is known of the tokens.");
  module.def("prefix_prefetch", &Prefetch, py::arg("engine"), py::arg("cache"),
             py::arg("tokens"));
  module.def(
      "prefix_remove",
      [](const Gemma& gemma, const KVCache& cache, const TokenArray& array,
         size_t shared) -> uint64_t {
        const std::span tokens(array.data(), static_cast<size_t>(array.size()));
        const GilReleased no_gil;
        const auto& view = gemma.prefix_view();
        return view ? view->Remove(cache.layout(), tokens, shared) : 0;
      },
      py::arg("engine"), py::arg("cache"), py::arg("tokens"),
      py::arg("shared"),
      "Removes what begins as the tokens, beyond the shared ones, from tiers "
      "of files. The cache says in which layout.");
  module.def(
      "prefix_pin",
      [](const Gemma& gemma, const KVCache& cache) {
        const GilReleased no_gil;
        return gemma.prefix_view()->Pin(cache);
      },
      py::arg("engine"), py::arg("cache"));
  module.def(
      "prefix_publish",
      [](const Gemma& gemma, const KVCache& cache) {
        const GilReleased no_gil;
        if (const auto& view = gemma.prefix_view()) {
          view->Publish(cache, {}, true);
        }
      },
      py::arg("engine"), py::arg("cache"));
}

}  // namespace gkv
