#ifndef GEMMAKV_TESTS_CACHE_FILLED_CACHE_H_
#define GEMMAKV_TESTS_CACHE_FILLED_CACHE_H_

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <vector>

#include "cache/conversation.h"
#include "ops/kv_strip.h"

// Conversations without a model: distinct keys and values at every place.

namespace gkv {

inline std::shared_ptr<const KvLayout> FilledLayout(KvDtype dtype,
                                                    size_t block_tokens) {
  return std::make_shared<KvLayout>(
      std::vector<KvLayerSpec>{{LayerKind::kSliding, 2, 32, 20},
                               {LayerKind::kFull, 1, 64, 0}},
      dtype, block_tokens);
}

// Computes positions [next_position(), end) with distinct keys, values and
// states at every place, one position a step.
inline void Fill(Conversation& cache, size_t end) {
  const KvLayout& layout = cache.layout();
  const size_t block_tokens = layout.block_tokens();
  for (size_t p = cache.next_position(); p < end; ++p) {
    KvStepView view = cache.Prepare(cache.Lock(), p, p + 1);
    for (size_t layer = 0; layer < layout.layers().size(); ++layer) {
      const KvLayerSpec& spec = layout.layers()[layer];
      if (spec.shares) continue;
      const auto& table = view.groups[layout.group_of(layer)];
      if (spec.kind == LayerKind::kRecurrent) {
        float* state = reinterpret_cast<float*>(table.blocks[0] +
                                                layout.state_offset(layer));
        for (size_t i = 0; i < layout.state_floats(layer); ++i) {
          state[i] =
              static_cast<float>(p * 100 + layer) + static_cast<float>(i) / 64;
        }
        continue;
      }
      uint8_t* block = table.blocks[p / block_tokens - table.first_block];
      for (size_t head = 0; head < spec.kv_heads; ++head) {
        std::vector<float> key(spec.head_dim), value(spec.head_dim);
        for (size_t i = 0; i < spec.head_dim; ++i) {
          key[i] = static_cast<float>(p * 100 + layer * 10 + head) +
                   static_cast<float>(i) / 64;
          value[i] = -key[i];
        }
        StoreKey(layout.dtype(), key.data(), spec.head_dim, p % block_tokens,
                 block_tokens, block + layout.key_offset(layer, head));
        StoreValue(layout.dtype(), value.data(), spec.head_dim,
                   p % block_tokens, block_tokens,
                   block + layout.value_offset(layer, head));
      }
    }
    cache.Commit(cache.Lock(), view);
  }
}

// Two layers, a sliding one with a window of 20 tokens and a full one; the last
// token is pending. The files tests/golden/snapshot_v1_*.kv hold these.
inline std::unique_ptr<Conversation> Filled(KvDtype dtype, size_t block_tokens,
                                            size_t length) {
  auto cache = std::make_unique<Conversation>(
      FilledLayout(dtype, block_tokens), CacheOptions{.capacity_tokens = 500},
      "some-model");
  std::vector<int32_t> tokens(length);
  std::iota(tokens.begin(), tokens.end(), 5);
  cache->Append(cache->Lock(), tokens);
  cache->Bind({7, 9});
  Fill(*cache, length - 1);
  return cache;
}

// Layers of all kinds and three checkpoints, at 9, 30 and 37 tokens of 60. The
// files tests/golden/snapshot_v2_*.kv hold these.
inline std::unique_ptr<Conversation> FilledHybrid(KvDtype dtype,
                                                  size_t block_tokens) {
  const KvLayerSpec recurrent{
      .kind = LayerKind::kRecurrent, .lru_width = 5, .conv_tail = 3};
  const auto layout = std::make_shared<KvLayout>(
      std::vector<KvLayerSpec>{recurrent,
                               {LayerKind::kSliding, 1, 32, 12},
                               recurrent,
                               {LayerKind::kFull, 1, 32, 0}},
      dtype, block_tokens);
  auto cache = std::make_unique<Conversation>(
      layout,
      CacheOptions{.capacity_tokens = 100, .checkpoint_bytes = size_t{1} << 20},
      "some-hybrid");
  cache->Bind({3, 4});
  for (const size_t length : {9, 30, 37, 60}) {
    std::vector<int32_t> tokens(length - cache->length());
    std::iota(tokens.begin(), tokens.end(),
              static_cast<int32_t>(cache->length()));
    cache->Append(cache->Lock(), tokens);
    Fill(*cache, length - 1);  // one is pending
    if (length < 60) {
      EXPECT_TRUE(cache->MakeCheckpoint());
    }
  }
  return cache;
}

// Two windows, and layers that share; a checkpoint at 30 tokens of 60. The file
// tests/golden/snapshot_v3.kv holds this one in blocks of 16, bf16.
inline std::unique_ptr<Conversation> FilledWindows(KvDtype dtype,
                                                   size_t block_tokens) {
  std::vector<KvLayerSpec> layers{{LayerKind::kSliding, 1, 32, 12},
                                  {LayerKind::kSliding, 2, 32, 25},
                                  {LayerKind::kFull, 1, 64, 0}};
  for (size_t owner = 0; owner < 3; ++owner) {
    layers.push_back(layers[owner]);
    layers.back().shares = owner;
  }
  auto cache = std::make_unique<Conversation>(
      std::make_shared<KvLayout>(layers, dtype, block_tokens),
      CacheOptions{.capacity_tokens = 100, .checkpoint_bytes = size_t{1} << 20},
      "some-windows");
  cache->Bind({5, 6});
  for (const size_t length : {30, 60}) {
    std::vector<int32_t> tokens(length - cache->length());
    std::iota(tokens.begin(), tokens.end(),
              static_cast<int32_t>(cache->length()));
    cache->Append(cache->Lock(), tokens);
    Fill(*cache, length - 1);
    if (length < 60) {
      EXPECT_TRUE(cache->MakeCheckpoint());
    }
  }
  return cache;
}

inline void ExpectSame(const Conversation& a, const Conversation& b) {
  EXPECT_EQ(a.tokens(), b.tokens());
  EXPECT_EQ(a.fingerprint(), b.fingerprint());
  EXPECT_EQ(a.model_type(), b.model_type());
  EXPECT_EQ(a.capacity_tokens(), b.capacity_tokens());
  EXPECT_EQ(a.next_position(), b.next_position());
  EXPECT_EQ(a.layout().hash(), b.layout().hash());
  for (size_t layer = 0; layer < a.layout().layers().size(); ++layer) {
    EXPECT_EQ(a.HeldRange(layer), b.HeldRange(layer));
    if (a.layout().layers()[layer].kind == LayerKind::kRecurrent) {
      EXPECT_EQ(a.CopyLayerState(layer), b.CopyLayerState(layer));
      continue;
    }
    EXPECT_EQ(a.CopyLayer(layer, false), b.CopyLayer(layer, false));
    EXPECT_EQ(a.CopyLayer(layer, true), b.CopyLayer(layer, true));
  }
}

}  // namespace gkv

#endif  // GEMMAKV_TESTS_CACHE_FILLED_CACHE_H_
