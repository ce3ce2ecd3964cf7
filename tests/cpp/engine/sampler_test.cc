#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <span>
#include <vector>

#include "base/rng.h"
#include "engine/parallel_logits.h"
#include "ops/logits.h"

namespace gkv {
namespace {

const float kInf = std::numeric_limits<float>::infinity();
const float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<float> RandomLogits(size_t size, uint32_t seed, float spread = 3) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> logits(size);
  for (float& logit : logits) logit = normal(rng);
  return logits;
}

int32_t One(const GenerateOptions& options, std::vector<float> logits,
            uint64_t seed = 1, size_t position = 0) {
  return Sampler(options, seed, {}).Next(logits, position).id;
}

// Frequencies of draws at many positions.
std::map<int32_t, double> Frequencies(const GenerateOptions& options,
                                      const std::vector<float>& logits,
                                      size_t draws) {
  Sampler sampler(options, 7, {});
  std::map<int32_t, double> counts;
  for (size_t position = 0; position < draws; ++position) {
    std::vector<float> row = logits;
    counts[sampler.Next(row, position).id] += 1.0 / static_cast<double>(draws);
  }
  return counts;
}

TEST(SamplerTest, TemperatureZeroIsArgmaxWithTiesToTheLowestId) {
  EXPECT_EQ(One({}, {1, 5, 5, 2}), 1);
  EXPECT_EQ(One({}, {kNaN, -kInf, -3, kNaN}), 2);
}

// A mask with one token: what is drawn, and its log-probability, are what they
// would be if nothing knew that there is one.
TEST(SamplerTest, AnOnlyAllowedTokenIsDrawn) {
  std::mt19937 rng(3);
  for (const size_t size : {40u, 97u, 1024u}) {
    for (int i = 0; i < 200; ++i) {
      GenerateOptions options;
      options.temperature = static_cast<float>(rng() % 3) * 0.7f;
      options.top_k = rng() % 3;
      if (rng() % 2 == 0) options.top_p = 0.5f;
      options.top_logprobs = rng() % 2 * 2;
      options.logprobs = rng() % 2 == 0;
      if (rng() % 2 == 0) options.repetition_penalty = 1.3f;
      const auto id = static_cast<int32_t>(rng() % size);
      const auto other = static_cast<int32_t>(rng() % size);
      std::vector<uint32_t> one((size + 31) / 32);
      one[static_cast<size_t>(id) / 32] |= uint32_t{1} << (id % 32);
      std::vector<float> row = RandomLogits(size, rng()), same = row;
      const std::vector<int32_t> before = {id, other};
      const SampledToken found =
          Sampler(options, 5, before).Next(row, 9, nullptr, one);
      EXPECT_EQ(found.id, id);
      // The same with what a mask does done by bias.
      GenerateOptions biased = options;
      for (size_t k = 0; k < size; ++k) {
        const auto token = static_cast<int32_t>(k);
        if (token != id) biased.logit_bias.emplace_back(token, -kInf);
      }
      const SampledToken expected = Sampler(biased, 5, before).Next(same, 9);
      EXPECT_EQ(found.id, expected.id);
      if (options.WantsLogprobs()) {
        EXPECT_EQ(found.logprob, expected.logprob);
      }
      ASSERT_EQ(found.top.size(), expected.top.size());
    }
  }
  // It is no token to say, or says nothing.
  const std::vector<uint32_t> two = {1u << 2};
  for (const float bad : {kNaN, -kInf}) {
    std::vector<float> row = {1, 2, bad, 4};
    EXPECT_EQ(Sampler({}, 1, {}).Next(row, 0, nullptr, two).id, -1);
  }
  std::vector<float> row = {1, 2, 3, 4};
  const std::vector<int32_t> banned = {2};
  EXPECT_EQ(Sampler({}, 1, {}).Next(row, 0, nullptr, two, banned).id, -1);
  row = {1, 2, 3, 4};
  const std::vector<uint32_t> beyond = {1u << 9};  // no token of these
  EXPECT_EQ(Sampler({}, 1, {}).Next(row, 0, nullptr, beyond).id, -1);
}

TEST(SamplerTest, AllMaskedIsMinusOne) {
  GenerateOptions options;
  EXPECT_EQ(One(options, {-kInf, kNaN, -kInf}), -1);
  options.temperature = 1;
  EXPECT_EQ(One(options, {-kInf, kNaN, -kInf}), -1);
  options.top_k = 2;
  EXPECT_EQ(One(options, {-kInf, kNaN, -kInf}), -1);
  options.top_k = 0;
  options.top_p = 0.5f;
  EXPECT_EQ(One(options, {-kInf, kNaN, -kInf}), -1);
}

// What is guessed is what would be drawn, however much was drawn and guessed
// before, and a guess leaves nothing behind.
TEST(SamplerTest, AGuessIsWhatWouldBeDrawn) {
  std::mt19937 rng(5);
  for (int round = 0; round < 200; ++round) {
    GenerateOptions options;
    if (round % 3 > 0) options.temperature = 0.9f;
    if (round % 4 == 1) options.top_k = 5;
    if (round % 4 == 2) options.top_p = 0.8f;
    if (round % 2 == 0) options.repetition_penalty = 1.5f;
    if (round % 5 < 2) options.presence_penalty = 0.7f;
    if (round % 5 > 2) options.frequency_penalty = 0.6f;
    if (round % 7 == 0) options.logit_bias = {{3, 2.0f}};
    const std::vector<int32_t> transcript = {2, 5, 5, 9};
    Sampler sampler(options, 11, transcript), without(options, 11, transcript);
    std::vector<int32_t> guesses;
    std::vector<std::vector<float>> rows;
    for (uint32_t i = 0; i < 5; ++i) rows.push_back(RandomLogits(12, rng()));
    for (size_t i = 0; i < rows.size(); ++i) {
      std::vector<float> row = rows[i];
      guesses.push_back(sampler.Guess(
          row, i, guesses, nullptr,
          i == 0 ? std::vector<int32_t>{4} : std::vector<int32_t>()));
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      const std::vector<int32_t> banned(i == 0 ? 1 : 0, 4);
      std::vector<float> a = rows[i], b = rows[i];
      const int32_t drawn = sampler.Next(a, i, nullptr, {}, banned).id;
      EXPECT_EQ(drawn, guesses[i]) << round << " " << i;
      EXPECT_EQ(drawn, without.Next(b, i, nullptr, {}, banned).id);
    }
  }
}

TEST(SamplerTest, FrequenciesFollowTheSoftmax) {
  GenerateOptions options;
  for (const float temperature : {0.5f, 1.0f, 2.0f}) {
    options.temperature = temperature;
    const std::vector<float> logits = {1, 2, 0, -1, 2.5f, kNaN, -kInf};
    double total = 0;
    for (int i = 0; i < 5; ++i) total += std::exp(logits[i] / temperature);
    const auto frequencies = Frequencies(options, logits, 20000);
    for (int32_t i = 0; i < 5; ++i) {
      const double expected =
          std::exp(logits[static_cast<size_t>(i)] / temperature) / total;
      const auto found = frequencies.find(i);
      EXPECT_NEAR(found == frequencies.end() ? 0 : found->second, expected,
                  0.012)
          << "temperature " << temperature << " token " << i;
    }
    EXPECT_FALSE(frequencies.contains(5));
    EXPECT_FALSE(frequencies.contains(6));
  }
}

TEST(SamplerTest, ATinyTemperatureIsArgmax) {
  GenerateOptions options;
  options.temperature = 1e-40f;
  EXPECT_EQ(One(options, {1, 3, 2.999f}), 1);
}

// Every filter against a sort of the whole vocabulary.
TEST(SamplerTest, FiltersKeepExactlyTheRightTokens) {
  std::mt19937 rng(3);
  for (int round = 0; round < 25; ++round) {
    GenerateOptions options;
    options.temperature = 0.3f + static_cast<float>(rng() % 30) / 10;
    options.top_k = rng() % 3 == 0 ? 0 : 1 + rng() % 400;
    options.top_p =
        rng() % 3 == 0 ? 1.0f : static_cast<float>(1 + rng() % 999) / 1000;
    options.min_p =
        rng() % 3 == 0 ? static_cast<float>(rng() % 1000) / 5000 : 0.0f;
    const std::vector<float> logits =
        RandomLogits(1500, static_cast<uint32_t>(round), round % 2 ? 0.5f : 3);
    std::vector<int32_t> order(logits.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
    });
    const double best = logits[static_cast<size_t>(order[0])];
    const auto weight = [&](int32_t id) {
      return std::exp((logits[static_cast<size_t>(id)] - best) /
                      options.temperature);
    };
    if (options.top_k > 0) order.resize(std::min(options.top_k, order.size()));
    double total = 0;
    for (const int32_t id : order) total += weight(id);
    double mass = 0, kept_mass = 0;
    size_t kept = 0;
    // Within rounding of a boundary either verdict is right.
    double margin = 1;
    for (; kept < order.size(); ++kept) {
      const double w = weight(order[kept]);
      const double wanted = static_cast<double>(options.top_p) * total;
      if (kept > 0 && options.top_p < 1) {
        margin = std::min(margin, std::abs(mass - wanted) / total);
      }
      if (options.min_p > 0) {
        margin =
            std::min(margin, std::abs(w - static_cast<double>(options.min_p)));
      }
      if (w < static_cast<double>(options.min_p) ||
          (kept > 0 && options.top_p < 1 && mass >= wanted)) {
        break;
      }
      mass += w;
      kept_mass += w;
    }
    if (margin < 1e-5) continue;
    const auto frequencies = Frequencies(options, logits, 4000);
    for (const auto& [id, frequency] : frequencies) {
      const auto end = order.begin() + static_cast<long>(kept);
      EXPECT_NE(std::find(order.begin(), end, id), end)
          << "round " << round << " drew " << id;
    }
    for (size_t i = 0; i < kept; ++i) {
      const double expected = weight(order[i]) / kept_mass;
      if (expected < 0.05) continue;
      const auto found = frequencies.find(order[i]);
      EXPECT_NEAR(found == frequencies.end() ? 0 : found->second, expected,
                  0.05);
    }
  }
}

