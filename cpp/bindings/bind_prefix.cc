#include <pybind11/stl.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <string>

#include "bindings/bindings.h"
#include "engine/engine.h"
#include "store/block_store.h"
#include "store/prefix_cache.h"

namespace gkv {
namespace {

constexpr const char* kMissNames[kPrefixMisses] = {
    "", "divergent", "evicted", "no resume point", "cheaper to compute"};

constexpr const char* kTierNames[kPrefixTiers] = {"ram", "shared", "disk",
                                                  "remote"};

std::chrono::nanoseconds Nanoseconds(double seconds) {
  return std::chrono::nanoseconds(std::llround(seconds * 1e9));
}

py::dict DictOf(const StoreStats& stats) {
  return py::dict("hits"_a = stats.hits, "misses"_a = stats.misses,
                  "not_ready"_a = stats.not_ready, "writes"_a = stats.writes,
                  "failed_writes"_a = stats.failed_writes,
                  "evictions"_a = stats.evictions, "damaged"_a = stats.damaged,
                  "entries"_a = stats.entries, "bytes"_a = stats.bytes,
                  "queued"_a = stats.queued, "paused"_a = stats.paused);
}

py::dict StatsOf(const PrefixCache& cache) {
  const PrefixStats stats = WithoutGil([&] { return cache.stats(); });
  py::dict misses;
  for (size_t i = 1; i < kPrefixMisses; ++i) {
    misses[kMissNames[i]] = stats.misses[i];
  }
  py::dict tiers;
  for (const PrefixStats::Tier& tier : stats.tiers) {
    tiers[kTierNames[static_cast<size_t>(tier.tier)]] =
        py::dict(**DictOf(tier.store), "timeouts"_a = tier.loading.timeouts,
                 "latency_s"_a = tier.loading.latency,
                 "bytes_per_s"_a = tier.loading.rate);
  }
  return py::dict(
      "requests"_a = stats.requests, "prompt_tokens"_a = stats.prompt_tokens,
      "tokens"_a = TokensByTier(stats.tokens), "misses"_a = misses,
      "ram_bytes"_a = stats.ram.bytes, "pinned_bytes"_a = stats.ram.pinned,
      "ram_pages"_a = stats.ram.pages,
      "ram_resume_points"_a = stats.ram.resume_points,
      "published"_a = stats.ram.published, "evictions"_a = stats.ram.evictions,
      "tiers"_a = tiers, "queued"_a = stats.writer.queued,
      "queued_bytes"_a = stats.writer.queued_bytes,
      "written"_a = stats.writer.written, "dropped"_a = stats.writer.dropped,
      "failed"_a = stats.writer.failed + stats.loader.failed,
      "fetches"_a = stats.loader.fetches, "fetched"_a = stats.loader.hits,
      "timeouts"_a = stats.loader.timeouts);
}

py::dict StoreStatsOf(const BlockStore& store) {
  return DictOf(WithoutGil([&] { return store.stats(); }));
}

// Fetches what the tiers below RAM have, and waits for it.
std::shared_ptr<PrefixFetch> FetchNow(const PrefixView& view,
                                      const Conversation& cache,
                                      std::span<const int32_t> tokens,
                                      size_t limit) {
  const auto fetch = view.Fetch(cache, tokens, limit, {}, {});
  if (!fetch) return nullptr;
  fetch->Wait();
  if (!fetch->done()) view.cache().loader()->TimedOut(*fetch);
  return fetch;
}

void Match(const Engine& gemma, Conversation& cache, const TokenArray& array) {
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
// is empty, says of which layout and pool the blocks are. Returns how many
// tokens are then known in RAM.
size_t Prefetch(const Engine& gemma, Conversation& cache,
                const TokenArray& array) {
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
             return LetEndAnywhere(
                 std::make_shared<PrefixCache>(ram_bytes, tiers));
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
            cache.Clear(EnumFromName<PrefixTier>(kTierNames, "tier", *tier),
                        Nanoseconds(timeout_s));
          },
          py::arg("tier"), py::arg("timeout_s"), py::call_guard<GilReleased>());

  module.def(
      "with_prefix_cache",
      [](const Engine& gemma, const std::shared_ptr<PrefixCache>& cache,
         const std::string& salt) {
        const auto tenant = gemma.WithSalt(AsBytes(salt));
        return LetEndAnywhere(tenant->WithPrefix(
            cache ? gemma.MakePrefixView(cache, AsBytes(salt)) : nullptr));
      },
      py::arg("engine"), py::arg("cache"), py::arg("salt"),
      "Returns the same model for a tenant, whose requests use the cache; with "
      "None they use no cache.");
  module.def("prefix_match", &Match, py::arg("engine"), py::arg("cache"),
             py::arg("tokens"),
             "Fills an empty cache with what is known of the tokens.");
  module.def("prefix_prefetch", &Prefetch, py::arg("engine"), py::arg("cache"),
             py::arg("tokens"));
  module.def(
      "prefix_remove",
      [](const Engine& gemma, const Conversation& cache,
         const TokenArray& array, size_t shared) -> uint64_t {
        const std::span tokens(array.data(), static_cast<size_t>(array.size()));
        const GilReleased no_gil;
        const auto& view = gemma.prefix_view();
        return view ? view->Remove(cache.layout(), tokens, shared) : 0;
      },
      py::arg("engine"), py::arg("cache"), py::arg("tokens"), py::arg("shared"),
      "Removes what begins with the tokens, beyond the `shared` first ones, "
      "from tiers of files. The layout is that of the cache.");
  module.def(
      "prefix_pin",
      [](const Engine& gemma, const Conversation& cache) {
        const GilReleased no_gil;
        return gemma.prefix_view()->Pin(cache);
      },
      py::arg("engine"), py::arg("cache"));
  module.def(
      "prefix_publish",
      [](const Engine& gemma, const Conversation& cache) {
        const GilReleased no_gil;
        if (const auto& view = gemma.prefix_view()) {
          view->Publish(cache, {}, true);
        }
      },
      py::arg("engine"), py::arg("cache"));
}

}  // namespace gkv
