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

// One row of what the model makes of a position.
struct OutputRow {
  std::span<float> values;  // none where `largest` is set
  size_t position;          // of the token that follows
  bool last_token = false;  // no other fits behind it
  // Tokens that may come, see Constraint::ComputeMask; empty: all.
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

// What becomes of the rows of one request.
class RowConsumer {
 public:
  virtual ~RowConsumer() = default;

  // What the next rows are to be, and where: a null `data` leaves that to the
  // scheduler.
  virtual RowOutput output() const = 0;
  // Takes the next row, may change it. The token that follows, if one is to be
  // appended to the transcript; a finish_reason if this was the last row.
  virtual TokenEvent Take(const OutputRow& row) = 0;

  // What Take would give of the row of another model, after the tokens
  // `before`. It is a guess, and remembered nowhere. May change the row.
  struct Guess {
    int32_t id = -1;    // -1: none
    bool last = false;  // nothing follows it
  };
  virtual Guess GuessNext(const OutputRow&, std::span<const int32_t>) {
    return {};
  }
  // Tokens that it gives at most from now on.
  virtual size_t tokens_left() const { return 0; }
};

// Samples tokens.
class TokenSampler : public RowConsumer {
 public:
  // `transcript` as for Sampler; `whole_rows` if other tokens than the largest
  // may be asked for, as with OutputRow::allowed. Requires: valid options,
  // max_tokens > 0.
  TokenSampler(const GenerateOptions& options, uint64_t seed,
               std::span<const int32_t> transcript, bool whole_rows,
               std::vector<int32_t> stop_ids,
               std::shared_ptr<const TokenText> token_text);

  RowOutput output() const override {
    // The largest may be one that must not end the text yet.
    if (deciding_ == 0 || least_left_ > 0) return {.kind = RowOutput::kLogits};
    return {.kind = RowOutput::kLargest, .count = deciding_};
  }
  TokenEvent Take(const OutputRow& row) override;
  // The logits processor is not asked.
  Guess GuessNext(const OutputRow& row,
                  std::span<const int32_t> before) override;
  size_t tokens_left() const override { return tokens_left_; }

 private:
  const size_t deciding_;  // largest logits, 0: all
  size_t tokens_left_;
  size_t least_left_;  // tokens that must not stop
  Sampler sampler_;
  StopMatcher matcher_;
  const std::vector<int32_t> stop_ids_;
  const std::shared_ptr<const TokenText> token_text_;
};

// Has rows written to where somebody wants them: logits, hidden states.
class RowWriter : public RowConsumer {
 public:
  // Requires: `output` has room for its rows, of which there is one at least.
  explicit RowWriter(const RowOutput& output) : output_(output) {}

  RowOutput output() const override { return output_; }
  TokenEvent Take(const OutputRow& row) override;

 private:
  RowOutput output_;  // what is still to come
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_ROW_CONSUMER_H_
