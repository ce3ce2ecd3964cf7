#include <pybind11/stl.h>

#include <string>

#include "bindings/bindings.h"
#include "engine/gemma.h"
#include "store/block_store.h"
#include "store/prefix_cache.h"

namespace gkv {
namespace {

constexpr const char* kMissNames[kPrefixMisses] = {
    "", "divergent", "evicted", "no resume point", "cheaper to compute"};

py::dict StatsOf(const PrefixCache& cache) {
  const PrefixStats stats = cache.stats();
  py::dict misses;
  for (size_t i = 1; i < kPrefixMisses; ++i) {
    misses[kMissNames[i]] = stats.misses[i];
  }
  py::dict all;
  all["requests"] = stats.requests;
  all["prompt_tokens"] = stats.prompt_tokens;
  all["ram_tokens"] = stats.ram_tokens;
  all["misses"] = misses;
  all["ram_bytes"] = stats.ram.bytes;
  all["ram_pages"] = stats.ram.pages;
  all["ram_resume_points"] = stats.ram.resume_points;
  all["published"] = stats.ram.published;
  all["evictions"] = stats.ram.evictions;
  return all;
}

py::dict StoreStatsOf(const BlockStore& store) {
  StoreStats stats;
  {
    const GilReleased no_gil;
    stats = store.stats();
  }
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

using TokenArray =
    py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

void Match(const Gemma& gemma, KVCache& cache, const TokenArray& array) {
  const std::span tokens(array.data(), static_cast<size_t>(array.size()));
  const GilReleased no_gil;
  const auto& view = gemma.prefix_view();
  if (!view || tokens.empty()) return;
  const RunLock lock = cache.Lock(&CheckSignals);
  cache.Bind(gemma.fingerprint());
  cache.Append(lock, tokens);
  PrefixOffer offer = view->Find(cache, tokens, tokens.size() - 1);
  size_t known = offer.start;
  if (known > 0 && !view->Take(cache, lock, std::move(offer))) known = 0;
  cache.Truncate(lock, known);
}

}  // namespace

const char* NameOf(PrefixMiss miss) {
  return kMissNames[static_cast<size_t>(miss)];
}

void RegisterPrefix(py::module_& module) {
  py::class_<BlockStore, std::shared_ptr<BlockStore>>(module, "BlockStore")
      .def_property_readonly("tier", &BlockStore::tier)
      .def("flush", &BlockStore::Flush, py::call_guard<GilReleased>())
      .def(
          "clear", [](BlockStore& store) { store.Clear(nullptr); },
          py::call_guard<GilReleased>())
      .def("stats", &StoreStatsOf);
  RegisterFolderStore(module);

  py::class_<PrefixCache, std::shared_ptr<PrefixCache>>(module, "PrefixCache")
      .def(py::init<size_t>(), py::arg("ram_bytes"))
      .def_property_readonly(
          "ram_bytes",
          [](const PrefixCache& cache) { return cache.index().budget_bytes(); })
      .def("stats", &StatsOf)
      .def("clear", &PrefixCache::Clear,
           py::call_guard<GilReleased>());

  module.def(
      "with_prefix_cache",
      [](const Gemma& gemma, const std::shared_ptr<PrefixCache>& cache,
         const std::string& salt) {
        return Unlocked(gemma.WithPrefix(
            cache ? gemma.MakePrefixView(cache, AsBytes(salt)) : nullptr));
      },
      py::arg("engine"), py::arg("cache"), py::arg("salt"),
      "The same model, whose requests use the cache; None: none.");
  module.def("prefix_match", &Match, py::arg("engine"), py::arg("cache"),
             py::arg("tokens"),
             "Fills an empty cache with what is known of the tokens.");
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
