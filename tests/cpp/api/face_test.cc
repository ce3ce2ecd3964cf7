// Uses what an installed gemmakv shows, and nothing else of the core.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../../examples/cpp/two_conversations/random_model.h"

namespace {

const gkv::Gemma& Model() {
  static const gkv::Gemma gemma = RandomModel();
  return gemma;
}

gkv::KVCache NewCache(const gkv::CacheOptions& options = {}) {
  return gkv::CreateKVCache(Model().config(), options);
}

const std::vector<int32_t> kPrompt = {2, 10, 20, 30, 40};

std::vector<float> LogitsOf(gkv::KVCache& cache) {
  return Model().Logits(cache, std::vector<int32_t>{7});
}

// The message with which `fn` throws an E.
template <class E>
std::string ErrorOf(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const E& error) {
    return error.what();
  }
  return "no error";
}

TEST(CreateKVCacheTest, ByTypeNeedsNoModel) {
  const gkv::KVCache cache = gkv::CreateKVCache(gkv::ModelType::kGemma3_270M,
                                                {.capacity_tokens = 8192});
  EXPECT_EQ(cache.model_type(), "gemma3-270m");
  EXPECT_EQ(cache.capacity_tokens(), 8192u);
  EXPECT_EQ(cache.length(), 0u);
  EXPECT_EQ(cache.nbytes(), 0u);
}

TEST(CreateKVCacheTest, BadOptionsAreNamed) {
  EXPECT_NE(ErrorOf<gkv::InvalidArgument>([] {
              (void)NewCache({.block_tokens = 17});
            }).find("block_tokens: expected a power of two in 16..128, "
                    "found 17"),
            std::string::npos);
}

TEST(GemmaTest, GeneratesTokenByToken) {
  gkv::KVCache cache = NewCache();
  std::vector<int32_t> seen;
  gkv::GenerateOptions options;
  options.max_tokens = 6;
  const gkv::GenerateResult result =
      Model().Generate(cache, kPrompt, options, [&](const auto& event) {
        if (event.token_id >= 0) seen.push_back(event.token_id);
        return true;
      });
  EXPECT_EQ(result.token_ids, seen);
  EXPECT_EQ(cache.length(), kPrompt.size() + seen.size());
  std::vector<int32_t> all = kPrompt;
  all.insert(all.end(), seen.begin(), seen.end());
  EXPECT_EQ(cache.tokens(), all);
  EXPECT_EQ(cache.fingerprint(), Model().fingerprint());
}

TEST(GemmaTest, ADraftChangesNothing) {
  const gkv::Gemma draft = RandomModel();
  const gkv::Gemma drafting = Model().WithDraft(draft);
  gkv::KVCache plain = NewCache(), guessed = NewCache();
  gkv::GenerateOptions options;
  options.max_tokens = 40;
  const auto expected = Model().Generate(plain, kPrompt, options);
  options.speculate = gkv::Speculate::kDraft;
  const auto found = drafting.Generate(guessed, kPrompt, options);
  EXPECT_EQ(found.token_ids, expected.token_ids);
  EXPECT_EQ(LogitsOf(guessed), LogitsOf(plain));
  EXPECT_NE(ErrorOf<gkv::InvalidArgument>([] {
              (void)Model().WithDraft(Model());
            }).find("found the model itself"),
            std::string::npos);
  EXPECT_NE(ErrorOf<gkv::InvalidArgument>([&] {
              (void)Model().Generate(guessed, kPrompt, options);
            }).find("draft"),
            std::string::npos);
}

TEST(GemmaTest, FalseEndsTheGeneration) {
  gkv::KVCache cache = NewCache();
  const gkv::GenerateResult result = Model().Generate(
      cache, kPrompt, {}, [](const gkv::TokenEvent&) { return false; });
  EXPECT_EQ(result.finish_reason, gkv::FinishReason::kCancelled);
  EXPECT_EQ(cache.length(), kPrompt.size() + result.token_ids.size());
}

TEST(GemmaTest, ErrorsLeaveTheConversationAsItWas) {
  gkv::KVCache cache = NewCache({.capacity_tokens = 8});
  (void)Model().Logits(cache, kPrompt);
  EXPECT_NE(ErrorOf<gkv::InvalidArgument>([&] {
              (void)Model().Generate(cache, std::vector<int32_t>{-1});
            }).find("found -1 at index 0"),
            std::string::npos);
  EXPECT_NE(ErrorOf<gkv::Error>([&] {
              (void)Model().Logits(cache, kPrompt);
            }).find("capacity"),
            std::string::npos);
  gkv::KVCache other = gkv::CreateKVCache(gkv::ModelType::kGemma_2B);
  EXPECT_NE(ErrorOf<gkv::Mismatch>([&] {
              (void)Model().Generate(other, kPrompt);
            }),
            "no error");
  EXPECT_EQ(cache.tokens(), kPrompt);
}

