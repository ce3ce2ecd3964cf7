#ifndef GEMMAKV_ENGINE_ROW_CONSUMER_H_
#define GEMMAKV_ENGINE_ROW_CONSUMER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "engine/sampler.h"
#include "engine/stop_matcher.h"
#include "engine/token_stream.h"
#include "engine/vocabulary.h"
#include "gemmakv/options.h"
#include "model/step.h"
#include "ops/logits.h"

namespace gkv {

// One row of the model's output for a position.
struct OutputRow {
  std::span<float> values;  // none where `largest` is set
  size_t position;          // of the token that follows
  bool last_token = false;  // no other fits after it
  // The tokens that may come, see Constraint::ComputeMask; empty: all.
  std::span<const uint32_t> allowed = {};
  ThreadPool* pool = nullptr;          // as in parallel_logits.h
  const TokenList* largest = nullptr;  // with kLargest, as OutputHead::Row has

  // Row `row` of an output of rows of `width` values.
  static OutputRow Of(const RowOutput& output, size_t row, size_t width,
                      size_t position) {
    if (output.kind == RowOutput::kLargest) {
      return {
          .values = {}, .position = position, .largest = output.tokens + row};
    }
    return {.values = {output.data + row * width, width}, .position = position};
  }
};

// Takes the output rows of one request.
class RowConsumer {
 public:
  virtual ~RowConsumer() = default;

  // Says what the next rows are to be, and where: a null `data` leaves the
  // place to the scheduler.
  virtual RowOutput output() const = 0;
  // Takes the next row, which it may change. Returns the token that follows, if
  // one is to be appended to the transcript, and a finish_reason if this was
  // the last row.
  virtual TokenEvent Take(const OutputRow& row) = 0;

  // Returns what Take would return for the row of another model, after the
  // tokens `before`. It is a guess, and not remembered. May change the row.
  struct Guess {
    int32_t id = -1;    // -1: none
    bool last = false;  // no token follows it
  };
  virtual Guess GuessNext(const OutputRow&, std::span<const int32_t>) {
    return {};
  }
  // The most tokens that it returns from now on.
  virtual size_t tokens_left() const { return 0; }
};

// Samples tokens.
class TokenSampler : public RowConsumer {
 public:
  // `transcript` as for Sampler. `whole_rows`: whether tokens other than the
  // largest may be needed, as with OutputRow::allowed. Requires: valid options,
  // max_tokens > 0.
  TokenSampler(const GenerateOptions& options, uint64_t seed,
               std::span<const int32_t> transcript, bool whole_rows,
               std::vector<int32_t> stop_ids,
               std::shared_ptr<const TokenText> token_text);

  RowOutput output() const override {
    // The largest logit may be that of a stop token, which may not come yet.
    if (deciding_ == 0 || least_left_ > 0) return {.kind = RowOutput::kLogits};
    return {.kind = RowOutput::kLargest, .count = deciding_};
  }
  TokenEvent Take(const OutputRow& row) override;
  // Does not call the logits processor.
  Guess GuessNext(const OutputRow& row,
                  std::span<const int32_t> before) override;
  size_t tokens_left() const override { return tokens_left_; }

 private:
  const size_t deciding_;  // number of largest logits; 0: all
  size_t tokens_left_;
  size_t least_left_;  // tokens that may not be stop tokens
  Sampler sampler_;
  StopMatcher matcher_;
  const std::vector<int32_t> stop_ids_;
  const std::shared_ptr<const TokenText> token_text_;
};

// Has rows of logits or hidden states written to a caller's memory.
class RowWriter : public RowConsumer {
 public:
  // Requires: `output` has room for its rows; there is at least one.
  explicit RowWriter(const RowOutput& output) : output_(output) {}

  RowOutput output() const override { return output_; }
  TokenEvent Take(const OutputRow& row) override;

 private:
  RowOutput output_;  // the rows that are still to come
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_ROW_CONSUMER_H_
