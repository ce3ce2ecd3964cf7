#ifndef GEMMAKV_MODEL_DRAFT_PASS_H_
#define GEMMAKV_MODEL_DRAFT_PASS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "gemmakv/config.h"
#include "model/activations.h"
#include "model/forward.h"
#include "model/output_head.h"
#include "model/step.h"
#include "model/step_work.h"
#include "ops/logits.h"

namespace gkv {

// Throws Mismatch, which names what differs, unless the drafter is for models
// of the target's configuration. Requires: `drafter` is that of a drafter.
void RequireDrafterFor(const ModelConfig& drafter, const ModelConfig& target);

// Returns, for each layer of a drafter, the layer of the target whose keys and
// values it reads. Requires: RequireDrafterFor passes.
std::vector<size_t> LayersRead(const ModelConfig& drafter,
                               const ModelConfig& target);

// Puts the numbers of the `count` largest scores first in `chosen`, in any
// order, and those of the others after them. Of equal scores the lower number
// comes first; a score that is NaN becomes -inf. Requires: spans of one size, 0
// < count <= size.
void ChooseLargest(std::span<float> scores, size_t count,
                   std::span<uint32_t> chosen);

// Runs a drafter on keys and values of the model that it guesses for: an input
// and heads of its own around the layers of a ForwardPass. Nothing is written.
// Owns the activation buffers, which grow to what is used. Not thread-safe.
class DraftPass {
 public:
  // No argument is owned; all must outlive this. Requires: RequireDrafterFor
  // passes.
  DraftPass(const Model& drafter, const Model& target, ThreadPool& pool);

  // One guess. Its bits depend on no other row.
  struct Row {
    // The view of the target's cache, of positions up to the view's end and of
    // readable ones only; see Conversation::View.
    const KvStepView* view = nullptr;
    const KvLayout* layout = nullptr;
    int32_t token = 0;  // the last one, at the view's end; for further guesses,
                        // after that
    // [target_hidden] each, which may be the same memory. `state` is what the
    // target's head read to sample the token, or `next` of the guess before.
    // `next` becomes the state of the next guess.
    const float* state = nullptr;
    float* next = nullptr;
    // [vocab_size], with minus infinity for tokens in clusters that were not
    // chosen. Or null, and the largest logits, as in OutputHead::Row.
    float* logits = nullptr;
    TokenList* largest = nullptr;
    size_t count = 0;
  };
  // Computes all rows in one weight pass. Throws what ForwardPass::Step throws.
  void Run(std::span<const Row> rows);

 private:
  void Embed(std::span<const Row> rows, const StepWork& work, float* x);
  void HeadOfClusters(std::span<const Row> rows);
  void ListLargest(const Row& row, const uint32_t* chosen,
                   const float* products, size_t stride) const;

  size_t hidden() const { return drafter_.config.hidden_size; }

  const Model& drafter_;
  const Model& target_;
  ThreadPool& pool_;
  ForwardPass layers_;
  OutputHead head_;
  std::vector<SequenceSlice> slices_;
  std::vector<KvStepView> views_;
  std::vector<StepRow> rows_;
  Activations pair_;                // [rows, 2 * target_hidden]
  Activations last_;                // [rows, hidden_size], after the last norm
  AlignedBuffer<float> products_;   // [planes * rows, the widest of all]
  AlignedBuffer<float> next_;       // [rows, target_hidden]
  AlignedBuffer<float> scores_;     // [rows, num_centroids]
  AlignedBuffer<float> clusters_;   // [rows, centroids_used, planes, cluster]
  std::vector<uint32_t> chosen_;    // [rows, num_centroids]: the first
                                    // centroids_used are those chosen
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_DRAFT_PASS_H_
