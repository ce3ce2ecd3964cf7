#ifndef GEMMAKV_PROFILE_H_
#define GEMMAKV_PROFILE_H_

#include <array>
#include <cstddef>
#include <string_view>

namespace gkv {

// The parts of a step.
enum class StepPart {
  kPlanning,            // choosing rows, blocks for them; telling requests
  kDrafting,            // guessing tokens, all that a draft model does
  kMasks,               // waiting for what a constraint allows
  kChecks,              // checksums of packed weights, once each
  kEmbedding,           // rows of the embedding
  kNorms,               // of rows, residual sums, 8-bit inputs of products
  kQkv,                 // products that make queries, keys and values
  kRope,                // norms and rotation of heads, storing keys and values
  kAttention,           // of queries with keys and values, in 8 bits
  kAttentionOutput,     // products after attention, or after a recurrence
  kGateUp,              // first products of feed-forward, what follows them
  kActivation,          // the latter, where it needs whole rows
  kDown,                // the last product of feed-forward
  kExperts,             // products of experts and of their router
  kRouting,             // choosing experts, and adding up what they give
  kPerLayerEmbeddings,  // products of embeddings that each layer has
  kRecurrence,          // of recurrent layers, with its products
  kAltUp,               // products of parallel streams and of LAuReL
  kHead,                // products with the output matrix, or after embeddings
  kSampling,            // drawing tokens, log-probabilities
  kJoins,               // starting threads on a parallel loop, waiting for them
};
inline constexpr size_t kStepParts = 21;

// Their names in metrics and tables.
inline constexpr std::array<std::string_view, kStepParts> kStepPartNames = {
    "planning",  "drafting",         "masks",   "checks",
    "embedding", "norms",            "qkv",     "rope",
    "attention", "attention_output", "gate_up", "activation",
    "down",      "experts",          "routing", "per_layer_embeddings",
    "recurrence", "altup",           "head",    "sampling",
    "joins"};

// The kinds of steps: their times per row differ much.
enum class StepPhase {
  kPrefill,    // reads prompts alone
  kDecode,     // goes on with conversations alone
  kMixed,      // both
  kEmbedding,  // texts of a model of embeddings
};
inline constexpr size_t kStepPhases = 4;
inline constexpr std::array<std::string_view, kStepPhases> kStepPhaseNames = {
    "prefill", "decode", "mixed", "embedding"};

// The time of steps as seen by the thread that drives them: its own share of
// the work of all threads, and its waits for the others.
struct PhaseProfile {
  size_t steps = 0;
  size_t rows = 0;   // positions computed
  size_t loops = 0;  // parallel loops that several threads took part in
  // From planning a step to delivering its tokens, without the time between
  // steps.
  double seconds = 0;
  std::array<double, kStepParts> part_s = {};  // by StepPart; sums to `seconds`
  // The part of it without work for the other threads.
  std::array<double, kStepParts> serial_s = {};
};

// The time of a model's steps since it was loaded.
struct StepProfile {
  std::array<PhaseProfile, kStepPhases> phases = {};  // by StepPhase
};

}  // namespace gkv

#endif  // GEMMAKV_PROFILE_H_
