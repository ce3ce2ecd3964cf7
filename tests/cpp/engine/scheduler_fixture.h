#ifndef GEMMAKV_TESTS_CPP_ENGINE_SCHEDULER_FIXTURE_H_
#define GEMMAKV_TESTS_CPP_ENGINE_SCHEDULER_FIXTURE_H_

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/error.h"
#include "engine/engine.h"
#include "engine/random_requests.h"
#include "model/tiny_model.h"

namespace gkv {

using Tokens = std::vector<int32_t>;
using Streams = std::vector<std::shared_ptr<TokenStream>>;
using Clock = std::chrono::steady_clock;
constexpr size_t kVocab = kTinyVocab;

// A model with random weights and a pool whose freed blocks are poisoned, for
// requests that share its steps.
class SchedulerTest : public ::testing::TestWithParam<std::string> {
 protected:
  void Load(const SchedulerOptions& scheduler = {},
            const std::string& family = "gemma3") {
    const TinyOptions tiny = TypesAround(TinyFamily(family));
    MemorySource source = TinyTensors(tiny);
    LoadOptions options;
    options.threads = 2;
    options.scheduler = scheduler;
    gemma_ = Engine::FromTensors(TinyConfig(tiny), source, options);
    std::vector<std::string> texts;
    for (size_t i = 0; i < kVocab; ++i) {
      texts.push_back("<" + std::to_string(i) + ">");
    }
    gemma_->set_token_text(std::make_shared<TokenText>(
        std::vector<std::string_view>(texts.begin(), texts.end())));
  }

  std::shared_ptr<Conversation> NewCache(
      size_t capacity = 0, std::shared_ptr<BlockPool> pool = nullptr) {
    return CreateConversation(gemma_->config(), {.capacity_tokens = capacity,
                                                 .block_tokens = 16,
                                                 .pool = pool ? pool : pool_});
  }

  static GenerateOptions NoStop(size_t max_tokens) {
    GenerateOptions options;
    options.max_tokens = max_tokens;
    options.ignore_eos = true;
    return options;
  }
  // Still at it when a thread that was not let run for a while looks again.
  static GenerateOptions Slow(
      GenerateOptions options,
      std::chrono::milliseconds pause = std::chrono::milliseconds(4)) {
    options.logits_processor = [pause](auto...) {
      std::this_thread::sleep_for(pause);
    };
    return options;
  }
  static GenerateOptions Sampled(size_t max_tokens, uint64_t seed) {
    GenerateOptions options = NoStop(max_tokens);
    options.temperature = 1.2f;
    options.logprobs = true;
    options.seed = seed;
    return options;
  }

  // Of the blocks of `tokens` tokens: more than a prefill of them takes.
  size_t BytesOf(size_t tokens) {
    const auto cache = NewCache();
    size_t bytes = 0;
    for (const KvGroup& group : cache->layout().groups()) {
      bytes += group.block_bytes * (tokens / 16 + 2);
    }
    return bytes;
  }

  static void Wait(const Streams& streams) {
    for (const auto& stream : streams) stream->WaitDone();
  }

  // The smallest pool, to 4 KiB, of at least `bytes`, in which `run` has room.
  static std::shared_ptr<BlockPool> LeastPool(
      size_t bytes,
      const std::function<void(const std::shared_ptr<BlockPool>&)>& run) {
    constexpr size_t kStep = 4096;
    const auto fits = [&](size_t steps) {
      try {
        run(BlockPool::Create(bytes + steps * kStep));
        return true;
      } catch (const CacheFull&) {
        return false;
      }
    };
    size_t below = 0, enough = 0;  // has room; the sizes before `below` have not
    for (; !fits(enough); enough = 2 * enough + 1) below = enough + 1;
    while (below < enough) {
      const size_t middle = (below + enough) / 2;
      if (fits(middle)) {
        enough = middle;
      } else {
        below = middle + 1;
      }
    }
    return BlockPool::Create(bytes + enough * kStep);
  }

  std::shared_ptr<BlockPool> pool_ = [] {
    auto pool = BlockPool::Create();
    pool->set_poison(true);
    return pool;
  }();
  std::shared_ptr<Engine> gemma_;
  const Tokens prompt_ = {2, 5, 7};
};

}  // namespace gkv

#endif  // GEMMAKV_TESTS_CPP_ENGINE_SCHEDULER_FIXTURE_H_