// The draw as GenerateOptions defines it, with everything sorted: walks the
// tokens that remain in descending order (in order of id if none is excluded)
// until their weights exceed a uniform share of all weights.
int32_t DrawnBySorting(const GenerateOptions& options,
                       const std::vector<float>& logits, uint64_t seed,
                       size_t position) {
  std::vector<int32_t> order;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] > -kInf) order.push_back(static_cast<int32_t>(i));
  }
  if (order.empty()) return -1;
  const auto logit = [&](int32_t id) {
    return logits[static_cast<size_t>(id)];
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logit(a) > logit(b); });
  const float inverse =
      std::min(1.0f / options.temperature, std::numeric_limits<float>::max());
  std::vector<float> weights(logits.size());
  ExpShifted(logits.data(), logit(order[0]), inverse, logits.size(),
             weights.data());
  const auto weight = [&](int32_t id) {
    return weights[static_cast<size_t>(id)];
  };
  const bool limited = options.top_k > 0 && options.top_k < logits.size();
  if (limited) order.resize(std::min(options.top_k, order.size()));
  double total = 0;
  if (limited) {
    for (const int32_t id : order) total += weight(id);
  } else {
    for (const double sum :
         ExpSums(logits, logit(order[0]), inverse, nullptr)) {
      total += sum;
    }
  }
  double mass = 0;
  size_t kept = 0;
  for (; kept < order.size(); ++kept) {
    if (weight(order[kept]) < options.min_p ||
        (kept > 0 && options.top_p < 1 &&
         mass >= static_cast<double>(options.top_p) * total)) {
      break;
    }
    mass += weight(order[kept]);
  }
  order.resize(kept);
  if (options.top_k == 0 && options.top_p >= 1 && options.min_p <= 0) {
    std::sort(order.begin(), order.end());
    mass = total;
  }
  double left = UniformAt(seed, position) * mass;
  for (const int32_t id : order) {
    left -= weight(id);
    if (left < 0) return id;
  }
  return order.back();
}

