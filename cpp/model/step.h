#ifndef GEMMAKV_MODEL_STEP_H_
#define GEMMAKV_MODEL_STEP_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "cache/conversation.h"
#include "ops/logits.h"

namespace gkv {

// The results that a step computes for the last `rows` rows of a slice, besides
// keys and values.
struct RowOutput {
  enum Kind {
    kLogits,   // [rows, vocab_size]
    kLargest,  // those that may be among the `count` largest of a row
    kHidden,   // [rows, hidden_size]: what the head reads, after the last norm
  };
  Kind kind = kLogits;
  size_t rows = 0;
  float* data = nullptr;
  // kLargest alone, in place of `data`: [rows], see OutputHead::Row.
  size_t count = 1;
  TokenList* tokens = nullptr;
  // With kLogits and kLargest: [rows, hidden_size], what the head reads; null
  // if that is not wanted.
  float* states = nullptr;
};

// Consecutive positions of one conversation: a chunk of prefill, or a decode
// row.
struct SequenceSlice {
  std::span<const int32_t> tokens;  // ids at the last positions of the view
  const KvStepView* view;           // of the cache, from Conversation::Prepare
  const KvLayout* layout;
  RowOutput output;

  size_t begin() const { return view->end - tokens.size(); }  // position
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_STEP_H_
