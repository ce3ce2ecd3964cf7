#ifndef GEMMAKV_ENGINE_GEMMA_H_
#define GEMMAKV_ENGINE_GEMMA_H_

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
#include "cache/kv_cache.h"
#include "engine/constraint.h"
#include "engine/drafter.h"
#include "engine/token_stream.h"
#include "engine/vocabulary.h"
#include "gemmakv/config.h"
#include "gemmakv/options.h"
#include "gemmakv/profile.h"
#include "gemmakv/tensor_source.h"
#include "gemmakv/threads.h"
#include "model/create_kv_cache.h"
#include "model/forward.h"
#include "model/weights/packed_weights.h"
#include "model/weights/quantization.h"
#include "store/prefix_cache.h"

namespace gkv {

class Embedder;
class Scheduler;

// A model: immutable weights, and a scheduler that runs any number of
// conversations on them at the same time. Thread-safe. Destroying it cancels
// what is running, and waits for that, unless a step lets go of it, which ends
// by itself.
class Gemma {
 public:
  // Loads a GGUF file. The file is closed again on return, unless the model has
  // a table that is read row by row (RowTable).
  // Throws IoError, CorruptFile, Mismatch, InvalidArgument (threads, quantize).
  static std::shared_ptr<Gemma> Load(const std::string& gguf_path,
                                     const LoadOptions& options = {});
  // Weights from any source; `config` says their shape.
  static std::shared_ptr<Gemma> FromTensors(const ModelConfig& config,
                                            TensorSource& source,
                                            const LoadOptions& options = {});
  ~Gemma();

  const ModelConfig& config() const { return model_->config; }
  // Identity of weights, configuration and arithmetic. Caches are bound to it
  // by their first use.
  Hash128 fingerprint() const;
  // The same on every processor and in every version: that of weights and
  // configuration alone.
  Hash128 weights_fingerprint() const;
  size_t num_threads() const { return num_threads_; }
  const std::vector<MatrixInfo>& matrices() const {
    return model_->weights.matrices;
  }
  // Where the weights are: in a packed file, or in memory and why.
  const PackedReport& packed_report() const { return packed_report_; }
  // Checks weights of a packed file before their first use does, on this
  // thread, for about so many seconds. Whether there are more.
  bool CheckAhead(double seconds) const;
  // Replaces the text of tokens, used for stop strings and streamed text.
  void set_token_text(std::shared_ptr<const TokenText> text);

  // Submits requests, merged into the same steps. The same order comes back.
  // Those that are not streamed succeed together, or one fails or is aborted
  // and all leave their caches as they were. Waits while another request uses
  // one of the caches, calling `poll` now and then, which may throw to give up.
  // Errors, all before any work and with every cache unchanged: InvalidArgument
  // (option, token id out of range, nothing to compute, one cache twice),
  // Mismatch (a cache of another model), CacheFull (a prompt that does not
  // fit), Busy (a cache whose stream waits for its reader), QueueFull.
  struct Job {
    std::shared_ptr<KVCache> cache;
    std::span<const int32_t> prompt;  // may be empty if the cache is not
    GenerateOptions options = {};
    bool streamed = false;  // tokens are read one by one, see TokenStream
    // When it ends at the latest, with what it has then.
    std::optional<std::chrono::steady_clock::time_point> deadline = {};
    // What tokens may come; cloned for each request.
    std::shared_ptr<const Constraint> constraint = nullptr;
    // This request's alone; null: what its options say.
    std::shared_ptr<Drafter> drafter = nullptr;
    PrefixAccess prefix = {};  // its view, if any, instead of WithPrefix's
    // The prompt begins with BOS, for an empty conversation; another goes
    // without. Known only once nobody else uses the cache.
    bool optional_bos = false;
  };
  std::vector<std::shared_ptr<TokenStream>> Start(
      std::span<const Job> jobs, const std::function<void()>& poll = {});
  // The same without waiting: none if a cache is in use; `on_free` is called
  // when it is free. `wait`: the caller's, the same at each attempt.
  std::vector<std::shared_ptr<TokenStream>> TryStart(
      std::span<const Job> jobs, LockWait& wait,
      const RunGate::Callback& on_free);
  // Has [all_positions ? tokens.size() : 1, row size] written to `rows`: logits
  // or hidden states.
  std::shared_ptr<TokenStream> StartRows(
      const std::shared_ptr<KVCache>& cache, std::span<const int32_t> tokens,
      RowOutput::Kind kind, bool all_positions, float* rows,
      const std::function<void()>& poll = {}, const PrefixAccess& prefix = {});
  std::shared_ptr<TokenStream> StartLogits(
      const std::shared_ptr<KVCache>& cache, std::span<const int32_t> tokens,
      bool all_positions, float* logits,
      const std::function<void()>& poll = {}) {
    return StartRows(cache, tokens, RowOutput::kLogits, all_positions, logits,
                     poll);
  }

  // Vectors of length 1 of texts, [texts.size(), dim], as
  // include/gemmakv/gemma.h says. Of a bidirectional model by the Embedder; of
  // others each text is a conversation of its own, which nobody sees.
  std::vector<float> Embed(std::span<const std::span<const int32_t>> texts,
                           const EmbedOptions& options = {},
                           const std::function<void()>& poll = {});

