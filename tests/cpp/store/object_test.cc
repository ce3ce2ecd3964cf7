#include "store/object.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "cache/filled_cache.h"

namespace gkv {
namespace {

constexpr size_t kAll = std::numeric_limits<size_t>::max();

std::vector<KvLayerSpec> HybridLayers() {
  const KvLayerSpec recurrent{
      .kind = LayerKind::kRecurrent, .lru_width = 5, .conv_tail = 3};
  std::vector<KvLayerSpec> layers{recurrent,
                                  {LayerKind::kSliding, 2, 32, 300},
                                  {LayerKind::kFull, 1, 64, 0},
                                  recurrent,
                                  {LayerKind::kSliding, 1, 32, 20}};
  layers.push_back(layers[2]);
  layers.back().shares = 2;
  return layers;
}

std::unique_ptr<Conversation> MakeConversation(KvDtype dtype,
                                               size_t block_tokens,
                                               size_t computed) {
  auto cache = std::make_unique<Conversation>(
      std::make_shared<KvLayout>(HybridLayers(), dtype, block_tokens),
      CacheOptions{.capacity_tokens = 2000, .pool = BlockPool::Create()}, "");
  std::vector<int32_t> tokens(computed + 1);
  std::iota(tokens.begin(), tokens.end(), 5);
  cache->Append(cache->Lock(), tokens);
  Fill(*cache, computed);
  return cache;
}

HeldSet Held(const Conversation& cache) {
  const KvContent content = cache.Export();
  HeldSet held;
  for (const auto& group : content.groups) held.push_back(group->Export(kAll));
  return held;
}

ObjectHead Head(const Conversation& cache, ObjectKind kind, size_t begin,
                size_t end) {
  ObjectHead head;
  head.kind = kind;
  head.fingerprint = {1, 2};
  head.layout = cache.layout().hash();
  head.parent.bytes[3] = 7;
  head.begin = begin;
  head.end = end;
  const std::vector<int32_t> tokens = cache.tokens();
  head.tokens.assign(tokens.begin() + static_cast<ptrdiff_t>(begin),
                     tokens.begin() + static_cast<ptrdiff_t>(end));
  return head;
}

ObjectHead ResumeHead(const Conversation& cache, size_t position) {
  ObjectHead head = Head(cache, ObjectKind::kResume,
                         position / kPageTokens * kPageTokens, position);
  const KvContent content = cache.Export();
  std::vector<SlidingRange> ranges;
  for (size_t g = 0; g < content.groups.size(); ++g) {
    const size_t window = cache.layout().groups()[g].window;
    if (window == 0) continue;
    ranges.push_back(SlidingRangeAt(
        window, content.groups[g]->Held().first, position));
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const auto& a, const auto& b) { return a.window < b.window; });
  head.sliding = ranges;
  return head;
}

// One may hold more before it than the other.
bool EndAlike(const std::vector<float>& a, const std::vector<float>& b) {
  const auto count = static_cast<ptrdiff_t>(std::min(a.size(), b.size()));
  return count > 0 && std::equal(a.end() - count, a.end(), b.end() - count);
}

class ObjectTest
    : public testing::TestWithParam<std::tuple<KvDtype, size_t, size_t>> {};

// A conversation is taken apart and put together in blocks of another size:
// every key, value and state is the same.
TEST_P(ObjectTest, WhatIsEncodedIsDecoded) {
  const auto [dtype, from_tokens, to_tokens] = GetParam();
  for (const size_t position : {700u, 512u, 513u, 30u, 256u, 255u}) {
    const auto cache = MakeConversation(dtype, from_tokens, position);
    const HeldSet held = Held(*cache);
    const auto other = std::make_unique<Conversation>(
        std::make_shared<KvLayout>(HybridLayers(), dtype, to_tokens),
        CacheOptions{.capacity_tokens = 2000, .pool = BlockPool::Create()}, "");
    const auto pool = BlockPool::Create();
    const ObjectHead resume = ResumeHead(*cache, position);
    std::vector<ObjectHead> heads;
    for (size_t begin = 0; begin + kPageTokens <= position;
         begin += kPageTokens) {
      heads.push_back(Head(*cache, ObjectKind::kPage, begin,
                           begin + kPageTokens));
      for (const SlidingRange& range : resume.sliding) {
        if (begin + kPageTokens <= range.own ||
            begin / kPageTokens < range.own / kPageTokens) {
          continue;
        }
        heads.push_back(Head(*cache, ObjectKind::kWindowPage, begin,
                             begin + kPageTokens));
        heads.back().window = range.window;
      }
    }
    heads.push_back(resume);
    HeldSet found(held.size());
    for (const ObjectHead& head : heads) {
      StoredBytes bytes = EncodeObject(head, cache->layout(), held);
      // Every other one as from a mapped file.
      bytes.mapped = head.begin % 512 == 0;
      const ObjectHead read = DecodeHead(bytes.bytes, other->layout());
      EXPECT_EQ(read, head);
      EXPECT_EQ(read.sliding, head.sliding);
      const HeldSet part = DecodeBlocks(bytes, read, other->layout(), *pool);
      for (size_t g = 0; g < part.size(); ++g) {
        found[g].insert(found[g].end(), part[g].begin(), part[g].end());
      }
    }
    KvContent content(other->layout_ptr(), pool);
    content.log.Append(cache->tokens());
    content.computed = position;
    for (size_t g = 0; g < found.size(); ++g) {
      std::sort(found[g].begin(), found[g].end(),
                [](const auto& a, const auto& b) { return a.begin < b.begin; });
      for (size_t i = 1; i < found[g].size(); ++i) {
        EXPECT_EQ(found[g][i - 1].end, found[g][i].begin);
      }
      content.groups[g]->Adopt(std::move(found[g]));
    }
    EXPECT_EQ(ResumeAt(content.groups, position), position);
    other->Adopt(other->Lock(), std::move(content));
    for (size_t layer = 0; layer < 5; ++layer) {
      if (layer == 0 || layer == 3) {
        EXPECT_EQ(other->CopyLayerState(layer), cache->CopyLayerState(layer));
        continue;
      }
      const auto [begin, end] = other->HeldRange(layer);
      EXPECT_EQ(end, position);
      for (const bool values : {false, true}) {
        EXPECT_TRUE(EndAlike(other->CopyLayer(layer, values),
                             cache->CopyLayer(layer, values)));
      }
    }
    // Going on writes to copies of what is mapped.
    Fill(*cache, position + 1);
    Fill(*other, position + 1);
    EXPECT_TRUE(EndAlike(other->CopyLayer(4, true), cache->CopyLayer(4, true)));
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, ObjectTest,
    testing::Combine(testing::Values(KvDtype::kF32, KvDtype::kBF16,
                                     KvDtype::kInt8),
                     testing::Values(16, 64, 128), testing::Values(32, 64)));

TEST(ObjectBytesTest, DamagedOnesAreRefused) {
  const auto cache = MakeConversation(KvDtype::kBF16, 64, 700);
  const HeldSet held = Held(*cache);
  const ObjectHead head = ResumeHead(*cache, 700);
  const StoredBytes object = EncodeObject(head, cache->layout(), held);
  const std::vector<uint8_t> sound(object.bytes.begin(), object.bytes.end());
  EXPECT_EQ(DecodeHead(sound, cache->layout()), head);
  std::mt19937 rng(1);
  for (size_t i = 0; i < 4000; ++i) {
    std::vector<uint8_t> bytes = sound;
    const size_t at = i < 1500 ? i : rng() % bytes.size();
    bytes[at] ^= static_cast<uint8_t>(1 + rng() % 255);
    EXPECT_THROW(DecodeHead(bytes, cache->layout()), Error) << at;
  }
  for (const size_t size : {size_t{0}, size_t{8}, size_t{191}, size_t{1000},
                            sound.size() - 1}) {
    EXPECT_THROW(DecodeHead({sound.data(), size}, cache->layout()), Error);
  }
  std::vector<uint8_t> longer = sound;
  longer.push_back(0);
  EXPECT_THROW(DecodeHead(longer, cache->layout()), Error);
}

// Bytes with sound hashes and other numbers: lengths that a writer would not
// have given are refused before they are used.
TEST(ObjectBytesTest, NumbersThatDoNotBelongTogetherAreRefused) {
  const auto cache = MakeConversation(KvDtype::kBF16, 64, 700);
  const StoredBytes object =
      EncodeObject(ResumeHead(*cache, 700), cache->layout(), Held(*cache));
  const auto with = [&](size_t at, uint64_t value) {
    std::vector<uint8_t> bytes(object.bytes.begin(), object.bytes.end());
    std::memcpy(&bytes[at], &value, sizeof(value));
    std::memset(&bytes[176], 0, 16);
    uint64_t payload_at;
    std::memcpy(&payload_at, &bytes[24], 8);
    const Hash128 hash =
        HashBytes({bytes.data(), std::min<size_t>(payload_at, bytes.size())});
    std::memcpy(&bytes[176], &hash, sizeof(hash));
    return bytes;
  };
  const size_t ranges_at = 192 + (700 - 512) * 4;
  for (const size_t at : {24u, 128u, 136u, 144u, 152u}) {
    for (const uint64_t value :
         {uint64_t{0}, uint64_t{1}, uint64_t{256}, uint64_t{511},
          uint64_t{1} << 39, std::numeric_limits<uint64_t>::max()}) {
      if (at == 144 && value == 0) continue;  // as it was
      EXPECT_THROW(DecodeHead(with(at, value), cache->layout()), Error)
          << at << " " << value;
    }
  }
  for (size_t field = 0; field < 6; ++field) {
    for (const uint64_t value :
         {uint64_t{3}, uint64_t{600}, std::numeric_limits<uint64_t>::max()}) {
      EXPECT_THROW(
          DecodeHead(with(ranges_at + 8 * field, value), cache->layout()),
          Error)
          << field << " " << value;
    }
  }
  std::vector<KvLayerSpec> other = HybridLayers();
  other[1].window = 301;
  EXPECT_THROW(
      DecodeHead(object.bytes, KvLayout(other, KvDtype::kBF16, 64)), Mismatch);
  EXPECT_THROW(DecodeHead(object.bytes,
                          KvLayout(HybridLayers(), KvDtype::kF32, 64)),
               Mismatch);
}

}  // namespace
}  // namespace gkv