// Rows of many shapes, `kind` of kRowKinds.
constexpr size_t kRowKinds = 8;
std::vector<float> Row(size_t kind, size_t size, uint32_t seed) {
  std::vector<float> row = RandomLogits(size, seed, kind == 0 ? 0.01f : 3.0f);
  std::mt19937 rng(seed);
  for (size_t i = 0; i < size; ++i) {
    float& logit = row[i];
    if (kind == 1) logit = 2;
    if (kind == 2) logit = std::round(logit);
    if (kind == 3 && rng() % 5 == 0) logit = rng() % 2 ? kNaN : -kInf;
    if (kind == 4 && rng() % 50 == 0) logit = kInf;
    if (kind == 5 && i % 1024 < 16) logit = -20;  // what a guess may look at
    if (kind == 6) logit = i == size / 2 ? 40.0f : logit;
    if (kind == 7) logit *= 30;
  }
  return row;
}

TEST(SamplerTest, DrawsWhatSortingEverythingDraws) {
  std::mt19937 rng(17);
  const auto one_of = [&](auto values) {
    return values[rng() % values.size()];
  };
  for (int round = 0; round < 1200; ++round) {
    GenerateOptions options;
    options.temperature =
        one_of(std::vector<float>{1e-30f, 0.1f, 0.7f, 1, 1, 1.5f, 30, 1e30f});
    options.top_p = one_of(std::vector<float>{1, 1, 1e-6f, 0.5f, 0.9f, 0.95f,
                                              0.999f, 0x1.fffffep-1f});
    options.min_p = one_of(std::vector<float>{0, 0, 0, 1e-4f, 0.05f, 0.5f, 1});
    options.top_k =
        one_of(std::vector<size_t>{0, 0, 0, 1, 3, 40, 200, 3000, 1u << 20});
    const size_t kind = rng() % kRowKinds;
    const std::vector<float> row =
        Row(kind, one_of(std::vector<size_t>{1, 7, 100, 1500, 6000}),
            static_cast<uint32_t>(rng()));
    const uint64_t seed = rng();
    for (size_t position = 0; position < 4; ++position) {
      std::vector<float> logits = row;
      ASSERT_EQ(Sampler(options, seed, {}).Next(logits, position).id,
                DrawnBySorting(options, row, seed, position))
          << "round " << round << ": kind " << kind << " of " << row.size()
          << ", temperature " << options.temperature << ", top_k "
          << options.top_k << ", top_p " << options.top_p << ", min_p "
          << options.min_p;
    }
  }
}