TEST(GemmaTest, EmbedsTexts) {
  const std::vector<std::vector<int32_t>> texts = {kPrompt, {2, 9}};
  const std::vector<size_t> dims = Model().EmbeddingDims();
  ASSERT_EQ(dims, std::vector<size_t>{Model().config().hidden_size});
  const std::vector<float> vectors =
      Model().Embed(texts, {.pooling = gkv::Pooling::kLast});
  ASSERT_EQ(vectors.size(), 2 * dims[0]);
  for (size_t t = 0; t < 2; ++t) {
    float squares = 0;
    for (size_t i = 0; i < dims[0]; ++i) {
      squares += vectors[t * dims[0] + i] * vectors[t * dims[0] + i];
    }
    EXPECT_NEAR(squares, 1, 1e-5);
  }
  EXPECT_NE(ErrorOf<gkv::InvalidArgument>([&] {
              (void)Model().Embed(texts);
            }).find("not trained to give embeddings"),
            std::string::npos);
}

TEST(GemmaTest, LogitsOfAllPositions) {
  gkv::KVCache a = NewCache(), b = NewCache();
  const size_t vocab = Model().config().vocab_size;
  const std::vector<float> all = Model().Logits(a, kPrompt, true);
  const std::vector<float> last = Model().Logits(b, kPrompt);
  ASSERT_EQ(all.size(), kPrompt.size() * vocab);
  ASSERT_EQ(last.size(), vocab);
  EXPECT_TRUE(std::equal(last.begin(), last.end(), all.end() - vocab));
}

TEST(GemmaTest, ThreadsGetWhatTheyWouldHaveGotAlone) {
  std::vector<gkv::KVCache> caches;
  for (int i = 0; i < 4; ++i) caches.push_back(NewCache());
  std::vector<std::vector<int32_t>> found(caches.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < caches.size(); ++i) {
    threads.emplace_back(
        [&, i] { found[i] = Model().Generate(caches[i], kPrompt).token_ids; });
  }
  for (std::thread& thread : threads) thread.join();
  gkv::KVCache alone = NewCache();
  const auto expected = Model().Generate(alone, kPrompt).token_ids;
  for (const auto& tokens : found) EXPECT_EQ(tokens, expected);
}

TEST(KVCacheTest, ForksRewindsAndSnapshotsContinueAlike) {
  gkv::KVCache cache = NewCache();
  (void)Model().Logits(cache, kPrompt);
  EXPECT_TRUE(cache.MakeCheckpoint());
  gkv::KVCache fork = cache.Fork();
  EXPECT_GT(cache.shared_nbytes(), 0u);
  gkv::KVCache restored = gkv::KVCache::FromBytes(cache.ToBytes(true));
  const std::vector<float> expected = LogitsOf(cache);
  EXPECT_EQ(LogitsOf(fork), expected);
  EXPECT_EQ(LogitsOf(restored), expected);
  EXPECT_EQ(fork.Truncate(kPrompt.size()).replay_tokens, 0u);
  EXPECT_EQ(LogitsOf(fork), expected);
  EXPECT_THROW((void)fork.Truncate(100), gkv::InvalidArgument);
  gkv::KVCache moved = std::move(fork);
  moved.Reset();
  EXPECT_EQ(moved.length(), 0u);
  EXPECT_EQ(moved.fingerprint(), gkv::Hash128{});
}

TEST(KVCacheTest, BrokenSnapshotsAreRefused) {
  std::vector<uint8_t> bytes = NewCache().ToBytes();
  bytes[bytes.size() / 2] ^= 1;
  EXPECT_THROW((void)gkv::KVCache::FromBytes(bytes), gkv::CorruptFile);
}

TEST(BlockPoolTest, IsABudgetOfAllThatShareIt) {
  const auto pool = gkv::CreateBlockPool(1);
  gkv::KVCache cache = NewCache({.pool = pool});
  EXPECT_NE(ErrorOf<gkv::Error>([&] {
              (void)Model().Logits(cache, kPrompt);
            }),
            "no error");
  EXPECT_EQ(cache.length(), 0u);
}

TEST(GemmaTest, ProfileMustBeAskedFor) {
  EXPECT_NE(ErrorOf<gkv::InvalidArgument>([] {
              (void)Model().profile();
            }).find("profile"),
            std::string::npos);
}

}  // namespace
