#ifndef GEMMAKV_ENGINE_SAMPLER_H_
#define GEMMAKV_ENGINE_SAMPLER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/thread_pool.h"
#include "engine/ranking.h"
#include "gemmakv/options.h"
#include "gemmakv/results.h"

namespace gkv {

struct SampledToken {
  int32_t id;     // -1: every token is masked or NaN
  float logprob;  // under the raw logits; NaN unless asked for
  std::vector<TokenLogprob> top = {};  // [options.top_logprobs], the same
};

// Draws the tokens of one request. Not thread-safe.
class Sampler {
 public:
  // `transcript` holds the tokens before the first draw; it is read only if
  // ReadsTranscript(options). Requires: valid options.
  Sampler(const GenerateOptions& options, uint64_t seed,
          std::span<const int32_t> transcript);

  // Draws the token for `position` from one row of logits and remembers it.
  // May change the row. `pool` as in parallel_logits.h; with `allowed`, only
  // the tokens with a bit in it, see Constraint; never one of `banned`.
  // Throws std::bad_alloc and what the logits processor throws.
  SampledToken Next(std::span<float> logits, size_t position,
                    ThreadPool* pool = nullptr,
                    std::span<const uint32_t> allowed = {},
                    std::span<const int32_t> banned = {});

  // Returns how many of a row's largest logits decide what Next draws; 0: all
  // may.
  static size_t DecidingLogits(const GenerateOptions& options);
  // Returns what Next draws from a row, given its deciding logits and maybe
  // others in `largest`. Only for options with which nothing is remembered.
  // Throws std::bad_alloc. Requires: DecidingLogits > 0.
  SampledToken NextOf(const TokenList& largest, size_t position);

  // Returns the token that Next would draw from the logits of another model for
  // `position`, if the tokens `before` came before it; -1 as above. Remembers
  // nothing, and does not call the logits processor.
  int32_t Guess(std::span<float> logits, size_t position,
                std::span<const int32_t> before, ThreadPool* pool = nullptr,
                std::span<const int32_t> banned = {});

  static bool ReadsTranscript(const GenerateOptions& options) {
    return options.repetition_penalty != 1 || options.logits_processor;
  }

  uint64_t seed() const { return seed_; }

 private:
  void Adjust(std::span<float> logits);
  void AdjustFor(std::span<const int32_t> tokens,
                 std::span<float> logits) const;
  std::vector<TokenLogprob> FindLikeliest(std::span<const float> logits,
                                          float log_sum) const;
  int32_t Draw(std::span<const float> logits, size_t position,
               ThreadPool* pool);
  int32_t DrawFromAll(std::span<const float> logits, const Softmax& softmax,
                      double uniform, ThreadPool* pool) const;
  int32_t DrawFromLargest(const TokenList& candidates, double uniform);
  int32_t DrawFromNucleus(std::span<const float> logits, const Softmax& softmax,
                          double uniform, ThreadPool* pool);
  int32_t DrawFromFirst(size_t count, double mass, double uniform);

  GenerateOptions options_;
  uint64_t seed_;
  Ranking ranking_;
  TokenList candidates_, largest_;                   // kept for their memory
  std::unordered_map<int32_t, uint32_t> generated_;  // occurrences
  std::unordered_map<int32_t, uint32_t> transcript_;
  std::vector<int32_t> tokens_;  // the transcript, for the logits processor
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_SAMPLER_H_