TEST(SamplerTest, DrawsFromAWholeVocabularyWhatSortingDraws) {
  GenerateOptions options;
  options.temperature = 1;
  for (size_t kind = 0; kind < kRowKinds; ++kind) {
    const std::vector<float> row = Row(kind, 262144, 5);
    for (const float top_p : {0.5f, 0.97f}) {
      options.top_p = top_p;
      std::vector<float> logits = row;
      EXPECT_EQ(Sampler(options, 3, {}).Next(logits, 8).id,
                DrawnBySorting(options, row, 3, 8))
          << "kind " << kind << ", top_p " << top_p;
    }
  }
}

// What of a row decides: the same draws from that alone, and from some more.
TEST(SamplerTest, TheDecidingLogitsDrawTheSame) {
  std::mt19937 rng(11);
  for (int i = 0; i < 300; ++i) {
    GenerateOptions options;
    options.temperature =
        i % 5 == 0 ? 0 : 0.3f + 0.4f * static_cast<float>(rng() % 5);
    const size_t size = i % 2 == 0 ? 5000 : 40;
    constexpr size_t kCounts[] = {1, 2, 20, 64, 1000};
    options.top_k = options.temperature == 0 ? rng() % 3 : kCounts[rng() % 5];
    if (rng() % 2 == 0) options.top_p = 0.9f;
    if (rng() % 3 == 0) options.min_p = 0.05f;
    std::vector<float> row = RandomLogits(size, rng(), 4);
    if (i % 7 == 0) {
      for (float& logit : row) logit = std::round(logit);  // many are equal
    }
    if (i % 11 == 0) row[3] = kNaN;
    if (i % 3 == 0) {  // some of the likeliest must not come
      const auto best = std::max_element(row.begin(), row.end()) - row.begin();
      options.logit_bias = {{static_cast<int32_t>(best), -kInf},
                            {static_cast<int32_t>(rng() % size), -kInf},
                            {static_cast<int32_t>(best), -kInf}};
    }
    const size_t count = Sampler::DecidingLogits(options);
    const size_t drawn_from = options.temperature == 0 ? 1 : options.top_k;
    ASSERT_EQ(count, drawn_from + options.logit_bias.size());
    std::vector<float> descending = row;
    for (float& logit : descending) {
      if (std::isnan(logit)) logit = -kInf;
    }
    std::sort(descending.begin(), descending.end(), std::greater<>());
    for (const size_t more : {0u, 7u}) {
      TokenList largest;
      TokensFrom(row.data(), size, descending[std::min(size, count + more) - 1],
                 largest);
      for (size_t position = 0; position < 20; ++position) {
        std::vector<float> whole = row;
        EXPECT_EQ(Sampler(options, 3, {}).NextOf(largest, position).id,
                  Sampler(options, 3, {}).Next(whole, position).id)
            << i << " " << position;
      }
    }
  }
}