  // The prefix cache as this model sees it, for a tenant.
  std::shared_ptr<PrefixView> MakePrefixView(
      std::shared_ptr<PrefixCache> cache, std::span<const uint8_t> salt) const;
  // The same model, weights and scheduler, whose requests use the view as their
  // options say; null: none.
  std::shared_ptr<Gemma> WithPrefix(std::shared_ptr<PrefixView> view) const;
  // The same model, weights and scheduler, for requests of a tenant: guesses
  // follow from what others of the same one said. WithPrefix takes the tenant
  // of its view, if any.
  std::shared_ptr<Gemma> WithSalt(std::span<const uint8_t> salt) const;
  // The same model, weights and scheduler, whose requests may ask `draft`, with
  // Speculate::kDraft, what comes next; null: none. Its weights stay for as
  // long as this does. Throws InvalidArgument for this very model or one of
  // embeddings, or if this one generates nothing, and Mismatch for another
  // vocabulary.
  std::shared_ptr<Gemma> WithDraft(const std::shared_ptr<const Gemma>& draft)
      const;
  bool has_draft() const { return draft_ != nullptr; }
  // Throws what a request with this conversation would, whatever its prompt:
  // Mismatch if it was made for another shape or holds what other weights
  // computed. Waits for no request.
  void CheckFits(const KVCache& cache) const;
  const std::shared_ptr<PrefixView>& prefix_view() const {
    return prefix_.view;
  }

  // What the draft, which must be a drafter, says behind `tokens`, of which
  // there are two at least: [guesses, vocab_size] logits. Each guess is the
  // token of the largest logit before. On the calling thread, for tests and
  // measurements; requests have their drafter asked between steps. Throws
  // InvalidArgument for a model without a drafter, for tokens that are none,
  // and for guesses outside [1, kMaxDraftLogits].
  static constexpr size_t kMaxDraftLogits = 1024;
  std::vector<float> DraftLogits(std::span<const int32_t> tokens,
                                 size_t guesses,
                                 const std::function<void()>& poll = {});

  // Generates on the calling thread's time. `on_token` runs on the calling
  // thread after each token; false cancels.
  GenerateResult Generate(
      const std::shared_ptr<KVCache>& cache, std::span<const int32_t> prompt,
      const GenerateOptions& options = {},
      const std::function<bool(const TokenEvent&)>& on_token = {});

  // What it has done so far, in this process: a child of fork() begins with
  // none of it.
  struct Stats {
    size_t steps = 0;
    size_t parallel_loops = 0;  // that the steps took
    size_t preemptions = 0;     // requests that gave way to others, for memory
    size_t draft_rows = 0;      // that draft models computed
    size_t looks = 0;           // see Scheduler::looks
  };
  Stats stats() const;
  // Where its threads compute. In a child of fork() they are not pinned.
  ThreadPlacement placement() const;
  // Whether steps are timed part by part.
  bool profiled() const { return profiled_; }
  // Where the time of all steps so far went. Throws InvalidArgument if they are
  // not timed.
  StepProfile profile() const;

 private:
  // What all that WithPrefix gives have in common.
  struct Shared {
    ~Shared();
    // Those of this process; null: it has made none.
    const Scheduler* own_scheduler() const REQUIRES(mutex);
    const Embedder* own_embedder() const REQUIRES(mutex);

    mutable Mutex mutex{AtFork::kWaits};
    std::shared_ptr<const TokenText> token_text GUARDED_BY(mutex);
    std::unique_ptr<Scheduler> scheduler GUARDED_BY(mutex);
    OwnProcess scheduler_process GUARDED_BY(mutex);
    std::unique_ptr<Embedder> embedder GUARDED_BY(mutex);
    OwnProcess embedder_process GUARDED_BY(mutex);
  };

  Gemma(ModelConfig config, Weights weights, size_t num_threads,
        std::shared_ptr<const PinnedProcessors> pinned,
        PackedReport packed_report, const LoadOptions& options);
  Gemma(const Gemma&);
  void CheckTokens(const KVCache& cache, std::span<const int32_t> tokens) const;
  void CheckCache(const KVCache& cache) const;
  std::vector<std::shared_ptr<TokenStream>> StartLocked(
      std::span<const Job> jobs,
      const std::function<RunLock(KVCache&)>& lock_cache);
  std::shared_ptr<const TokenText> token_text() const;
  Scheduler& scheduler();
  Embedder& embedder();
  void CheckTexts(std::span<const std::span<const int32_t>> texts) const;
  void HiddenStates(std::span<const std::span<const int32_t>> texts,
                    Pooling pooling, float* out,
                    const std::function<void()>& poll);

  std::shared_ptr<const Model> model_;
  size_t num_threads_;
  std::shared_ptr<const PinnedProcessors> pinned_;  // null: threads are not
  PackedReport packed_report_;
  SchedulerOptions scheduler_options_;
  bool profiled_;
  std::shared_ptr<Shared> shared_;
  PrefixAccess prefix_;
  Address tenant_ = {};
  std::shared_ptr<const Model> draft_;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_GEMMA_H_
