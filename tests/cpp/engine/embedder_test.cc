#include "engine/embedder.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/sanitized.h"
#include "base/says.h"
#include "engine/engine.h"
#include "model/tiny_model.h"

namespace gkv {
namespace {

using Tokens = std::vector<int32_t>;

std::vector<Tokens> Texts(size_t count, uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<Tokens> texts;
  for (size_t i = 0; i < count; ++i) {
    const size_t length = 1 + rng() % (kSanitized ? 100 : 300);
    texts.push_back(RandomTokens(length, static_cast<uint32_t>(rng())));
  }
  return texts;
}

std::vector<std::span<const int32_t>> Spans(const std::vector<Tokens>& texts) {
  return {texts.begin(), texts.end()};
}

std::vector<float> Embed(Embedder& embedder, const std::vector<Tokens>& texts,
                         const std::function<void()>& poll = {}) {
  std::vector<float> out(texts.size() * 64, NAN);
  const auto spans = Spans(texts);
  embedder.Embed(spans, out.data(), poll);
  return out;
}

std::shared_ptr<const Model> Tiny() {
  static const std::shared_ptr<const Model> model =
      TinyModel(TinyFamily("gemma-embedding"));
  return model;
}

std::shared_ptr<Engine> Load(const TinyOptions& options, size_t threads = 2) {
  MemorySource source = TinyTensors(options);
  LoadOptions load;
  load.threads = threads;
  return Engine::FromTensors(TinyConfig(options), source, load);
}

std::string ErrorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

TEST(EmbedderTest, ManyTextsHaveTheBitsOfEachAlone) {
  const std::vector<Tokens> texts = Texts(40, 1);
  Embedder together(Tiny(), 2), alone(Tiny(), 1);
  const std::vector<float> found = Embed(together, texts);
  EXPECT_LT(together.steps(), texts.size() / 2);
  for (size_t t = 0; t < texts.size(); ++t) {
    const std::vector<float> one = Embed(alone, {texts[t]});
    EXPECT_TRUE(std::equal(one.begin(), one.end(), found.begin() + t * 64))
        << t;
  }
  EXPECT_EQ(alone.steps(), texts.size());
}

TEST(EmbedderTest, TextsOfAnyLengthAreComputed) {
  Embedder embedder(Tiny(), 2);
  EXPECT_TRUE(Embed(embedder, {}).empty());
  for (const size_t length : {1, 511, 512, 513, 1024}) {
    const std::vector<float> found = Embed(
        embedder, {RandomTokens(length, 1), RandomTokens(2, 2)});
    for (const float value : found) EXPECT_TRUE(std::isfinite(value));
  }
}

TEST(EmbedderTest, CallersShareStepsAndGetTheirOwn) {
  Embedder embedder(Tiny(), 2);
  std::vector<std::vector<Tokens>> calls;
  std::vector<std::vector<float>> expected, found(12);
  for (uint32_t i = 0; i < found.size(); ++i) {
    calls.push_back(Texts(1 + i % 3 * 10, 100 + i));
    expected.push_back(Embed(embedder, calls.back()));
  }
  const size_t before = embedder.steps();
  std::vector<std::thread> threads;
  for (size_t i = 0; i < calls.size(); ++i) {
    threads.emplace_back([&, i] { found[i] = Embed(embedder, calls[i]); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(found, expected);
  EXPECT_LE(embedder.steps() - before, before);
}

TEST(EmbedderTest, ACallThatIsGivenUpLeavesTheOthers) {
  Embedder embedder(Tiny(), 2);
  const std::vector<Tokens> texts = Texts(20, 3);
  const std::vector<float> expected = Embed(embedder, texts);
  std::atomic<size_t> given_up = 0;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const std::vector<Tokens> own = Texts(30, 4);
      try {
        (void)Embed(embedder, own, [] { throw std::runtime_error("enough"); });
      } catch (const std::runtime_error&) {
        ++given_up;
      }
    });
  }
  EXPECT_EQ(Embed(embedder, texts), expected);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(given_up, 4u);
  EXPECT_EQ(Embed(embedder, texts), expected);
}

TEST(EmbedderTest, AShortCallDoesNotWaitForAllOfALongOne) {
  Embedder embedder(Tiny(), 1);
  const std::vector<Tokens> many(40, RandomTokens(300, 5));
  std::atomic<bool> began = false, goes_on = false;
  std::thread other([&] {
    // It is between two steps until the short one is through.
    (void)Embed(embedder, many, [&] {
      began = true;
      while (!goes_on) std::this_thread::yield();
    });
  });
  while (!began) std::this_thread::yield();
  const size_t before = embedder.steps();
  (void)Embed(embedder, {RandomTokens(4, 6)});
  EXPECT_LE(embedder.steps() - before, 2u);
  goes_on = true;
  other.join();
  EXPECT_GT(embedder.steps() - before, 10u) << "all of the long one";
}

TEST(GemmaEmbedTest, VectorsHaveLengthOneAtEachDim) {
  TinyOptions options = TinyFamily("gemma-embedding");
  options.hidden = 160;
  const auto gemma = Load(options);
  const std::vector<Tokens> texts = Texts(3, 7);
  const std::vector<float> whole = gemma->Embed(Spans(texts));
  const std::vector<float> leading = gemma->Embed(Spans(texts), {.dim = 128});
  ASSERT_EQ(whole.size(), 3u * 160);
  ASSERT_EQ(leading.size(), 3u * 128);
  for (size_t t = 0; t < 3; ++t) {
    double squares = 0, product = 0, length = 0;
    for (size_t i = 0; i < 128; ++i) {
      const double a = static_cast<double>(leading[t * 128 + i]);
      const double b = static_cast<double>(whole[t * 160 + i]);
      squares += a * a;
      product += a * b;
      length += b * b;
    }
    EXPECT_NEAR(squares, 1, 1e-6);
    EXPECT_NEAR(product, std::sqrt(length), 1e-6);
  }
}

TEST(GemmaEmbedTest, BadArgumentsAreNamed) {
  const auto gemma = Load(TinyFamily("gemma-embedding"));
  const auto error = [&](const Tokens& text, const EmbedOptions& options = {}) {
    return ErrorOf([&] {
      const std::vector<Tokens> texts = {{5}, text};
      (void)gemma->Embed(Spans(texts), options);
    });
  };
  EXPECT_TRUE(Says(error({}), {"texts[1]", "1..1024 tokens", "found 0"}));
  EXPECT_TRUE(Says(error(Tokens(1025, 5)),
                   {"texts[1]", "1..1024 tokens", "found 1025"}));
  EXPECT_TRUE(Says(error({5, 97}), {"texts[1]", "97 at index 1", "0..96"}));
  EXPECT_TRUE(Says(error({5, -1}), {"texts[1]", "-1 at index 1", "0..96"}));
  EXPECT_TRUE(Says(error({5}, {.dim = 32}), {"dim", "32", "expected 64"}));
  EXPECT_TRUE(Says(error({5}, {.pooling = Pooling::kLast}),
                   {"pooling", "expected none", "mean"}));
}

TEST(GemmaEmbedTest, AModelThatGeneratesGivesHiddenStatesOnRequest) {
  for (const std::string& family : CheckedFamilies()) {
    SCOPED_TRACE(family);
    const auto gemma = Load(TinyFamily(family));
    const std::vector<Tokens> texts = Texts(5, 8);
    EXPECT_TRUE(Says(ErrorOf([&] { (void)gemma->Embed(Spans(texts)); }),
                     {"embeddings", "pooling", "'mean'", "'last'"}));
    const auto last = gemma->Embed(Spans(texts), {.pooling = Pooling::kLast});
    const auto mean = gemma->Embed(Spans(texts), {.pooling = Pooling::kMean});
    const size_t hidden = gemma->config().hidden_size;
    for (size_t t = 0; t < texts.size(); ++t) {
      const size_t length = texts[t].size();
      std::vector<float> states(length * hidden);
      const auto cache =
          CreateConversation(gemma->config(), {.kv_dtype = KvDtype::kF32});
      const auto stream = gemma->StartRows(cache, texts[t], RowOutput::kHidden,
                                           true, states.data());
      while (!stream->WaitDone()) continue;
      (void)stream->Result();
      std::vector<double> sum(hidden);
      for (size_t row = 0; row < length; ++row) {
        AddToSums(&states[row * hidden], hidden, sum.data());
      }
      std::vector<float> expected(hidden);
      UnitVector(&states[(length - 1) * hidden], hidden, expected.data());
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(),
                             last.begin() + t * hidden));
      for (size_t i = 0; i < hidden; ++i) {
        expected[i] = static_cast<float>(sum[i] / static_cast<double>(length));
      }
      UnitVector(expected.data(), hidden, expected.data());
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(),
                             mean.begin() + t * hidden));
    }
  }
}

