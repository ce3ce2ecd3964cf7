#ifndef GEMMAKV_GEMMA_H_
#define GEMMAKV_GEMMA_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gemmakv/config.h"
#include "gemmakv/error.h"
#include "gemmakv/hash.h"
#include "gemmakv/kv_cache.h"
#include "gemmakv/options.h"
#include "gemmakv/profile.h"
#include "gemmakv/results.h"
#include "gemmakv/tensor_source.h"
#include "gemmakv/threads.h"

namespace gkv {
inline namespace v0 {

// A model: immutable weights, on which any number of conversations run at the
// same time. Move-only. Calls are safe from any thread; calls of several
// threads share steps, and each gets the same bits as alone. Calls on one
// conversation run one after the other.
class Gemma {
 public:
  // Loads a GGUF file. Throws IoError, CorruptFile, Mismatch, InvalidArgument.
  static Gemma Load(const std::string& gguf_path,
                    const LoadOptions& options = {});
  // Takes weights from any source; `config` says their shape.
  static Gemma FromTensors(const ModelConfig& config, TensorSource& source,
                           const LoadOptions& options = {});
  Gemma(Gemma&&) noexcept;
  Gemma& operator=(Gemma&&) noexcept;
  ~Gemma();

  // Returns the same model, whose requests may use `draft`, a smaller model
  // with the same vocabulary, for Speculate::kDraft. The draft's weights live
  // as long as the result. Throws InvalidArgument if the draft is this very
  // model or one of embeddings, and Mismatch for another vocabulary.
  Gemma WithDraft(const Gemma& draft) const;

  const ModelConfig& config() const;
  // Returns the lengths of vectors that Embed can make, the full length first.
  std::vector<size_t> EmbeddingDims() const;
  // The identity of weights, configuration and arithmetic.
  Hash128 fingerprint() const;

  // Appends `prompt` to the conversation and generates. The prompt may be empty
  // if the conversation is not. `on_token` is called on this thread after each
  // token; false ends the generation, keeping what came. Throws, leaving the
  // conversation as it was, InvalidArgument for an option or a token out of
  // range, Mismatch for a conversation of another model, CacheFull if the
  // prompt does not fit.
  // A failure after `on_token` was called leaves the tokens that it was given,
  // and an Error says how many. An exception of `on_token` leaves none.
  GenerateResult Generate(
      KVCache& cache, std::span<const int32_t> prompt,
      const GenerateOptions& options = {},
      const std::function<bool(const TokenEvent&)>& on_token = {}) const;
  // Appends `tokens` and returns logits [all_positions ? tokens.size() : 1,
  // vocab_size]. Throws as Generate does.
  std::vector<float> Logits(KVCache& cache, std::span<const int32_t> tokens,
                            bool all_positions = false) const;
  // Returns vectors of length 1 of texts, [texts.size(), dim]. A text's token
  // ids are taken as they are: they include prompt, BOS and EOS if the model
  // wants these. The bits of a vector depend on its own text alone. Models that
  // generate make vectors as options.pooling says. `poll` is called now and
  // then on this thread; an exception of it ends the call. Throws
  // InvalidArgument for a text that is empty or longer than the model's
  // context, a token or an option out of range.
  std::vector<float> Embed(std::span<const std::vector<int32_t>> texts,
                           const EmbedOptions& options = {},
                           const std::function<void()>& poll = {}) const;

  // Says where its threads compute.
  ThreadPlacement placement() const;
  // Returns where the time of all steps so far went. Throws InvalidArgument for
  // a model that was loaded without LoadOptions::profile.
  StepProfile profile() const;

 private:
  struct Core;
  explicit Gemma(std::unique_ptr<Core> core);

  std::unique_ptr<Core> core_;
};

}  // namespace v0
}  // namespace gkv

#endif  // GEMMAKV_GEMMA_H_