TEST(SamplerTest, AllLogitsDecideWhereOthersCount) {
  const auto deciding = [](auto change) {
    GenerateOptions options;
    options.temperature = 1;
    options.top_k = 64;
    change(options);
    return Sampler::DecidingLogits(options);
  };
  EXPECT_EQ(deciding([](auto&) {}), 64u);
  EXPECT_EQ(deciding([](auto& o) { o.top_k = 0; }), 0u);
  EXPECT_EQ(deciding([](auto& o) { o.top_k = 100000; }), 0u);
  EXPECT_EQ(deciding([](auto& o) { o.temperature = 0; }), 1u);
  EXPECT_EQ(deciding([](auto& o) { o.logprobs = true; }), 0u);
  EXPECT_EQ(deciding([](auto& o) { o.top_logprobs = 2; }), 0u);
  EXPECT_EQ(deciding([](auto& o) { o.repetition_penalty = 2; }), 0u);
  EXPECT_EQ(deciding([](auto& o) { o.presence_penalty = 1; }), 0u);
  EXPECT_EQ(deciding([](auto& o) { o.frequency_penalty = 1; }), 0u);
  EXPECT_EQ(deciding([](auto& o) { o.logit_bias = {{1, 2.0f}}; }), 0u);
  EXPECT_EQ(deciding([](auto& o) { o.logit_bias = {{1, -kInf}}; }), 65u);
  EXPECT_EQ(deciding([](auto& o) {
              o.logit_bias = {{1, -kInf}, {2, 0.0f}};
            }),
            0u);
  EXPECT_EQ(deciding([](auto& o) {
              o.logit_bias.assign(1000, {1, -kInf});
            }),
            0u);
  EXPECT_EQ(deciding([](auto& o) { o.logits_processor = [](auto, auto) {}; }),
            0u);
}

// All masked, or no numbers.
TEST(SamplerTest, NoDecidingLogitsAreMinusOne) {
  GenerateOptions options;
  for (const float temperature : {0.0f, 1.0f}) {
    options.temperature = temperature;
    options.top_k = 5;
    EXPECT_EQ(Sampler(options, 3, {}).NextOf({}, 0).id, -1);
  }
}

// Large rows, small ones and rows of another kind through one sampler.
TEST(SamplerTest, NothingOfAnEarlierRowRemains) {
  GenerateOptions options;
  options.temperature = 1;
  options.top_p = 0.9f;
  Sampler sampler(options, 4, {});
  for (size_t position = 0; position < 30; ++position) {
    std::vector<float> row = Row(position % kRowKinds, 1 + position * 97 % 2000,
                                 static_cast<uint32_t>(position));
    const int32_t expected = DrawnBySorting(options, row, 4, position);
    ASSERT_EQ(sampler.Next(row, position).id, expected) << position;
  }
}

