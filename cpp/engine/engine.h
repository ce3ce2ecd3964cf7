#ifndef GEMMAKV_ENGINE_ENGINE_H_
#define GEMMAKV_ENGINE_ENGINE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/own_process.h"
#include "base/processors.h"
#include "cache/conversation.h"
#include "engine/constraint.h"
#include "engine/drafter.h"
#include "engine/token_stream.h"
#include "engine/vocabulary.h"
#include "gemmakv/config.h"
#include "gemmakv/options.h"
#include "gemmakv/profile.h"
#include "gemmakv/tensor_source.h"
#include "gemmakv/threads.h"
#include "model/create_conversation.h"
#include "model/forward.h"
#include "model/weights/packed_weights.h"
#include "model/weights/quantization.h"
#include "store/prefix_cache.h"

namespace gkv {

class Embedder;
class Scheduler;

// A model: immutable weights, and a scheduler that runs any number of
// conversations on them at the same time. Thread-safe. Destroying a model
// cancels its requests and waits for them, unless a step drops the last
// reference: then another thread ends it.
class Engine {
 public:
  // Loads a GGUF file. The file is closed on return, unless the model has a
  // table that is read row by row (RowTable). Throws IoError, CorruptFile,
  // Mismatch, InvalidArgument (threads, quantize).
  static std::shared_ptr<Engine> Load(const std::string& gguf_path,
                                      const LoadOptions& options = {});
  // Takes weights from any source; `config` says their shape.
  static std::shared_ptr<Engine> FromTensors(const ModelConfig& config,
                                             TensorSource& source,
                                             const LoadOptions& options = {});
  ~Engine();

  const ModelConfig& config() const { return model_->config; }
  // The identity of weights, configuration and arithmetic. A cache is bound to
  // it by its first use.
  Hash128 fingerprint() const;
  // The identity of weights and configuration alone, which is the same on every
  // processor and in every version.
  Hash128 weights_fingerprint() const;
  size_t num_threads() const { return num_threads_; }
  const std::vector<MatrixInfo>& matrices() const {
    return model_->weights.matrices;
  }
  // Says where the weights are: in a packed file, or in memory and why.
  const PackedReport& packed_report() const { return packed_report_; }
  // Checks weights of a packed file before their first use, on this thread, for
  // about so many seconds. Returns whether there are more.
  bool CheckAhead(double seconds) const;
  // Replaces the text of tokens, which is used for stop strings and streamed
  // text.
  void set_token_text(std::shared_ptr<const TokenText> text);

  // Submits one request for each job; they share steps. Returns their streams
  // in the order of the jobs. Requests that are not streamed succeed together,
  // or one fails or is aborted and all leave their caches as they were. Waits
  // while another request uses one of the caches, calling `poll` now and then,
  // which may throw to give up. Throws, before any work and with every cache
  // unchanged, InvalidArgument (an option or token id out of range, nothing to
  // compute, one cache twice), Mismatch (a cache of another model), CacheFull
  // (a prompt that does not fit), Busy (a cache whose stream waits for its
  // reader), QueueFull.
  struct Job {
    std::shared_ptr<Conversation> cache;
    std::span<const int32_t> prompt;  // may be empty if the cache is not
    GenerateOptions options = {};
    bool streamed = false;  // tokens are read one by one, see TokenStream
    // The request ends at this time at the latest, with what it has.
    std::optional<std::chrono::steady_clock::time_point> deadline = {};
    // The tokens that may come; cloned for each request.
    std::shared_ptr<const Constraint> constraint = nullptr;
    // For this request alone; null: as its options say.
    std::shared_ptr<Drafter> drafter = nullptr;
    PrefixAccess prefix = {};  // its view, if it has one, replaces WithPrefix's
    // The prompt begins with BOS, which is left out if the conversation is not
    // empty. This is known only when nobody else uses the cache.
    bool optional_bos = false;
  };
  std::vector<std::shared_ptr<TokenStream>> Start(
      std::span<const Job> jobs, const std::function<void()>& poll = {});
  // The same without waiting: returns no streams if a cache is in use; then
  // `on_free` is called when it is free. `wait` is the caller's, the same at
  // each attempt.
  std::vector<std::shared_ptr<TokenStream>> TryStart(
      std::span<const Job> jobs, LockWait& wait,
      const RunGate::Callback& on_free);
  // Has logits or hidden states written to `rows`, [all_positions ?
  // tokens.size() : 1, row size].
  std::shared_ptr<TokenStream> StartRows(
      const std::shared_ptr<Conversation>& cache,
      std::span<const int32_t> tokens, RowOutput::Kind kind, bool all_positions,
      float* rows, const std::function<void()>& poll = {},
      const PrefixAccess& prefix = {});
  std::shared_ptr<TokenStream> StartLogits(
      const std::shared_ptr<Conversation>& cache,
      std::span<const int32_t> tokens, bool all_positions, float* logits,
      const std::function<void()>& poll = {}) {
    return StartRows(cache, tokens, RowOutput::kLogits, all_positions, logits,
                     poll);
  }

  // Returns vectors of length 1 of texts, [texts.size(), dim], as
  // include/gemmakv/gemma.h says. A bidirectional model makes them by the
  // Embedder; in other models each text is a conversation of its own, which
  // nobody sees.
  std::vector<float> Embed(std::span<const std::span<const int32_t>> texts,
                           const EmbedOptions& options = {},
                           const std::function<void()>& poll = {});

