#include "engine/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <numeric>

#include "base/rng.h"
#include "engine/parallel_logits.h"
#include "ops/logits.h"

namespace gkv {
namespace {

double Total(const std::vector<double>& sums) {
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

// Returns a finite number for every temperature > 0, so that the likeliest
// token's shifted logit of 0 stays 0.
float InverseTemperature(float temperature) {
  return std::min(1.0f / temperature, std::numeric_limits<float>::max());
}

// With more, too many groups of the vocabulary have one of the largest logits.
constexpr size_t kMostDeciding = 1024;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Tokens that weigh less than this part of the likeliest are left out of
// rankings: all of them together are far below the last of the 53 bits that
// choose.
constexpr double kLeastWeight = 1e-30;

// Returns a logit that no token of this weight or more is below, with a margin
// for the rounding of weights.
float LogitOf(double weight, const Softmax& softmax) {
  const auto distance = static_cast<float>(1e-3 - 1.001 * std::log(weight));
  return softmax.max - distance / softmax.inverse_temperature;
}

// Returns a logit below which there is about `mass`, judged by some of the
// tokens, in bins that end at `bound`.
float FloorOfTail(std::span<const float> logits, const Softmax& softmax,
                  double mass, float bound) {
  constexpr size_t kTaken = 16, kOf = 1024, kBins = 256;
  std::vector<float> taken;
  taken.reserve((logits.size() / kOf + 1) * kTaken);
  for (size_t i = 0; i + kTaken <= logits.size(); i += kOf) {
    taken.insert(taken.end(), &logits[i], &logits[i] + kTaken);
  }
  std::vector<float> weights(taken.size());
  std::vector<int32_t> bins(taken.size());
  ExpShifted(taken.data(), softmax.max, softmax.inverse_temperature,
             taken.size(), weights.data());
  RankBins(taken.data(), taken.size(), softmax.max, bound, kBins, bins.data());
  double masses[kBins] = {};
  for (size_t i = 0; i < taken.size(); ++i) {
    masses[static_cast<size_t>(bins[i])] += weights[i];
  }
  double left = mass * kTaken / kOf;
  size_t end = kBins;  // of the bins above the tail
  while (end > 1 && (left -= masses[end - 1]) >= 0) --end;
  const float width = (softmax.max - bound) / (kBins - 1);
  return softmax.max - width * static_cast<float>(end);
}

void Mask(std::span<float> logits, std::span<const uint32_t> allowed) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  for (size_t begin = 0; begin < logits.size(); begin += 32) {
    const uint32_t word = allowed[begin / 32];
    if (word == ~uint32_t{0}) continue;
    const size_t count = std::min<size_t>(32, logits.size() - begin);
    float* const part = &logits[begin];
    for (size_t i = 0; i < count; ++i) {
      part[i] = (word >> i & 1) != 0 ? part[i] : kNever;
    }
  }
}

// Keeps the tokens of `from` with the `count` largest logits, of equals the
// first, in the same order.
void KeepLargest(const TokenList& from, size_t count, TokenList& to) {
  if (from.ids.size() <= count) {
    to = from;
    return;
  }
  to.logits = from.logits;
  const auto last = to.logits.begin() + static_cast<std::ptrdiff_t>(count - 1);
  std::nth_element(to.logits.begin(), last, to.logits.end(), std::greater<>());
  const float least = *last;
  auto equals = std::count(to.logits.begin(), last + 1, least);
  to.ids.clear();
  to.logits.clear();
  for (size_t i = 0; i < from.ids.size(); ++i) {
    const float logit = from.logits[i];
    if (logit < least || (logit == least && equals-- <= 0)) continue;
    to.ids.push_back(from.ids[i]);
    to.logits.push_back(logit);
  }
}

// Returns the only token of a mask; -1 if it has several, or none.
int32_t OnlyOf(std::span<const uint32_t> allowed, size_t vocab_size) {
  int32_t found = -1;
  for (size_t i = 0; i < allowed.size(); ++i) {
    if (allowed[i] == 0) continue;
    if (found >= 0 || !std::has_single_bit(allowed[i])) return -1;
    found = static_cast<int32_t>(i * 32) + std::countr_zero(allowed[i]);
  }
  return static_cast<size_t>(found) < vocab_size ? found : -1;
}

}  // namespace

Sampler::Sampler(const GenerateOptions& options, uint64_t seed,
                 std::span<const int32_t> transcript)
    : options_(options), seed_(seed) {
  if (options_.repetition_penalty != 1) {
    for (const int32_t id : transcript) ++transcript_[id];
  }
  if (options_.logits_processor) {
    tokens_.assign(transcript.begin(), transcript.end());
  }
}

SampledToken Sampler::Next(std::span<float> logits, size_t position,
                           ThreadPool* pool, std::span<const uint32_t> allowed,
                           std::span<const int32_t> banned) {
  SampledToken token{-1, std::numeric_limits<float>::quiet_NaN()};
  const bool adjusts = !options_.logit_bias.empty() || !generated_.empty() ||
                       !transcript_.empty();
  float log_sum = 0;
  std::vector<std::pair<int32_t, float>> raw;  // logits before Adjust
  std::vector<float> raw_row;                  // before the processor
  if (options_.WantsLogprobs()) {
    log_sum = LogSumExp(logits.data(), logits.size());
    if (options_.top_logprobs > 0) token.top = FindLikeliest(logits, log_sum);
    if (options_.logits_processor) {
      raw_row.assign(logits.begin(), logits.end());
    } else if (adjusts) {
      for (const auto& [id, bias] : options_.logit_bias) {
        raw.emplace_back(id, logits[static_cast<size_t>(id)]);
      }
      for (const auto* counts : {&generated_, &transcript_}) {
        for (const auto& [id, count] : *counts) {
          raw.emplace_back(id, logits[static_cast<size_t>(id)]);
        }
      }
    }
  }
  if (options_.logits_processor) options_.logits_processor(tokens_, logits);
  if (adjusts) Adjust(logits);
  for (const int32_t id : banned) {
    logits[static_cast<size_t>(id)] = -std::numeric_limits<float>::infinity();
  }
  token.id = OnlyOf(allowed, logits.size());
  // With one token left there is nothing to draw.
  if (token.id < 0 || !std::isfinite(logits[static_cast<size_t>(token.id)])) {
    if (!allowed.empty()) Mask(logits, allowed);
    token.id = options_.temperature == 0 ? ArgMax(logits, pool).id
                                         : Draw(logits, position, pool);
  }
  if (token.id < 0) return token;
  if (options_.WantsLogprobs()) {
    const std::span<const float> row = raw_row.empty() ? logits : raw_row;
    float logit = row[static_cast<size_t>(token.id)];
    for (const auto& [id, value] : raw) {
      if (id == token.id) logit = value;
    }
    token.logprob = logit - log_sum;
  }
  if (options_.presence_penalty != 0 || options_.frequency_penalty != 0) {
    ++generated_[token.id];
  }
  if (options_.repetition_penalty != 1) ++transcript_[token.id];
  if (options_.logits_processor) tokens_.push_back(token.id);
  return token;
}

// A bias may only ban tokens here.
size_t Sampler::DecidingLogits(const GenerateOptions& options) {
  const bool only_bans = std::all_of(
      options.logit_bias.begin(), options.logit_bias.end(),
      [](const auto& bias) { return bias.second == -kInfinity; });
  if (!only_bans || options.WantsLogprobs() ||
      options.repetition_penalty != 1 || options.presence_penalty != 0 ||
      options.frequency_penalty != 0 || options.logits_processor) {
    return 0;
  }
  const size_t drawn_from = options.temperature > 0 ? options.top_k : 1;
  if (drawn_from == 0 || drawn_from > kMostDeciding) return 0;
  const size_t count = drawn_from + options.logit_bias.size();
  return count > kMostDeciding ? 0 : count;
}

SampledToken Sampler::NextOf(const TokenList& largest, size_t position) {
  SampledToken token{-1, std::numeric_limits<float>::quiet_NaN()};
  const TokenList* allowed = &largest;
  if (!options_.logit_bias.empty()) {
    candidates_ = largest;
    for (const auto& [id, bias] : options_.logit_bias) {
      const auto at = std::lower_bound(candidates_.ids.begin(),
                                       candidates_.ids.end(), id);
      if (at == candidates_.ids.end() || *at != id) continue;
      candidates_.logits.erase(candidates_.logits.begin() +
                               (at - candidates_.ids.begin()));
      candidates_.ids.erase(at);
    }
    allowed = &candidates_;
  }
  if (options_.temperature > 0) {
    token.id = DrawFromLargest(*allowed, UniformAt(seed_, position));
    return token;
  }
  const ScoredToken best = ArgMax(allowed->logits, nullptr);
  if (best.id >= 0) token.id = allowed->ids[static_cast<size_t>(best.id)];
  return token;
}

int32_t Sampler::Guess(std::span<float> logits, size_t position,
                       std::span<const int32_t> before, ThreadPool* pool,
                       std::span<const int32_t> banned) {
  Adjust(logits);
  AdjustFor(before, logits);
  for (const int32_t id : banned) {
    logits[static_cast<size_t>(id)] = -std::numeric_limits<float>::infinity();
  }
  return options_.temperature == 0 ? ArgMax(logits, pool).id
                                   : Draw(logits, position, pool);
}

// Adjusts as Adjust would if these tokens had been drawn, too.
void Sampler::AdjustFor(std::span<const int32_t> tokens,
                        std::span<float> logits) const {
  for (size_t i = 0; i < tokens.size(); ++i) {
    const int32_t id = tokens[i];
    float& logit = logits[static_cast<size_t>(id)];
    const auto same = tokens.begin() + static_cast<std::ptrdiff_t>(i);
    const bool is_new = std::find(tokens.begin(), same, id) == same;
    if (options_.repetition_penalty != 1 && is_new &&
        !transcript_.contains(id)) {
      logit = logit > 0 ? logit / options_.repetition_penalty
                        : logit * options_.repetition_penalty;
    }
    if (is_new && !generated_.contains(id)) logit -= options_.presence_penalty;
    logit -= options_.frequency_penalty;
  }
}

std::vector<TokenLogprob> Sampler::FindLikeliest(std::span<const float> logits,
                                                 float log_sum) const {
  const size_t wanted = options_.top_logprobs;
  const LargestBounds bounds =
      BoundsOfLargest(logits.data(), logits.size(), wanted);
  TokenList found;  // the likeliest tokens, and some others
  TokensFrom(logits.data(), logits.size(), bounds.floor, found);
  std::vector<uint32_t> order(found.ids.size());
  std::iota(order.begin(), order.end(), 0u);
  const size_t count = std::min(wanted, order.size());
  std::partial_sort(order.begin(),
                    order.begin() + static_cast<std::ptrdiff_t>(count),
                    order.end(), [&](uint32_t a, uint32_t b) {
                      const float logit_a = found.logits[a];
                      const float logit_b = found.logits[b];
                      return logit_a > logit_b || (logit_a == logit_b && a < b);
                    });
  std::vector<TokenLogprob> likeliest(wanted);
  for (size_t i = 0; i < count; ++i) {
    likeliest[i] = {found.ids[order[i]], found.logits[order[i]] - log_sum};
  }
  return likeliest;
}

void Sampler::Adjust(std::span<float> logits) {
  for (const auto& [id, bias] : options_.logit_bias) {
    logits[static_cast<size_t>(id)] += bias;
  }
  for (const auto& [id, count] : transcript_) {
    float& logit = logits[static_cast<size_t>(id)];
    logit = logit > 0 ? logit / options_.repetition_penalty
                      : logit * options_.repetition_penalty;
  }
  for (const auto& [id, count] : generated_) {
    logits[static_cast<size_t>(id)] -=
        options_.presence_penalty +
        options_.frequency_penalty * static_cast<float>(count);
  }
}

int32_t Sampler::Draw(std::span<const float> logits, size_t position,
                      ThreadPool* pool) {
  const double uniform = UniformAt(seed_, position);
  if (options_.top_k > 0 &&
      (options_.top_k <= kMostDeciding || options_.top_k < logits.size())) {
    const LargestBounds bounds =
        BoundsOfLargest(logits.data(), logits.size(), options_.top_k);
    TokensFrom(logits.data(), logits.size(), bounds.floor, candidates_);
    return DrawFromLargest(candidates_, uniform);
  }
  const ScoredToken best = ArgMax(logits, pool);
  if (best.id < 0) return -1;
  const Softmax softmax{best.logit, InverseTemperature(options_.temperature)};
  if (options_.top_k > 0 || options_.top_p < 1 || options_.min_p > 0) {
    return DrawFromNucleus(logits, softmax, uniform, pool);
  }
  const int32_t id = DrawFromAll(logits, softmax, uniform, pool);
  return id < 0 ? best.id : id;
}

// Applies top_k, then top_p of the remaining mass, then min_p. Further
// candidates do not change any bit.
int32_t Sampler::DrawFromLargest(const TokenList& candidates, double uniform) {
  KeepLargest(candidates, options_.top_k, largest_);
  if (largest_.ids.empty()) return -1;
  const Softmax softmax{
      *std::max_element(largest_.logits.begin(), largest_.logits.end()),
      InverseTemperature(options_.temperature)};
  ranking_.Reset(largest_, softmax, LogitOf(kLeastWeight, softmax));
  const size_t count = ranking_.size();
  double mass = kInfinity;
  if (options_.top_p < 1) {
    mass = static_cast<double>(options_.top_p) * ranking_.mass();
  }
  return DrawFromFirst(count, mass, uniform);
}

// Applies top_p of the whole mass, then min_p.
int32_t Sampler::DrawFromNucleus(std::span<const float> logits,
                                 const Softmax& softmax, double uniform,
                                 ThreadPool* pool) {
  const float least = LogitOf(
      std::max(static_cast<double>(options_.min_p), kLeastWeight), softmax);
  double mass = kInfinity;
  if (options_.top_p < 1) {
    const double total =
        Total(ExpSums(logits, softmax.max, softmax.inverse_temperature, pool));
    mass = static_cast<double>(options_.top_p) * total;
    // Below this, the tokens past the nucleus could not make up its mass even
    // if all of them were there.
    const double tail = total - mass;
    const float bound =
        LogitOf(tail / static_cast<double>(logits.size()), softmax);
    const float guess = FloorOfTail(logits, softmax, 0.7 * tail, bound);
    for (const float floor : {guess, bound}) {
      if (!(floor > least)) break;
      ranking_.Reset(logits, softmax, floor);
      if (ranking_.mass() >= mass) {
        return DrawFromFirst(ranking_.size(), mass, uniform);
      }
    }
  }
  ranking_.Reset(logits, softmax, least);
  return DrawFromFirst(ranking_.size(), mass, uniform);
}

// Draws from the first `count` tokens in rank, up to a mass of `mass`, without
// the tokens that min_p excludes.
int32_t Sampler::DrawFromFirst(size_t count, double mass, double uniform) {
  if (options_.min_p > 0) {
    count = std::min(count, ranking_.CountFrom(options_.min_p));
  }
  const Ranking::Prefix kept = ranking_.Find(count, mass);
  // The first token whose weight takes the sum past the uniform share.
  const double past = std::nextafter(uniform * kept.mass, kInfinity);
  return ranking_.Find(kept.count, past).last;
}

int32_t Sampler::DrawFromAll(std::span<const float> logits,
                             const Softmax& softmax, double uniform,
                             ThreadPool* pool) const {
  const std::vector<double> sums =
      ExpSums(logits, softmax.max, softmax.inverse_temperature, pool);
  double left = uniform * Total(sums);
  size_t partition = 0;
  while (partition + 1 < sums.size() && left >= sums[partition]) {
    left -= sums[partition++];
  }
  // Rounding may leave a remainder past the last token of the partition: the
  // last one with any probability takes it, if there is one.
  int32_t last = -1;
  const size_t begin = partition * kExpSumPartition;
  const size_t count = std::min(kExpSumPartition, logits.size() - begin);
  float weights[kExpSumPartition];
  ExpShifted(logits.data() + begin, softmax.max, softmax.inverse_temperature,
             count, weights);
  for (size_t i = 0; i < count; ++i) {
    if (weights[i] <= 0) continue;
    last = static_cast<int32_t>(begin + i);
    left -= weights[i];
    if (left < 0) break;
  }
  return last;
}

}  // namespace gkv
