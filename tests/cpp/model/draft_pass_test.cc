// Guesses of a drafter: what they read, and that none depends on another. That
// they are right is shown by tests/python/models/test_drafter_goldens.py.

#include "model/draft_pass.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/fp_environment.h"
#include "model/create_conversation.h"
#include "model/tiny_model.h"

namespace gkv {
namespace {

constexpr size_t kVocab = 96;

TinyOptions WithVocab(TinyOptions options, bool clusters = false) {
  options.change = [change = options.change, clusters](ModelConfig& config) {
    change(config);
    config.vocab_size = kVocab;
    if (config.ple_vocab != 0) config.ple_vocab = kVocab;
    if (!clusters) return;
    config.num_centroids = 6;
    config.centroids_used = 2;
  };
  return options;
}

TinyOptions Target() { return WithVocab(TinyFamily("gemma4")); }
TinyOptions Drafter(bool clusters) {
  return WithVocab(TinyFamily("gemma4-assistant"), clusters);
}

class DraftPassTest : public ::testing::Test {
 protected:
  // A conversation whose tokens but the last are computed.
  struct Started {
    std::shared_ptr<Conversation> cache;
    std::shared_ptr<const KvStepView> view;
    std::vector<float> state;
    int32_t token;
  };

  void Load(TinyOptions target, TinyOptions drafter) {
    target_ = TinyModel(target);
    drafter_ = TinyModel(drafter);
  }
  Started Begin(size_t length, KvDtype dtype = KvDtype::kBF16) {
    const auto tokens =
        RandomTokens(length, static_cast<uint32_t>(length), kVocab);
    Started c{CreateConversation(target_->config, {.kv_dtype = dtype}),
              {},
              std::vector<float>(target_->config.hidden_size),
              tokens.back()};
    const RunLock lock = c.cache->Lock();
    c.cache->Append(lock, tokens);
    KvStepView step = c.cache->Prepare(lock, 0, length - 1);
    ThreadPool pool(1);
    ForwardPass pass(*target_, pool);
    const SequenceSlice slice{std::span(tokens).first(length - 1), &step,
                              &c.cache->layout(),
                              {RowOutput::kHidden, 1, c.state.data()}};
    pass.Step({&slice, 1});
    c.cache->Commit(lock, step);
    c.view = std::make_shared<const KvStepView>(*c.cache->View(lock));
    EXPECT_EQ(c.view->end, length - 1);
    return c;
  }
  // [conversations, guesses, vocabulary and state]: rounds of all together.
  std::vector<float> Guess(std::vector<Started>& conversations, size_t guesses,
                           size_t threads) {
    ThreadPool pool(threads);
    DraftPass pass(*drafter_, *target_, pool);
    const size_t width = target_->config.hidden_size;
    const size_t row = kVocab + width;
    std::vector<float> found(conversations.size() * guesses * row);
    for (size_t round = 0; round < guesses; ++round) {
      std::vector<DraftPass::Row> rows;
      for (size_t i = 0; i < conversations.size(); ++i) {
        float* const out = found.data() + (i * guesses + round) * row;
        const Started& c = conversations[i];
        const bool first = round == 0;
        const float* const before = out - row;
        rows.push_back(
            {.view = c.view.get(),
             .layout = &c.cache->layout(),
             .token = first ? c.token
                            : static_cast<int32_t>(
                                  std::max_element(before, before + kVocab) -
                                  before),
             .state = first ? c.state.data() : before + kVocab,
             .next = out + kVocab,
             .logits = out});
      }
      pass.Run(rows);
    }
    return found;
  }

