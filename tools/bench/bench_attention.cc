// Measures attention of Gemma 3 270M's shape (4 query heads on one kv head of
// 256), per KV dtype, beside what the machine can do (MachineProbe).
//
//   bench_attention [threads] [f32|bf16|int8|all] [target]
//
// GFLOP/s counts 4 * head_dim for each query and visible position. GB/s counts
// the stored keys and values, read once for all queries of a tile. Rates are
// those of the best of repeated runs. The share is that of float multiply-adds
// on registers with as many threads, measured right before.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/fp_environment.h"
#include "base/thread_pool.h"
#include "gemmakv/kv_dtype.h"
#include "ops/attention.h"
#include "ops/kv_strip.h"
#include "ops/machine_probe.h"
#include "ops/target.h"

namespace gkv {
namespace {

constexpr size_t kHeadDim = 256;
constexpr size_t kHeads = 4;
constexpr size_t kBlockTokens = 32;
constexpr size_t kRowsPerTile = kMaxBlockQueries / kHeads;
constexpr size_t kTokens = 16384;

double Now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Returns the seconds of the best of repeated runs within about `budget`
// seconds.
template <typename Fn>
double Best(double budget, const Fn& fn) {
  fn();
  double best = 1e30;
  size_t runs = 0;
  const double begin = Now();
  while (runs < 5 || Now() - begin < budget) {
    const double start = Now();
    fn();
    best = std::min(best, Now() - start);
    ++runs;
  }
  return best;
}

// Keys and values of positions [0, tokens), and one row of queries per
// position.
struct Problem {
  KvDtype dtype;
  size_t tokens;
  std::vector<AlignedBuffer<uint8_t>> blocks;
  std::vector<const uint8_t*> addresses;
  size_t strip_bytes;
  AlignedBuffer<float> q, out;  // [tokens, kHeads, kHeadDim]

  Problem(KvDtype dtype, size_t tokens)
      : dtype(dtype),
        tokens(tokens),
        strip_bytes(KvStripBytes(dtype, kBlockTokens, kHeadDim)),
        q(tokens * kHeads * kHeadDim),
        out(tokens * kHeads * kHeadDim) {
    for (size_t i = 0; i < q.size(); ++i) {
      q[i] = (static_cast<float>(i * 2654435761u >> 20 & 255) - 128.0f) / 1e3f;
    }
    for (size_t t = 0; t < tokens; ++t) {
      if (t % kBlockTokens == 0) {
        blocks.emplace_back(2 * strip_bytes);
        addresses.push_back(blocks.back().data());
      }
      uint8_t* block = blocks.back().data();
      StoreKey(dtype, q.data() + t * kHeadDim, kHeadDim, t % kBlockTokens,
               kBlockTokens, block);
      StoreValue(dtype, q.data() + t * kHeadDim, kHeadDim, t % kBlockTokens,
                 kBlockTokens, block + strip_bytes);
    }
  }
  KvHeadView View() const {
    return {addresses.data(), 0, kBlockTokens, 0, strip_bytes, dtype};
  }
  double BytesPerToken() const {
    return 2.0 * static_cast<double>(strip_bytes) / kBlockTokens;
  }
};

// The queries of `rows` rows from `position` on.
struct Tile {
  const float* q[kMaxBlockQueries];
  float* out[kMaxBlockQueries];
  size_t begin[kMaxBlockQueries], end[kMaxBlockQueries];
  size_t count;

