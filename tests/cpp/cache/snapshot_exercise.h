#ifndef GEMMAKV_TESTS_CPP_CACHE_SNAPSHOT_EXERCISE_H_
#define GEMMAKV_TESTS_CPP_CACHE_SNAPSHOT_EXERCISE_H_

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "cache/conversation.h"

// Restores a snapshot of unknown origin and uses what comes of it in every way
// that needs no model: what the fuzzer and tests of damaged snapshots share.

namespace gkv {

struct SnapshotOutcome {
  bool accepted = false;
  std::string message;    // of the error that refused it
  std::string violation;  // what broke the contract; empty if nothing
};

namespace snapshot_exercise {

inline constexpr size_t kBudgetBytes = size_t{8} << 20;
inline constexpr size_t kBlockTokens = 16;

inline CacheOptions Options(const std::shared_ptr<BlockPool>& pool) {
  CacheOptions options;
  options.block_tokens = kBlockTokens;
  options.pool = pool;
  return options;
}

// A message is one line of printable ASCII.
inline std::string CheckMessage(std::string_view message) {
  if (message.empty()) return "a message is empty";
  for (const char c : message) {
    if (c < 0x20 || c > 0x7E) return "a message has unprintable bytes";
  }
  return {};
}

// Computes the next positions, as the engine would, without keys or values.
inline void Step(Conversation& cache) {
  const size_t begin = cache.next_position_for_logits();
  const size_t end = std::min(begin + 20, cache.length());
  KvStepView step = cache.Prepare(cache.Lock(), begin, end);
  cache.Commit(cache.Lock(), step);
}

inline std::string CheckLayers(const Conversation& cache) {
  const std::vector<KvLayerSpec>& layers = cache.layout().layers();
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto [begin, end] = cache.HeldRange(i);
    if (begin > end || end > cache.length()) {
      return StrCat("layer ", i, " holds [", begin, ", ", end, ") of ",
                    cache.length());
    }
    if (layers[i].kind == LayerKind::kRecurrent) {
      cache.CopyLayerState(i);
    } else if (cache.CopyLayer(i, false).size() !=
               (end - begin) * layers[i].kv_heads * layers[i].head_dim) {
      return StrCat("layer ", i, ": the copy has another size");
    }
  }
  return {};
}

// Rewinds to `keep` and goes on. Everything here may run out of blocks, and
// nothing else may happen.
inline std::string Rewind(const Conversation& cache, size_t keep) {
  const auto fork = cache.Fork();
  const Truncation cost = fork->Truncate(keep);
  if (cost.replay_tokens > keep) return "a replay longer than the cache";
  if (keep > 0) Step(*fork);
  if (fork->capacity_tokens() > keep) {
    const int32_t token = 1;
    fork->Append(fork->Lock(), {&token, 1});
    Step(*fork);
    fork->MakeCheckpoint();
  }
  return CheckLayers(*fork);
}

inline std::string CheckCheckpoints(const Conversation& cache) {
  size_t last = 0;
  for (const size_t length : cache.CheckpointLengths()) {
    if (length < last || length > cache.length()) {
      return "checkpoints are out of order or range";
    }
    last = length;
    const auto fork = cache.Fork();
    if (fork->Truncate(length).replay_tokens != 0) {
      return "rewinding to a checkpoint costs a replay";
    }
    if (std::string problem = Rewind(cache, length); !problem.empty()) {
      return problem;
    }
  }
  return {};
}

inline std::string Use(Conversation& cache,
                       const std::shared_ptr<BlockPool>& pool) {
  for (const bool checkpoints : {true, false}) {
    const std::vector<uint8_t> bytes = cache.ToBytes(checkpoints);
    const auto again = Conversation::FromBytes(bytes, Options(pool));
    if (again->ToBytes(checkpoints) != bytes) return "a second one differs";
    if (again->tokens() != cache.tokens()) return "restored tokens differ";
    if (checkpoints &&
        again->CheckpointLengths() != cache.CheckpointLengths()) {
      return "restored checkpoints differ";
    }
  }
  const std::vector<uint8_t> bytes = cache.ToBytes(true);
  if (std::string problem = CheckLayers(cache); !problem.empty()) {
    return problem;
  }
  const size_t length = cache.length();
  for (const size_t keep : {length, length - length / 4, length / 2, length / 8,
                            std::min<size_t>(length, 1)}) {
    if (std::string problem = Rewind(cache, keep); !problem.empty()) {
      return problem;
    }
  }
  if (std::string problem = CheckCheckpoints(cache); !problem.empty()) {
    return problem;
  }
  if (cache.ToBytes(true) != bytes) return "using forks changed their origin";
  return {};
}

}  // namespace snapshot_exercise

// `pool` must have a budget; it holds as many blocks afterwards as before.
inline SnapshotOutcome ExerciseSnapshot(
    std::span<const uint8_t> bytes, const std::shared_ptr<BlockPool>& pool) {
  using namespace snapshot_exercise;
  SnapshotOutcome outcome;
  const size_t blocks = pool->blocks_in_use();
  const auto refused = [&](const std::exception& error) {
    outcome.message = error.what();
    outcome.violation = CheckMessage(outcome.message);
  };
  try {
    const auto cache = Conversation::FromBytes(bytes, Options(pool));
    outcome.accepted = true;
    outcome.violation = Use(*cache, pool);
  } catch (const CorruptFile& error) {
    refused(error);
    if (outcome.accepted) outcome.violation = "its own snapshot is corrupt";
  } catch (const Mismatch& error) {
    refused(error);
    if (outcome.accepted) outcome.violation = "its own snapshot mismatches";
  } catch (const CacheFull& error) {
    refused(error);
  } catch (const std::exception& error) {
    outcome.violation = std::string("threw something else: ") + error.what();
  }
  if (outcome.violation.empty() && pool->blocks_in_use() != blocks) {
    outcome.violation = StrCat(pool->blocks_in_use(), " blocks are in use, ",
                               blocks, " were before");
  }
  return outcome;
}

}  // namespace gkv

#endif  // GEMMAKV_TESTS_CPP_CACHE_SNAPSHOT_EXERCISE_H_