TEST(SamplerTest, ADrawDependsOnSeedAndPositionOnly) {
  GenerateOptions options;
  options.temperature = 1.5f;
  const std::vector<float> logits = RandomLogits(3000, 5);
  Sampler first(options, 11, {}), second(options, 11, {}),
      other(options, 12, {});
  std::vector<float> row = logits;
  for (size_t position = 0; position < 5; ++position) {
    row = logits;
    first.Next(row, position);  // history must not matter
  }
  int differing = 0;
  for (size_t position = 100; position < 140; ++position) {
    row = logits;
    const int32_t a = first.Next(row, position).id;
    row = logits;
    EXPECT_EQ(a, second.Next(row, position).id);
    row = logits;
    differing += a != other.Next(row, position).id;
  }
  EXPECT_GT(differing, 30);
}

TEST(SamplerTest, PenaltiesAndBias) {
  GenerateOptions options;
  options.logit_bias = {{0, -kInf}, {2, 10.0f}};
  EXPECT_EQ(One(options, {9, 5, 0, 1}), 2);

  // Repetition counts the transcript, presence and frequency what was drawn.
  GenerateOptions repetition;
  repetition.repetition_penalty = 2;
  const std::vector<int32_t> transcript = {1};
  std::vector<float> row = {3, 4, -1};
  EXPECT_EQ(Sampler(repetition, 1, transcript).Next(row, 0).id, 0);
  row = {-3, -2.0f, -3.5f};
  EXPECT_EQ(Sampler(repetition, 1, transcript).Next(row, 0).id, 0);

  GenerateOptions frequency;
  frequency.frequency_penalty = 1;
  Sampler sampler(frequency, 1, transcript);
  std::vector<int32_t> drawn;
  for (size_t i = 0; i < 5; ++i) {
    row = {0, 2.5f, 1.2f};
    drawn.push_back(sampler.Next(row, i).id);
  }
  EXPECT_EQ(drawn, (std::vector<int32_t>{1, 1, 2, 1, 2}));

  GenerateOptions presence;
  presence.presence_penalty = 1;
  Sampler once(presence, 1, {});
  drawn.clear();
  for (size_t i = 0; i < 4; ++i) {
    row = {0, 2.5f, 1.2f};
    drawn.push_back(once.Next(row, i).id);
  }
  EXPECT_EQ(drawn, (std::vector<int32_t>{1, 1, 1, 1}));
}

TEST(SamplerTest, LogprobsAreOfTheRawLogits) {
  GenerateOptions options;
  options.logprobs = true;
  options.temperature = 0;
  options.logit_bias = {{1, 100.0f}};
  std::vector<float> row = {1, 2, 3};
  const SampledToken token = Sampler(options, 1, {}).Next(row, 0);
  EXPECT_EQ(token.id, 1);
  const double expected =
      2 - std::log(std::exp(1.0) + std::exp(2.0) + std::exp(3.0));
  EXPECT_NEAR(token.logprob, expected, 1e-6);
}

TEST(SamplerTest, MoreCandidatesThanTokensIsAllTokens) {
  GenerateOptions options;
  options.temperature = 1;
  options.top_k = 1000;
  const auto frequencies = Frequencies(options, {0, 0, 0}, 3000);
  EXPECT_EQ(frequencies.size(), 3u);
}

TEST(SamplerTest, AllMassOnOneToken) {
  GenerateOptions options;
  options.temperature = 1;
  options.top_p = 0.0001f;
  EXPECT_EQ(One(options, {0, 500, 0}), 1);
  options.top_p = 1;
  EXPECT_EQ(One(options, {0, 500, 0}), 1);
}