  Tile(Problem& p, size_t position, size_t rows, size_t window)
      : count(rows * kHeads) {
    for (size_t i = 0; i < count; ++i) {
      const size_t at = position + i / kHeads;
      const size_t offset = (at * kHeads + i % kHeads) * kHeadDim;
      q[i] = p.q.data() + offset;
      out[i] = p.out.data() + offset;
      begin[i] = at + 1 < window ? 0 : at + 1 - window;
      end[i] = at + 1;
    }
  }
  QueryTile View() const { return {q, begin, end, count, kHeadDim, 0}; }
  double Positions() const {
    double sum = 0;
    for (size_t i = 0; i < count; ++i) {
      sum += static_cast<double>(end[i] - begin[i]);
    }
    return sum;
  }
};

// `peak` is in float operations a second.
void Print(const char* what, double seconds, double positions, double bytes,
           double peak) {
  const double rate = positions * 4 * kHeadDim / seconds;
  std::printf("  %-28s %9.1f us  %6.1f GFLOP/s  %6.1f GB/s  %3.0f %%\n", what,
              seconds * 1e6, rate / 1e9, bytes / seconds / 1e9,
              100 * rate / peak);
}

// Measures one span that every query of a tile sees, in cache.
void MeasureSpan(MachineProbe& probe, Problem& p, size_t rows) {
  const double peak = probe.FloatOpsPerSecond();
  Tile tile(p, kAttentionSpan - 1, rows, kAttentionSpan);
  for (size_t i = 0; i < tile.count; ++i) {
    tile.begin[i] = 0;
    tile.end[i] = kAttentionSpan;
  }
  AlignedBuffer<float> partial(kMaxTileQueries * PartialFloats(kHeadDim));
  constexpr size_t kRepeat = 20;
  const double seconds = Best(0.3, [&] {
    for (size_t i = 0; i < kRepeat; ++i) {
      AttentionSpanPartial(p.View(), tile.View(), 0, partial.data());
    }
  });
  Print(("span, " + std::to_string(tile.count) + " queries").c_str(),
        seconds / kRepeat, tile.Positions(), p.BytesPerToken() * kAttentionSpan,
        peak);
}

// Positions [first, first + tokens).
void MeasurePrefill(MachineProbe& probe, ThreadPool& pool, Problem& p,
                    size_t first, size_t tokens, size_t window) {
  const double peak = probe.FloatOpsPerSecond();
  std::vector<Tile> tiles;
  double positions = 0, bytes = 0;
  for (size_t at = first; at < first + tokens; at += kRowsPerTile) {
    tiles.emplace_back(p, at, kRowsPerTile, window);
    positions += tiles.back().Positions();
    bytes += static_cast<double>(tiles.back().end[kMaxBlockQueries - 1] -
                                 tiles.back().begin[0]) *
             p.BytesPerToken();
  }
  const size_t floats = AttentionTileFloats(kMaxBlockQueries, kHeadDim);
  AlignedBuffer<float> scratch(pool.num_threads() * floats);
  const double seconds = Best(0.5, [&] {
    pool.Run(tiles.size(), [&](size_t task, size_t thread) {
      const ScopedFpEnvironment environment;
      AttentionTile(p.View(), tiles[task].View(),
                    scratch.data() + thread * floats, tiles[task].out);
    });
  });
  Print(("prefill " + std::to_string(tokens) +
         (first > 0 ? " behind " + std::to_string(first) : "") +
         (window < tokens ? ", window " + std::to_string(window) : ""))
            .c_str(),
        seconds, positions, bytes, peak);
}

void MeasureDecode(MachineProbe& probe, ThreadPool& pool, Problem& p,
                   size_t context) {
  const double peak = probe.FloatOpsPerSecond();
  const Tile tile(p, context - 1, 1, context);
  const size_t spans = context / kAttentionSpan;
  const size_t floats = PartialFloats(kHeadDim);
  AlignedBuffer<float> partials(spans * kHeads * floats);
  const double seconds = Best(0.3, [&] {
    pool.Run(spans, [&](size_t span, size_t) {
      const ScopedFpEnvironment environment;
      AttentionSpanPartial(p.View(), tile.View(), span,
                           partials.data() + span * kHeads * floats);
    });
    for (size_t i = 0; i < kHeads; ++i) {
      float* state = partials.data() + i * floats;
      for (size_t span = 1; span < spans; ++span) {
        AttentionMerge(state + span * kHeads * floats, kHeadDim, state);
      }
      AttentionFinish(state, kHeadDim, tile.out[i]);
    }
  });
  Print(("decode at " + std::to_string(context)).c_str(), seconds,
        tile.Positions(), p.BytesPerToken() * static_cast<double>(context),
        peak);
}

void Run(size_t threads, std::string_view dtype, std::string_view target) {
  if (!target.empty()) ForceTarget(target);
  ThreadPool pool(threads);
  MachineProbe alone(1), all(threads);
  std::printf(
      "%s: multiply-add %.1f GFLOP/s on one thread, which spans run on; %.1f "
      "on %zu\n",
      CurrentTarget().c_str(), alone.FloatOpsPerSecond() / 1e9,
      all.FloatOpsPerSecond() / 1e9, threads);
  const std::pair<KvDtype, std::string_view> dtypes[] = {
      {KvDtype::kF32, "f32"},
      {KvDtype::kBF16, "bf16"},
      {KvDtype::kInt8, "int8"}};
  for (const auto& [type, name] : dtypes) {
    if (dtype != "all" && dtype != name) continue;
    std::printf("%s\n", std::string(name).c_str());
    Problem p(type, kTokens);
    for (const size_t rows : {1, 2, 4}) MeasureSpan(alone, p, rows);
    MeasurePrefill(all, pool, p, 0, 2048, kTokens);
    MeasurePrefill(all, pool, p, 0, 2048, 512);
    MeasurePrefill(all, pool, p, kTokens - 128, 128, kTokens);
    for (const size_t context : {512, 2048, 8192}) {
      MeasureDecode(all, pool, p, context);
    }
  }
}

}  // namespace
}  // namespace gkv

int main(int argc, char** argv) {
  try {
    gkv::Run(argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 1,
             argc > 2 ? argv[2] : "bf16", argc > 3 ? argv[3] : "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_attention: %s\n", error.what());
    return 1;
  }
  return 0;
}
