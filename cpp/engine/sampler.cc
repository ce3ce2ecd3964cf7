#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/rng.h"
#include "ops/logits.h"

namespace gkv {
namespace {

double Total(const std::vector<double>& sums) {
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

// Finite for every temperature > 0, so that the likeliest token's shifted
// logit of 0 stays 0.
float InverseTemperature(float temperature) {
  return std::min(1.0f / temperature, std::numeric_limits<float>::max());
}

}  // namespace

Sampler::Sampler(const GenerateOptions& options, uint64_t seed,
                 std::span<const int32_t> transcript)
    : options_(options), seed_(seed) {
  if (options_.repetition_penalty != 1) {
    for (const int32_t id : transcript) ++transcript_[id];
  }
}

SampledToken Sampler::Next(std::span<float> logits, size_t position) {
  SampledToken token{-1, std::numeric_limits<float>::quiet_NaN()};
  const bool adjusts = !options_.logit_bias.empty() || !generated_.empty() ||
                       !transcript_.empty();
  float log_sum = 0;
  std::vector<std::pair<int32_t, float>> raw;  // logits before Adjust
  if (options_.logprobs) {
    log_sum = LogSumExp(logits.data(), logits.size());
    if (adjusts) {
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
  if (adjusts) Adjust(logits);
  token.id = options_.temperature == 0 ? ArgMax(logits.data(), logits.size()).id
                                       : Draw(logits, position);
  if (token.id < 0) return token;
  if (options_.logprobs) {
    float logit = logits[static_cast<size_t>(token.id)];
    for (const auto& [id, value] : raw) {
      if (id == token.id) logit = value;
    }
    token.logprob = logit - log_sum;
  }
  if (options_.presence_penalty != 0 || options_.frequency_penalty != 0) {
    ++generated_[token.id];
  }
  if (options_.repetition_penalty != 1) ++transcript_[token.id];
  return token;
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

int32_t Sampler::Draw(std::span<const float> logits, size_t position) {
  const double uniform = UniformAt(seed_, position);
  if (options_.top_k == 0 && options_.top_p >= 1 && options_.min_p <= 0) {
    return DrawFromAll(logits, uniform);
  }
  const std::vector<Candidate> candidates = TopCandidates(logits);
  double total = 0;
  for (const Candidate& candidate : candidates) total += candidate.probability;
  double left = uniform * total;
  int32_t last = -1;
  for (const Candidate& candidate : candidates) {
    last = candidate.id;
    left -= candidate.probability;
    if (left < 0) break;
  }
  return last;
}

// Candidates in descending order of probability after top_k, top_p and min_p.
std::vector<Sampler::Candidate> Sampler::TopCandidates(
    std::span<const float> logits) const {
  const float inverse_temperature = InverseTemperature(options_.temperature);
  const size_t limit = options_.top_k > 0
                           ? std::min(options_.top_k, logits.size())
                           : logits.size();
  double total = 0;  // mass of the first `limit` candidates
  const bool of_all = options_.top_p < 1 && limit == logits.size();
  if (of_all) {
    const ScoredToken best = ArgMax(logits.data(), logits.size());
    if (best.id < 0) return {};
    total = Total(ExpSums(logits.data(), best.logit, inverse_temperature,
                          logits.size()));
  }
  // Few candidates usually carry the mass that top_p asks for: take more only
  // when they do not.
  for (size_t k = std::min<size_t>(limit, 128);; k = std::min(limit, k * 4)) {
    const std::vector<ScoredToken> top = TopK(logits.data(), logits.size(), k);
    if (top.empty()) return {};
    std::vector<float> shifted(top.size()), weights(top.size());
    for (size_t i = 0; i < top.size(); ++i) shifted[i] = top[i].logit;
    ExpShifted(shifted.data(), top[0].logit, inverse_temperature,
               shifted.size(), weights.data());
    const bool complete = k == limit || top.size() < k;
    if (!of_all) {
      total = 0;
      for (const float weight : weights) total += weight;
    }
    std::vector<Candidate> kept;
    double mass = 0;
    bool cut = false;
    for (size_t i = 0; i < top.size() && !cut; ++i) {
      cut = weights[i] < options_.min_p ||
            (i > 0 && mass >= static_cast<double>(options_.top_p) * total);
      if (cut) break;
      kept.push_back({top[i].id, weights[i]});
      mass += weights[i];
    }
    const bool mass_known = of_all || options_.top_p >= 1 || complete;
    if (complete || (cut && mass_known)) return kept;
  }
}

int32_t Sampler::DrawFromAll(std::span<const float> logits, double uniform) {
  const ScoredToken best = ArgMax(logits.data(), logits.size());
  if (best.id < 0) return -1;
  const float inverse_temperature = InverseTemperature(options_.temperature);
  const std::vector<double> sums = ExpSums(
      logits.data(), best.logit, inverse_temperature, logits.size());
  double left = uniform * Total(sums);
  size_t partition = 0;
  while (partition + 1 < sums.size() && left >= sums[partition]) {
    left -= sums[partition++];
  }
  // Rounding may leave a remainder past the last token of the partition: the
  // last one with any probability takes it.
  int32_t last = best.id;
  const size_t begin = partition * kExpSumPartition;
  const size_t count = std::min(kExpSumPartition, logits.size() - begin);
  float probabilities[kExpSumPartition];
  ExpShifted(logits.data() + begin, best.logit, inverse_temperature, count,
             probabilities);
  for (size_t i = 0; i < count; ++i) {
    if (probabilities[i] <= 0) continue;
    last = static_cast<int32_t>(begin + i);
    left -= probabilities[i];
    if (left < 0) break;
  }
  return last;
}

}  // namespace gkv
