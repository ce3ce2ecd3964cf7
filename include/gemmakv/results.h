#ifndef GEMMAKV_RESULTS_H_
#define GEMMAKV_RESULTS_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace gkv {

enum class FinishReason { kNone, kStop, kLength, kDeadline, kCancelled };

struct TokenLogprob {
  int32_t id = -1;  // none: every likelier token has been named
  float logprob = -std::numeric_limits<float>::infinity();
};

// One sampled token. `text` holds the bytes that became final with it: it may
// be empty (part of a possible stop string is held back) and may end inside a
// UTF-8 sequence. The last event of a request that did not fail has a
// finish_reason; it has token_id -1 if no token came with the end.
struct TokenEvent {
  int32_t token_id = -1;
  float logprob = 0;  // NaN unless asked for
  std::string text = {};
  FinishReason finish_reason = FinishReason::kNone;
  std::vector<TokenLogprob> top_logprobs = {};  // [options.top_logprobs]
};

// Why a prompt, or the rest of it, did not come from the prefix cache.
enum class PrefixMiss {
  kNone,           // nothing was missed, or the cache was not used
  kDivergent,      // the first unknown token ended it
  kEvicted,        // more was known once
  kNoResumePoint,  // all is known, but there is no resume point near
  kCheaper,        // what is known is as quick to compute
};
inline constexpr size_t kPrefixMisses = 5;

// The tiers of the prefix cache.
enum class PrefixTier { kRam, kShared, kDisk, kRemote };
inline constexpr size_t kPrefixTiers = 4;

// What a request took over from the prefix cache.
struct PrefixHit {
  // Tokens that needed no computing, by the tier that they came from.
  size_t ram = 0;
  size_t shared = 0;
  size_t disk = 0;
  size_t remote = 0;
  PrefixMiss miss = PrefixMiss::kNone;

  size_t& of(PrefixTier tier) {
    size_t* const all[kPrefixTiers] = {&ram, &shared, &disk, &remote};
    return *all[static_cast<size_t>(tier)];
  }
  size_t total() const { return ram + shared + disk + remote; }
};

struct GenerateResult {
  std::vector<int32_t> token_ids;  // all sampled, the stopping one last
  std::string text;                // without eos and stop string
  std::vector<float> logprobs;     // empty unless asked for
  // [token_ids.size(), options.top_logprobs], the likeliest first.
  std::vector<TokenLogprob> top_logprobs;
  uint64_t seed = 0;
  FinishReason finish_reason = FinishReason::kNone;
  size_t prompt_tokens = 0;  // of this request's prompt
  size_t cached_tokens = 0;  // transcript tokens that needed no computing
  PrefixHit prefix;          // of those, from the prefix cache
  size_t drafted = 0;        // tokens that were guessed, see Speculate
  size_t accepted = 0;       // of those, that were right
  double prefill_s = 0;      // from submission to the first logits
  double decode_s = 0;
};

struct Truncation {
  // The number of tokens that the next use recomputes before it can go on: 0 if
  // everything that the kept tokens need is still held.
  size_t replay_tokens = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_RESULTS_H_
