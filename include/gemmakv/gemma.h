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
// same time. Move-only. Calls are safe from any thread; those of several
// threads share steps, and each gets the bits that it would have had alone.
// Calls on one conversation run one after the other.
class Gemma {
 public:
  // A GGUF file. Throws IoError, CorruptFile, Mismatch, InvalidArgument.
  static Gemma Load(const std::string& gguf_path,
                    const LoadOptions& options = {});
  // Weights from any source; `config` says their shape.
  static Gemma FromTensors(const ModelConfig& config, TensorSource& source,
                           const LoadOptions& options = {});
  Gemma(Gemma&&) noexcept;
  Gemma& operator=(Gemma&&) noexcept;
  ~Gemma();

  // The same model, whose requests may ask `draft`, a smaller one with the same
  // vocabulary, what comes next: Speculate::kDraft. Its weights stay for as long
  // as this does. Throws InvalidArgument for this very model or one of
  // embeddings, and Mismatch for another vocabulary.
  Gemma WithDraft(const Gemma& draft) const;

  const ModelConfig& config() const;
  // Lengths of vectors that Embed can make; the whole one first.
  std::vector<size_t> EmbeddingDims() const;
  // Identity of weights, configuration and arithmetic.
  Hash128 fingerprint() const;

  // Appends `prompt` to the conversation, which may be empty if that is not,
  // and generates. `on_token` is called on this thread after each token; false
  // ends the generation, keeping what came. Throws, with the conversation as it
  // was, InvalidArgument for an option or a token out of range, Mismatch for a
  // conversation of another model, CacheFull if it does not fit.
  GenerateResult Generate(
      KVCache& cache, std::span<const int32_t> prompt,
      const GenerateOptions& options = {},
      const std::function<bool(const TokenEvent&)>& on_token = {}) const;
  // Appends `tokens`; logits [all_positions ? tokens.size() : 1, vocab_size].
  // Throws as Generate does.
  std::vector<float> Logits(KVCache& cache, std::span<const int32_t> tokens,
                            bool all_positions = false) const;
  // Vectors of length 1 of texts, [texts.size(), dim]. A text's token ids are
  // taken as they are: prompt, BOS and EOS are in them, if the model wants
  // some. The bits of a vector depend on its own text alone. Models that
  // generate make vectors where options.pooling says of what. `poll` is called
  // now and then on this thread; what it throws ends the call. Throws
  // InvalidArgument for a text that is empty or longer than the model's
  // context, a token or an option out of range.
  std::vector<float> Embed(std::span<const std::vector<int32_t>> texts,
                           const EmbedOptions& options = {},
                           const std::function<void()>& poll = {}) const;

  // Where its threads compute.
  ThreadPlacement placement() const;
  // Where the time of all steps so far went. Throws InvalidArgument for a model
  // that was loaded without LoadOptions::profile.
  StepProfile profile() const;

 private:
  struct Core;
  explicit Gemma(std::unique_ptr<Core> core);

  std::unique_ptr<Core> core_;
};

}  // namespace v0
}  // namespace gkv

#endif  // GEMMAKV_GEMMA_H_