TEST(SamplerTest, TopLogprobsAreThoseOfASort) {
  GenerateOptions options;
  for (const size_t size : {size_t{1}, size_t{40}, size_t{5000}}) {
    std::vector<float> logits = RandomLogits(size, 3);
    if (size > 7) {
      logits[5] = logits[size - 2];  // of equals, the first
      logits[2] = kNaN;
      logits[7] = -kInf;
    }
    std::vector<int32_t> ids;
    for (size_t i = 0; i < size; ++i) {
      if (logits[i] > -kInf) ids.push_back(static_cast<int32_t>(i));
    }
    const auto logit = [&](int32_t id) {
      return logits[static_cast<size_t>(id)];
    };
    std::stable_sort(ids.begin(), ids.end(),
                     [&](int32_t a, int32_t b) { return logit(a) > logit(b); });
    const float log_sum = LogSumExp(logits.data(), size);
    for (const size_t n : {size_t{1}, size_t{5}, size_t{20}, size}) {
      if (n > size) continue;
      options.top_logprobs = n;
      options.logit_bias = {{0, -kInf}};  // they are of the raw logits
      options.temperature = n % 2 == 0 ? 0.7f : 0.0f;
      std::vector<float> row = logits;
      const SampledToken token = Sampler(options, 1, {}).Next(row, 0);
      if (size == 1) continue;  // it is banned
      ASSERT_EQ(token.top.size(), n);
      for (size_t i = 0; i < n; ++i) {
        const bool named = i < ids.size();
        EXPECT_EQ(token.top[i].id, named ? ids[i] : -1) << size << " " << i;
        EXPECT_EQ(token.top[i].logprob,
                  named ? logit(ids[i]) - log_sum : -kInf);
        if (named && ids[i] == token.id) {
          EXPECT_EQ(token.top[i].logprob, token.logprob);
        }
      }
    }
  }
}

TEST(SamplerTest, ReportingChangesNoDraw) {
  GenerateOptions plain;
  plain.temperature = 1.1f;
  plain.top_p = 0.9f;
  plain.repetition_penalty = 1.2f;
  GenerateOptions reporting = plain;
  reporting.top_logprobs = 5;
  reporting.logits_processor = [](auto, auto) {};
  Sampler a(plain, 5, {}), b(reporting, 5, {});
  for (size_t position = 0; position < 100; ++position) {
    std::vector<float> row = RandomLogits(300, position), same = row;
    EXPECT_EQ(a.Next(row, position).id, b.Next(same, position).id);
  }
}

TEST(SamplerTest, BannedTokensNeverCome) {
  const std::vector<int32_t> banned = {2, 0};
  GenerateOptions options;
  std::vector<float> row = {5, 1, 9};
  EXPECT_EQ(Sampler(options, 1, {}).Next(row, 0, nullptr, {}, banned).id, 1);
  options.temperature = 2;
  options.logit_bias = {{2, 50.0f}};
  for (size_t position = 0; position < 50; ++position) {
    row = {5, 1, 9};
    EXPECT_EQ(
        Sampler(options, 1, {}).Next(row, position, nullptr, {}, banned).id, 1);
  }
}

// It sees the conversation and the model's logits; what follows builds on what
// it leaves; log-probabilities do not.
TEST(SamplerTest, TheProcessorComesFirst) {
  GenerateOptions options;
  options.logprobs = true;
  options.logit_bias = {{1, 3.0f}};
  std::vector<std::vector<int32_t>> seen;
  options.logits_processor = [&](std::span<const int32_t> ids,
                                 std::span<float> logits) {
    seen.emplace_back(ids.begin(), ids.end());
    EXPECT_EQ(logits[1], 2);
    logits[2] = 4;
  };
  const std::vector<int32_t> transcript = {7, 8};
  Sampler sampler(options, 1, transcript);
  for (int i = 0; i < 2; ++i) {
    std::vector<float> row = {1, 2, 3};
    const float log_sum = LogSumExp(row.data(), row.size());
    const SampledToken token = sampler.Next(row, 2);
    EXPECT_EQ(token.id, 1);  // 5 by the bias
    EXPECT_EQ(token.logprob, 2 - log_sum);
  }
  const std::vector<std::vector<int32_t>> expected = {{7, 8}, {7, 8, 1}};
  EXPECT_EQ(seen, expected);
}

}  // namespace
}  // namespace gkv
