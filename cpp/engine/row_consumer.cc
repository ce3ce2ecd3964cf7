#include "engine/row_consumer.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace gkv {

TokenSampler::TokenSampler(const GenerateOptions& options, uint64_t seed,
                           std::span<const int32_t> transcript, bool whole_rows,
                           std::vector<int32_t> stop_ids,
                           std::shared_ptr<const TokenText> token_text)
    : deciding_(whole_rows ? 0 : Sampler::DecidingLogits(options)),
      tokens_left_(options.max_tokens),
      least_left_(options.min_tokens),
      sampler_(options, seed, transcript),
      matcher_(options.stop, options.reply_stop),
      stop_ids_(std::move(stop_ids)),
      token_text_(std::move(token_text)) {}

TokenEvent TokenSampler::Take(const OutputRow& row) {
  const bool may_stop = least_left_ == 0;
  SampledToken token =
      row.largest != nullptr
          ? sampler_.NextOf(*row.largest, row.position)
          : sampler_.Next(row.values, row.position, row.pool, row.allowed,
                          may_stop ? std::span<const int32_t>() : stop_ids_);
  if (token.id < 0) {
    throw InvalidArgument(
        "every token is masked (logit_bias, min_tokens, a grammar) or has no "
        "finite logit, expected at least one to choose from");
  }
  --tokens_left_;
  if (!may_stop) --least_left_;
  TokenEvent event{token.id, token.logprob};
  event.top_logprobs = std::move(token.top);
  const bool is_stop_id = std::find(stop_ids_.begin(), stop_ids_.end(),
                                    token.id) != stop_ids_.end();
  if (!is_stop_id && token_text_) {
    event.text = matcher_.Push((*token_text_)[token.id], may_stop);
  }
  if (is_stop_id || matcher_.stopped()) {
    event.finish_reason = FinishReason::kStop;
  } else if (tokens_left_ == 0 || row.last_token) {
    event.finish_reason = FinishReason::kLength;
  }
  if (event.finish_reason != FinishReason::kNone && !matcher_.stopped()) {
    event.text += matcher_.Flush();
  }
  return event;
}

RowConsumer::Guess TokenSampler::GuessNext(const OutputRow& row,
                                           std::span<const int32_t> before) {
  const bool may_stop = before.size() >= least_left_;
  Guess guess;
  guess.id =
      row.largest != nullptr
          ? sampler_.NextOf(*row.largest, row.position).id
          : sampler_.Guess(row.values, row.position, before, row.pool,
                           may_stop ? std::span<const int32_t>() : stop_ids_);
  guess.last = std::find(stop_ids_.begin(), stop_ids_.end(), guess.id) !=
               stop_ids_.end();
  return guess;
}

TokenEvent RowWriter::Take(const OutputRow& row) {
  output_.data += row.values.size();
  TokenEvent event;
  if (--output_.rows == 0) event.finish_reason = FinishReason::kLength;
  return event;
}

}  // namespace gkv
