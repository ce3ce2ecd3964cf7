#include "engine/token_masks.h"

#include <algorithm>

#include "base/rounding.h"

namespace gkv {
namespace {

bool HasToken(std::span<const uint32_t> mask, int32_t id) {
  return (mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
}

bool IsEmpty(std::span<const uint32_t> mask) {
  return std::all_of(mask.begin(), mask.end(),
                     [](uint32_t word) { return word == 0; });
}

}  // namespace

TokenMasks::TokenMasks(size_t rows, size_t vocab_size)
    : words_(CeilDiv(vocab_size, 32)), bits_(rows * words_), may_end_(rows) {}

void TokenMasks::Compute(Constraint& constraint,
                         std::span<const int32_t> guesses,
                         std::span<const int32_t> stop_ids,
                         const std::exception_ptr& error) noexcept {
  try {
    if (error) std::rethrow_exception(error);
    size_t guessed = 0;
    for (size_t row = 0; row < may_end_.size(); ++row) {
      const std::span<uint32_t> mask = Bits(row);
      may_end_[row] = constraint.ComputeMask(mask);
      if (may_end_[row] && !IsEmpty(mask)) {
        for (const int32_t id : stop_ids) {
          mask[static_cast<size_t>(id) / 32] |= uint32_t{1} << (id % 32);
        }
      }
      if (row == guesses.size()) break;
      const int32_t guess = guesses[row];
      if (!HasToken(mask, guess) ||
          std::find(stop_ids.begin(), stop_ids.end(), guess) !=
              stop_ids.end()) {
        break;  // the rows after it do not count
      }
      constraint.Accept(guess);
      ++guessed;
    }
    if (guessed > 0) constraint.Rollback(guessed);
  } catch (...) {
    error_ = std::current_exception();
  }
}

std::span<const uint32_t> TokenMasks::Of(size_t row) const {
  if (error_) std::rethrow_exception(error_);
  return std::span(bits_).subspan(row * words_, words_);
}

bool TokenMasks::Ends(size_t row) const {
  return may_end_[row] && IsEmpty(Of(row));
}

}  // namespace gkv