  // Returns the prefix cache as this model sees it, for a tenant.
  std::shared_ptr<PrefixView> MakePrefixView(
      std::shared_ptr<PrefixCache> cache, std::span<const uint8_t> salt) const;
  // Returns the same model, weights and scheduler, whose requests use the view
  // as their options say; null: none.
  std::shared_ptr<Engine> WithPrefix(std::shared_ptr<PrefixView> view) const;
  // Returns the same model, weights and scheduler, for requests of a tenant:
  // guesses follow from requests of the same tenant. WithPrefix takes the
  // tenant of its view, if it has one.
  std::shared_ptr<Engine> WithSalt(std::span<const uint8_t> salt) const;
  // Returns the same model, weights and scheduler, whose requests may use
  // `draft` with Speculate::kDraft; null: none. The draft's weights live as
  // long as the result. Throws InvalidArgument if the draft is this very model
  // or one of embeddings, or if this model generates nothing, and Mismatch for
  // another vocabulary.
  std::shared_ptr<Engine> WithDraft(
      const std::shared_ptr<const Engine>& draft) const;
  bool has_draft() const { return draft_ != nullptr; }
  // Throws what any request with this conversation would throw, whatever its
  // prompt: Mismatch if the cache was made for another shape or holds what
  // other weights computed. Waits for no request.
  void CheckFits(const Conversation& cache) const;
  const std::shared_ptr<PrefixView>& prefix_view() const {
    return prefix_.view;
  }

  // Returns the logits of the draft, which must be a drafter, after `tokens`,
  // of which there are two at least: [guesses, vocab_size]. Each guess is the
  // token of the largest logit before. Runs on the calling thread, for tests
  // and measurements; requests have their drafter asked between steps. Throws
  // InvalidArgument for a model without a drafter, for token ids out of range,
  // and for guesses outside [1, kMaxDraftLogits].
  static constexpr size_t kMaxDraftLogits = 1024;
  std::vector<float> DraftLogits(std::span<const int32_t> tokens,
                                 size_t guesses,
                                 const std::function<void()>& poll = {});

  // Generates, and returns at the end. `on_token` runs on the calling thread
  // after each token; false cancels.
  GenerateResult Generate(
      const std::shared_ptr<Conversation>& cache,
      std::span<const int32_t> prompt, const GenerateOptions& options = {},
      const std::function<bool(const TokenEvent&)>& on_token = {});

  // The work so far in this process: a child of fork() begins with none of it.
  struct Stats {
    size_t steps = 0;
    size_t parallel_loops = 0;  // of the steps
    size_t preemptions = 0;     // of requests, for memory of others
    size_t draft_rows = 0;      // of draft models
    size_t looks = 0;           // see Scheduler::looks
  };
  Stats stats() const;
  // Says where its threads compute. In a child of fork() they are not pinned.
  ThreadPlacement placement() const;
  // Whether steps are timed part by part.
  bool profiled() const { return profiled_; }
  // Returns where the time of all steps so far went. Throws InvalidArgument if
  // they are not timed.
  StepProfile profile() const;

 private:
  // What this model shares with those that WithPrefix, WithSalt and WithDraft
  // return.
  struct Shared {
    ~Shared();
    // The scheduler and the embedder of this process; null: it has made none.
    const Scheduler* own_scheduler() const REQUIRES(mutex);
    const Embedder* own_embedder() const REQUIRES(mutex);

    mutable Mutex mutex{AtFork::kWaits};
    std::shared_ptr<const TokenText> token_text GUARDED_BY(mutex);
    std::unique_ptr<Scheduler> scheduler GUARDED_BY(mutex);
    OwnProcess scheduler_process GUARDED_BY(mutex);
    std::unique_ptr<Embedder> embedder GUARDED_BY(mutex);
    OwnProcess embedder_process GUARDED_BY(mutex);
  };

  Engine(ModelConfig config, Weights weights, size_t num_threads,
         std::shared_ptr<const PinnedProcessors> pinned,
         PackedReport packed_report, const LoadOptions& options);
  Engine(const Engine&);
  void CheckTokens(const Conversation& cache,
                   std::span<const int32_t> tokens) const;
  void CheckCache(const Conversation& cache) const;
  std::vector<std::shared_ptr<TokenStream>> StartLocked(
      std::span<const Job> jobs,
      const std::function<RunLock(Conversation&)>& lock_cache);
  std::shared_ptr<const TokenText> token_text() const;
  Scheduler& scheduler();
  Embedder& embedder();
  void CheckTexts(std::span<const std::span<const int32_t>> texts) const;
  void ComputeHiddenStates(std::span<const std::span<const int32_t>> texts,
                           Pooling pooling, float* out,
                           const std::function<void()>& poll);

  std::shared_ptr<const Model> model_;
  size_t num_threads_;
  // null: threads are not pinned
  std::shared_ptr<const PinnedProcessors> pinned_;
  PackedReport packed_report_;
  SchedulerOptions scheduler_options_;
  bool profiled_;
  std::shared_ptr<Shared> shared_;
  PrefixAccess prefix_;
  Address tenant_ = {};
  std::shared_ptr<const Model> draft_;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_ENGINE_H_
