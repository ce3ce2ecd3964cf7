#ifndef GEMMAKV_ENGINE_OUTPUT_BUFFER_H_
#define GEMMAKV_ENGINE_OUTPUT_BUFFER_H_

#include <cstddef>
#include <span>
#include <vector>

#include "base/aligned_buffer.h"
#include "gemmakv/config.h"
#include "model/step.h"
#include "ops/logits.h"

namespace gkv {

// Memory for the output rows of steps, kept from step to step.
class OutputBuffer {
 public:
  // Gives each output without a place one that is valid until the next call.
  // Throws std::bad_alloc.
  void Place(std::span<RowOutput* const> outputs, const ModelConfig& config) {
    size_t floats = 0, lists = 0;
    for (const RowOutput* output : outputs) {
      if (output->kind == RowOutput::kLargest) {
        lists += output->rows;
      } else if (output->data == nullptr) {
        floats += output->rows * Width(*output, config);
      }
    }
    floats_.EnsureSize(floats);
    if (lists_.size() < lists) lists_.resize(lists);
    float* row = floats_.data();
    TokenList* list = lists_.data();
    for (RowOutput* output : outputs) {
      if (output->kind == RowOutput::kLargest) {
        output->tokens = list;
        list += output->rows;
      } else if (output->data == nullptr) {
        output->data = row;
        row += output->rows * Width(*output, config);
      }
    }
  }

 private:
  static size_t Width(const RowOutput& output, const ModelConfig& config) {
    return output.kind == RowOutput::kHidden ? config.hidden_size
                                             : config.vocab_size;
  }

  AlignedBuffer<float> floats_;
  std::vector<TokenList> lists_;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_OUTPUT_BUFFER_H_