TEST(GemmaEmbedTest, AModelOfEmbeddingsGeneratesNothing) {
  const auto gemma = Load(TinyFamily("gemma-embedding"));
  // A cache whose keys and values lie in the same way is no way in.
  TinyOptions causal = TinyFamily("gemma-embedding");
  causal.bidirectional = false;
  causal.dense_dim = 0;
  const auto cache = CreateConversation(TinyConfig(causal));
  const Tokens prompt = {2, 5};
  float logits[97];
  for (const std::string& error :
       {ErrorOf([&] { (void)gemma->Generate(cache, prompt); }), ErrorOf([&] {
          (void)gemma->StartLogits(cache, prompt, false, logits);
        })}) {
    EXPECT_TRUE(Says(error, {"gemma-embedding", "expected embed"}));
  }
  EXPECT_EQ(cache->length(), 0u);
}

TEST(GemmaEmbedTest, WorksInAForkedChild) {
  const auto gemma = Load(TinyFamily("gemma-embedding"));
  const std::vector<Tokens> texts = Texts(4, 9);
  const std::vector<float> expected = gemma->Embed(Spans(texts));
  const pid_t child = fork();
  if (child == 0) _exit(gemma->Embed(Spans(texts)) == expected ? 0 : 1);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(EmbedderTest, ProfileIsOfAPhaseOfItsOwn) {
  Embedder embedder(Tiny(), 2, true);
  const std::vector<Tokens> texts = Texts(5, 9);
  (void)Embed(embedder, texts);
  const StepProfile profile = embedder.profile();
  for (size_t p = 0; p < kStepPhases; ++p) {
    const PhaseProfile& phase = profile.phases[p];
    if (p != static_cast<size_t>(StepPhase::kEmbedding)) {
      EXPECT_EQ(phase.steps, 0u);
      continue;
    }
    size_t tokens = 0;
    for (const Tokens& text : texts) tokens += text.size();
    double sum = 0;
    for (const double seconds : phase.part_s) sum += seconds;
    EXPECT_EQ(phase.steps, embedder.steps());
    EXPECT_EQ(phase.rows, tokens);
    EXPECT_GT(phase.seconds, 0);
    EXPECT_NEAR(sum, phase.seconds, 1e-9 * kStepParts);
  }
}

}  // namespace
}  // namespace gkv