  const ScopedFpEnvironment fp_environment_;
  std::shared_ptr<const Model> target_, drafter_;
};

TEST(ChooseLargestTest, NanComesAfterAllOthers) {
  std::mt19937 random(3);
  for (int i = 0; i < 200; ++i) {
    // Few values, so that many are equal.
    std::vector<float> scores(1 + random() % 100);
    for (float& score : scores) {
      const uint32_t value = random() % 8;
      score = value < 3 ? std::numeric_limits<float>::quiet_NaN()
                        : static_cast<float>(value);
    }
    std::vector<std::pair<float, uint32_t>> expected;
    for (uint32_t at = 0; at < scores.size(); ++at) {
      const float score = scores[at];
      expected.emplace_back(std::isnan(score) ? 0 : -score, at);
    }
    std::sort(expected.begin(), expected.end());
    const size_t count = 1 + random() % scores.size();
    std::vector<uint32_t> chosen(scores.size());
    ChooseLargest(scores, count, chosen);
    std::sort(chosen.begin(), chosen.begin() + static_cast<ptrdiff_t>(count));
    std::vector<uint32_t> largest;
    for (size_t n = 0; n < count; ++n) largest.push_back(expected[n].second);
    std::sort(largest.begin(), largest.end());
    chosen.resize(count);
    EXPECT_EQ(chosen, largest) << "round " << i;
  }
}

// The largest are those of all.
TEST_F(DraftPassTest, TheLargestAreThoseOfAll) {
  for (const bool clusters : {false, true}) {
    Load(Target(), Drafter(clusters));
    std::vector<Started> all;
    for (const size_t length : {3, 17, 60}) all.push_back(Begin(length));
    const std::vector<float> found = Guess(all, 1, 2);
    const size_t width = target_->config.hidden_size;
    ThreadPool pool(2);
    DraftPass pass(*drafter_, *target_, pool);
    for (const size_t count : {1, 5}) {
      std::vector<TokenList> largest(all.size());
      std::vector<float> next(all.size() * width);
      std::vector<DraftPass::Row> rows;
      for (size_t i = 0; i < all.size(); ++i) {
        rows.push_back({.view = all[i].view.get(),
                        .layout = &all[i].cache->layout(),
                        .token = all[i].token,
                        .state = all[i].state.data(),
                        .next = next.data() + i * width,
                        .largest = &largest[i],
                        .count = count});
      }
      pass.Run(rows);
      for (size_t i = 0; i < all.size(); ++i) {
        const float* const logits = found.data() + i * (kVocab + width);
        std::vector<int32_t> order(kVocab);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
          return logits[a] > logits[b];
        });
        const TokenList& list = largest[i];
        EXPECT_TRUE(std::is_sorted(list.ids.begin(), list.ids.end()));
        for (size_t k = 0; k < count; ++k) {
          const auto at = std::find(list.ids.begin(), list.ids.end(), order[k]);
          ASSERT_NE(at, list.ids.end()) << clusters << i;
          EXPECT_EQ(list.logits[static_cast<size_t>(at - list.ids.begin())],
                    logits[order[k]]);
        }
      }
    }
  }
}

// Whatever runs beside it, and on how many threads.
TEST_F(DraftPassTest, NoGuessDependsOnAnother) {
  for (const bool clusters : {false, true}) {
    for (const bool mixed : {false, true}) {
      TinyOptions drafter = Drafter(clusters);
      if (mixed) {
        drafter.types = {TensorType::kQ8_0, TensorType::kQ5_0,
                         TensorType::kQ4_0, TensorType::kBF16,
                         TensorType::kF16};
      }
      Load(Target(), drafter);
      std::vector<Started> all;
      for (const size_t length : {2, 3, 17, 26, 60, 200, 401}) {
        all.push_back(Begin(length));
      }
      constexpr size_t kGuesses = 3;
      const std::vector<float> together = Guess(all, kGuesses, 3);
      const size_t size = together.size() / all.size();
      for (size_t i = 0; i < all.size(); ++i) {
        std::vector<Started> one = {all[i]};
        const std::vector<float> alone = Guess(one, kGuesses, 1);
        const std::vector<float> part(together.begin() + i * size,
                                      together.begin() + (i + 1) * size);
        ASSERT_EQ(alone, part) << clusters << mixed << i;
        size_t finite = 0;
        for (size_t k = 0; k < kVocab; ++k) finite += std::isfinite(part[k]);
        EXPECT_EQ(finite, clusters ? kVocab / 3 : kVocab);
      }
    }
  }
}

