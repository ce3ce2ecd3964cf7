#ifndef GEMMAKV_ENGINE_TOKEN_MASKS_H_
#define GEMMAKV_ENGINE_TOKEN_MASKS_H_

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <vector>

#include "engine/constraint.h"

namespace gkv {

// Says which tokens may follow each output row of a slice. Compute asks the
// constraint, on any thread, while the rows themselves are computed; the thread
// that takes a row then calls Of and Ends. A slice without a constraint has no
// masks: any token may follow.
class TokenMasks {
 public:
  TokenMasks() = default;
  TokenMasks(size_t rows, size_t vocab_size);

  bool empty() const { return words_ == 0; }
  // Asks the constraint row by row, as if each guess were the token after the
  // row before it. Afterwards the constraint is as it was. `stop_ids` are
  // allowed if the text may end. Keeps an exception of the constraint, or
  // `error` if that is not null.
  void Compute(Constraint& constraint, std::span<const int32_t> guesses,
               std::span<const int32_t> stop_ids,
               const std::exception_ptr& error) noexcept;

  // Returns the tokens that may follow a row, as bits. Rows after a guess that
  // was not allowed have none. Throws what Compute has kept.
  std::span<const uint32_t> Of(size_t row) const;
  // Whether the text ends at the row: no token may follow.
  bool Ends(size_t row) const;

 private:
  std::span<uint32_t> Bits(size_t row) {
    return std::span(bits_).subspan(row * words_, words_);
  }

  size_t words_ = 0;  // of a row
  std::vector<uint32_t> bits_;
  std::vector<bool> may_end_;
  std::exception_ptr error_;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_TOKEN_MASKS_H_
