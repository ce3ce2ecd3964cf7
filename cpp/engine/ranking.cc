#include "engine/ranking.h"

#include <algorithm>
#include <bit>

namespace gkv {
namespace {

constexpr size_t kMinBins = 16;
constexpr size_t kMaxBins = 1024;
constexpr size_t kScanned = 64;  // few blocks have a token of a given bin

}  // namespace

void Ranking::Reset(std::span<const float> logits, const Softmax& softmax,
                    float floor) {
  TokensFrom(logits.data(), logits.size(), floor, tokens_);
  Divide(softmax, floor);
}

void Ranking::Reset(const TokenList& tokens, const Softmax& softmax,
                    float floor) {
  TokensFrom(tokens.logits.data(), tokens.logits.size(), floor, tokens_);
  for (int32_t& id : tokens_.ids) id = tokens.ids[static_cast<size_t>(id)];
  Divide(softmax, floor);
}

// Divides tokens_ into bins.
void Ranking::Divide(const Softmax& softmax, float floor) {
  const float* found = tokens_.logits.data();
  weights_.resize(size());
  ExpShifted(found, softmax.max, softmax.inverse_temperature, size(),
             weights_.data());
  const size_t bins = std::clamp(std::bit_ceil(size()), kMinBins, kMaxBins);
  bin_of_.resize(size());
  RankBins(found, size(), softmax.max, floor, bins, bin_of_.data());
  up_to_.assign(bins, {0, 0});
  for (size_t i = 0; i < size(); ++i) {
    Sum& sum = up_to_[static_cast<size_t>(bin_of_[i])];
    ++sum.count;
    sum.mass += weights_[i];
  }
  for (size_t b = 1; b < bins; ++b) {
    up_to_[b].count += up_to_[b - 1].count;
    up_to_[b].mass += up_to_[b - 1].mass;
  }
}

size_t Ranking::CountFrom(float weight) const {
  size_t count = 0;
  for (const float w : weights_) count += w >= weight;
  return count;
}

void Ranking::SortBin(size_t bin) {
  sorted_.clear();
  const int32_t wanted = static_cast<int32_t>(bin);
  for (size_t begin = 0; begin < size(); begin += kScanned) {
    const size_t end = std::min(begin + kScanned, size());
    bool any = false;
    for (size_t i = begin; i < end; ++i) any |= bin_of_[i] == wanted;
    for (size_t i = begin; any && i < end; ++i) {
      if (bin_of_[i] == wanted) sorted_.push_back(static_cast<uint32_t>(i));
    }
  }
  const auto before = [&](uint32_t a, uint32_t b) {
    const float logit_a = tokens_.logits[a], logit_b = tokens_.logits[b];
    return logit_a > logit_b || (logit_a == logit_b && a < b);
  };
  // A bin of equal logits is in order already, however large it is.
  if (!std::is_sorted(sorted_.begin(), sorted_.end(), before)) {
    std::sort(sorted_.begin(), sorted_.end(), before);
  }
}

Ranking::Prefix Ranking::Find(size_t count, double mass) {
  const auto bin = std::partition_point(
      up_to_.begin(), up_to_.end(),
      [&](const Sum& sum) { return sum.count < count && sum.mass < mass; });
  Prefix prefix{0, 0, -1};
  size_t b = static_cast<size_t>(bin - up_to_.begin());
  if (b > 0) prefix = {up_to_[b - 1].count, up_to_[b - 1].mass, -1};
  // The end lies in one bin, unless sums are inexact and were rounded.
  for (; b < up_to_.size(); ++b) {
    SortBin(b);
    for (const uint32_t i : sorted_) {
      ++prefix.count;
      prefix.mass += weights_[i];
      prefix.last = tokens_.ids[i];
      if (prefix.count >= count || prefix.mass >= mass) return prefix;
    }
  }
  return prefix;
}

}  // namespace gkv
