// Measures the cost of forks, checkpoints, rewinding and snapshots without a
// model: blocks are taken as the engine takes them and filled with numbers.
//
//   bench_cache [model type] [tokens]        default: gemma3-270m 30000
//
// Times are those of the best of repeated runs. Memory is what malloc handed
// out.

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "cache/conversation.h"
#include "model/create_conversation.h"

namespace gkv {
namespace {

constexpr size_t kStepTokens = 128;
constexpr size_t kSnapshotTokens = 2048;
constexpr size_t kForks = 100;
constexpr size_t kTurnTokens = 300;

template <typename Fn>
double Milliseconds(size_t runs, const Fn& fn) {
  double best = 1e9;
  for (size_t i = 0; i < runs; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    fn();
    const std::chrono::duration<double, std::milli> took =
        std::chrono::steady_clock::now() - begin;
    best = std::min(best, took.count());
  }
  return best;
}

double Mebibytes(size_t bytes) { return static_cast<double>(bytes) / 0x1p20; }

void Extend(Conversation& cache, size_t length) {
  cache.Append(cache.Lock(), std::vector<int32_t>(length - cache.length(), 7));
  for (size_t at = cache.next_position(); at < length; at += kStepTokens) {
    KvStepView step = cache.Prepare(cache.Lock(), at, std::min(length, at + kStepTokens));
    for (const GroupStep& group : step.groups) {
      for (const auto& [index, block] : group.fresh) {
        std::memset(block.data(), static_cast<int>(1 + at % 100),
                    block.size_bytes());
      }
    }
    cache.Commit(cache.Lock(), step);
  }
}

std::shared_ptr<Conversation> Make(ModelType type,
                                   const std::shared_ptr<BlockPool>& pool) {
  return CreateConversation(type, {.pool = pool});
}

void Forks(ModelType type, size_t tokens) {
  const auto pool = BlockPool::Create();
  const auto cache = Make(type, pool);
  Extend(*cache, tokens);
  const size_t used = pool->bytes_in_use();
  const size_t before = mallinfo2().uordblks;
  std::vector<std::unique_ptr<Conversation>> forks;
  const double took =
      Milliseconds(kForks, [&] { forks.push_back(cache->Fork()); });
  const size_t memory = (mallinfo2().uordblks - before) / kForks;
  std::printf("fork at %zu tokens (%.1f MiB): %.4f ms, %.1f KiB of memory\n",
              tokens, Mebibytes(used), took,
              static_cast<double>(memory) / 1024);
  std::printf("%zu forks: %.1f MiB of blocks more\n", kForks,
              Mebibytes(pool->bytes_in_use() - used));
  const size_t own = pool->bytes_in_use();
  Extend(*forks[0], tokens + 1);
  std::printf("the first token after a fork copies %.2f MiB\n",
              Mebibytes(pool->bytes_in_use() - own));
}

void Checkpoints(ModelType type, size_t tokens) {
  const auto cache = Make(type, BlockPool::Create());
  double mark = 0;
  for (size_t at = kTurnTokens; at <= tokens; at += kTurnTokens) {
    Extend(*cache, at);
    mark = std::max(mark, Milliseconds(1, [&] { cache->MakeCheckpoint(); }));
  }
  const std::vector<size_t> kept = cache->CheckpointLengths();
  std::printf(
      "%zu turns of %zu tokens: %zu checkpoints stay in %.1f MiB, "
      "the slowest took %.4f ms\n",
      tokens / kTurnTokens, kTurnTokens, kept.size(),
      Mebibytes(cache->checkpoint_bytes()), mark);
  size_t replay = 0;
  double slowest = 0;
  for (const size_t length : kept) {
    const auto fork = cache->Fork();
    slowest = std::max(slowest, Milliseconds(1, [&] {
                         replay += fork->Truncate(length).replay_tokens;
                       }));
  }
  std::printf(
      "truncating to each of them: at most %.4f ms, %zu tokens to "
      "replay\n",
      slowest, replay);
}

void Snapshots(ModelType type) {
  const auto pool = BlockPool::Create();
  const auto cache = Make(type, pool);
  Extend(*cache, kSnapshotTokens);
  std::vector<uint8_t> bytes;
  const double save = Milliseconds(20, [&] { bytes = cache->ToBytes(); });
  const double load =
      Milliseconds(50, [&] { Conversation::FromBytes(bytes, {.pool = pool}); });
  const double cold = Milliseconds(5, [&] {
    Conversation::FromBytes(bytes, {.pool = BlockPool::Create()});
  });
  std::printf(
      "snapshot of %zu tokens: %.1f MiB, saved in %.2f ms, restored in "
      "%.2f ms (%.2f ms into fresh memory)\n",
      kSnapshotTokens, Mebibytes(bytes.size()), save, load, cold);
}

int Main(int argc, char** argv) {
  const ModelType type = ModelTypeFromName(argc > 1 ? argv[1] : "gemma3-270m");
  const size_t tokens =
      argc > 2 ? static_cast<size_t>(std::atoll(argv[2])) : 30000;
  Forks(type, tokens);
  Checkpoints(type, tokens);
  Snapshots(type);
  return 0;
}

}  // namespace
}  // namespace gkv

int main(int argc, char** argv) {
  try {
    return gkv::Main(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_cache: %s\n", error.what());
    return 1;
  }
}
