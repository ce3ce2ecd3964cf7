#ifndef GEMMAKV_OPTIONS_H_
#define GEMMAKV_OPTIONS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gemmakv/kv_dtype.h"
#include "gemmakv/tensor_type.h"

namespace gkv {

class BlockPool;

// May change one row of logits [vocab_size] before a token is drawn from it,
// given all tokens of the conversation so far. Called on any thread, once for
// each token of a request, in order. An exception fails the request. It must
// not use the model.
using LogitsProcessor = std::function<void(std::span<const int32_t> token_ids,
                                           std::span<float> logits)>;

// How a request uses the prefix cache of its model, if that has one.
enum class PrefixMode {
  kOff,
  kRead,   // takes over known prefixes
  kWrite,  // publishes what it computes
  kOn,     // both
};

// The source of guesses, which steps check along with the next token
// (speculative decoding). The source changes nothing of the result but the time
// that it takes.
enum class Speculate {
  kOff,
  kLookup,  // what followed earlier occurrences of the last tokens, in the
            // conversation or in other texts of its tenant; the default
  kDraft,   // a draft model, see Gemma::WithDraft
};

// How one request samples and when it stops. Defaults: greedy, 256 tokens.
//
// A token is drawn in this order: logits_processor; logit_bias, repetition,
// presence and frequency penalties, the ban of min_tokens; temperature; top_k;
// top_p of what is left; min_p; then one draw that depends on (seed, position)
// alone. Temperature 0 takes the largest logit after bias and penalties.
struct GenerateOptions {
  size_t max_tokens = 256;       // 0 computes the prompt only
  size_t min_tokens = 0;         // none of the first so many tokens is a stop
                                 // id or completes a stop string that counts
  float temperature = 0;         // >= 0
  size_t top_k = 0;              // 0: no limit
  float top_p = 1;               // (0, 1]
  float min_p = 0;               // [0, 1]: relative to the likeliest token
  float repetition_penalty = 1;  // > 0; divides positive logits of tokens in
                                 // the transcript, multiplies negative ones
  float presence_penalty = 0;    // subtracted once per token generated before
  float frequency_penalty = 0;   // subtracted per occurrence in the generated
  std::vector<std::pair<int32_t, float>> logit_bias;  // -inf bans a token
  std::optional<uint64_t> seed;   // nullopt: drawn, and reported
  std::vector<std::string> stop;  // UTF-8; the text ends before the first one
  std::vector<int32_t> stop_token_ids;  // end the request, as eos does
  bool ignore_eos = false;  // the model's eos ids are tokens like any other
  PrefixMode prefix_cache = PrefixMode::kOn;
  Speculate speculate = Speculate::kLookup;
  bool logprobs = false;  // log-probability of each token under the raw logits
  size_t top_logprobs = 0;  // the same of so many likeliest; implies logprobs
  LogitsProcessor logits_processor;  // slow: copies, and needs all logits
  std::optional<double> deadline;    // seconds from the call, >= 0; it ends
                                     // then, with what it has
  // As `stop`, for a reply that is shown without the white space that it begins
  // with: no stop string begins there.
  std::vector<std::string> reply_stop;

  bool WantsLogprobs() const { return logprobs || top_logprobs > 0; }
  // Throws InvalidArgument that names the option, its value and what it may be.
  void Validate(size_t vocab_size) const;
};

// Limits and formats of a conversation.
struct CacheOptions {
  size_t capacity_tokens = 0;  // 0: the model's context length
  KvDtype kv_dtype = KvDtype::kBF16;
  size_t block_tokens = 64;  // power of two, 16..128
  // The most bytes that all checkpoints of the conversation hold. Default: four
  // times what one checkpoint holds. 0: none.
  std::optional<size_t> checkpoint_bytes = std::nullopt;
  std::shared_ptr<BlockPool> pool = nullptr;  // null: one without a budget
};

// How a text's vector is made of its hidden states after the final norm.
enum class Pooling {
  kModel,  // as the model was trained; not for models that generate
  kMean,   // for models that generate: the mean over all positions
  kLast,   // for models that generate: the last position
};

// Options of Gemma::Embed.
struct EmbedOptions {
  size_t dim = 0;  // one of EmbeddingDims; 0: the full length
  Pooling pooling = Pooling::kModel;
};

// Called now and then on the loading thread with the bytes done and in total.
// An exception ends the load.
using LoadProgress = std::function<void(size_t done, size_t total)>;

// Limits of a model's scheduler. Results do not depend on them.
struct SchedulerOptions {
  // The most rows of one step, >= 2; more only for a span that must not be cut.
  size_t step_rows = 128;
  // The most prefill rows of a step that also decodes: bounds how long a
  // running conversation waits for its next token while others read long
  // prompts.
  size_t prefill_rows_while_decoding = 64;
  // The most rows of logits of one step, >= 2: bounds the extra memory.
  size_t logits_rows = 32;
  // The most guesses that one step takes for a sequence; at most three quarters
  // of logits_rows, less one. Nor more than leave a quarter of step_rows to
  // prompts.
  size_t max_guesses = 15;
  // Makes guesses whether they pay or not: for tests, and to measure them.
  bool always_guess = false;
  // The most bytes of keys and values of a draft model, including those of
  // conversations that may come back. A conversation that finds no room has no
  // guesses. 0: no limit.
  size_t draft_cache_bytes = size_t{512} << 20;
  // The most requests that run at the same time, not counting those that wait
  // for their readers. The others wait, first come, first served.
  size_t max_running = 256;
  // The most requests that wait beyond max_running; more are refused with
  // QueueFull.
  size_t max_queued = std::numeric_limits<size_t>::max() / 2;

  // Throws InvalidArgument that names the option, its value and what it may be.
  void Validate() const;
};

// How a model is loaded.
struct LoadOptions {
  size_t threads = 0;  // 0: the processors that this process may use
  // Each thread stays on a processor of its own: first one on each core, NUMA
  // node after node. More threads than processors are InvalidArgument. See
  // Gemma::placement.
  bool pin_threads = false;
  LoadProgress progress;
  // The type to which float matrices are quantized while they are loaded: Q8_0,
  // Q5_0, Q4_0 or BF16.
  std::optional<TensorType> quantize;
  // The folder for files of packed weights, which a later load maps; empty:
  // weights are packed into this process's memory.
  std::string packed_folder;
  SchedulerOptions scheduler;
  // Whether steps are timed part by part, see Gemma::profile.
  bool profile = false;
};

}  // namespace gkv

#endif  // GEMMAKV_OPTIONS_H_