// What the layers that the drafter reads hold is all that counts of the cache.
TEST_F(DraftPassTest, ReadsTheLastLayersThatHaveKeys) {
  Load(Target(), Drafter(false));
  const std::vector<size_t> read =
      LayersRead(drafter_->config, target_->config);
  EXPECT_EQ(read, (std::vector<size_t>{4, 4, 4, 5}));
  constexpr size_t kLength = 60;
  Started c = Begin(kLength);
  std::vector<Started> one = {c};
  const std::vector<float> expected = Guess(one, 1, 1);
  const KvLayout& layout = c.cache->layout();
  const size_t block_tokens = layout.block_tokens();
  // Turns signs of values about a position; whether that was noticed.
  const auto counts = [&](size_t layer, size_t position) {
    const GroupStep& group = c.view->groups[layout.group_of(layer)];
    uint8_t* const block =
        group.blocks[position / block_tokens - group.first_block];
    const size_t bytes = target_->config.layers[layer].head_dim *
                         block_tokens * sizeof(uint16_t);
    uint8_t* const strip = block + layout.value_offset(layer, 0);
    const std::vector<uint8_t> before(strip, strip + bytes);
    for (size_t i = 0; i < bytes; ++i) strip[i] ^= 0x80;
    const std::vector<float> found = Guess(one, 1, 1);
    std::copy(before.begin(), before.end(), strip);
    return found != expected;
  };
  for (size_t layer = 0; layer < target_->config.num_layers(); ++layer) {
    if (target_->config.layers[layer].shares_kv) continue;
    EXPECT_EQ(counts(layer, kLength - 2), layer == 4 || layer == 5) << layer;
  }
  EXPECT_TRUE(counts(5, 0));
  EXPECT_EQ(Guess(one, 1, 1), expected);
}

TEST_F(DraftPassTest, WhatDoesNotFitIsNamed) {
  const ModelConfig target = TinyConfig(Target());
  const ModelConfig drafter = TinyConfig(Drafter(true));
  RequireDrafterFor(drafter, target);
  const auto refused = [&](const std::string& expected,
                           const std::function<void(ModelConfig&)>& change) {
    ModelConfig other = target;
    change(other);
    try {
      RequireDrafterFor(drafter, other);
      ADD_FAILURE() << expected;
    } catch (const Mismatch& error) {
      EXPECT_NE(std::string(error.what()).find(expected), std::string::npos)
          << error.what();
    }
  };
  refused("is for a model of hidden_size 64, found one of 128 to guess for",
          [](ModelConfig& c) { c.hidden_size = 128; });
  refused("is for a model of vocab_size 96, found one of 97",
          [](ModelConfig& c) { c.vocab_size = 97; });
  refused("guesses for models of Gemma 4, found one of architecture gemma3",
          [](ModelConfig& c) { c.architecture = "gemma3"; });
  refused("reads sliding layers of sliding_window 24, found 25",
          [](ModelConfig& c) { c.layers[4].window = 25; });
  refused("reads full layers of head_dim 64, found 32",
          [](ModelConfig& c) { c.layers[5].head_dim = 32; });
  refused("reads full layers of kv_heads 1, found 2",
          [](ModelConfig& c) { c.layers[5].kv_heads = 2; });
  refused("reads full layers of rope_base ",
          [](ModelConfig& c) { c.layers[5].rope_base = 7; });
  refused("reads the keys of full layers, of which the model to guess for has "
          "none",
          [](ModelConfig& c) {
            for (LayerConfig& layer : c.layers) {
              if (layer.kind == LayerKind::kFull) layer.shares_kv = 0;
            }
          });
}

TEST_F(DraftPassTest, AnOrderingHoldsEachTokenOnce) {
  const TinyOptions options = Drafter(true);
  for (const float wrong : {-1.0f, 0.5f, 96.0f, 3.0f, std::nanf("")}) {
    MemorySource source = TinyTensors(options);
    auto& bytes = source.tensors.at("masked_embd_ordering").bytes;
    std::vector<float> order(kVocab);
    std::memcpy(order.data(), bytes.data(), bytes.size());
    // 3 comes twice.
    order[order[7] == 3 ? 8 : 7] = wrong;
    std::memcpy(bytes.data(), order.data(), bytes.size());
    ThreadPool pool(1);
    try {
      LoadWeights(TinyConfig(options), source, pool, {});
      ADD_FAILURE() << wrong;
    } catch (const CorruptFile& error) {
      EXPECT_NE(std::string(error.what())
                    .find("tensor masked_embd_ordering has "),
                std::string::npos)
          << error.what();
      EXPECT_NE(std::string(error.what()).find("expected each of 0..95 once"),
                std::string::npos);
    }
  }
}

}  // namespace
}  // namespace gkv
