#ifndef GEMMAKV_TESTS_STORE_FILLED_PREFIX_H_
#define GEMMAKV_TESTS_STORE_FILLED_PREFIX_H_

#include <algorithm>
#include <memory>
#include <vector>

#include "cache/conversation.h"
#include "ops/kv_strip.h"

// Conversations without a model, whose keys, values and states follow from all
// tokens up to their position, as a model's do.

namespace gkv {

inline constexpr Hash128 kFilledFingerprint{11, 13};

inline std::vector<KvLayerSpec> HybridLayers() {
  const KvLayerSpec recurrent{
      .kind = LayerKind::kRecurrent, .lru_width = 5, .conv_tail = 3};
  return {recurrent,
          {LayerKind::kSliding, 2, 32, 300},
          {LayerKind::kFull, 1, 64, 0},
          {LayerKind::kSliding, 1, 32, 20}};
}

inline std::vector<KvLayerSpec> SlidingLayers() {
  return {{LayerKind::kSliding, 2, 32, 40}, {LayerKind::kFull, 1, 32, 0}};
}

inline std::vector<KvLayerSpec> FullLayers() {
  return {{LayerKind::kFull, 2, 32, 0}};
}

inline std::unique_ptr<Conversation> EmptyConversation(
    std::vector<KvLayerSpec> layers, KvDtype dtype, size_t block_tokens,
    std::shared_ptr<BlockPool> pool) {
  auto cache = std::make_unique<Conversation>(
      std::make_shared<KvLayout>(std::move(layers), dtype, block_tokens),
      CacheOptions{.capacity_tokens = 20'000, .pool = std::move(pool)}, "");
  cache->Bind(kFilledFingerprint);
  return cache;
}

// What stands for everything up to each position.
inline std::vector<float> FillNumbers(std::span<const int32_t> tokens) {
  std::vector<float> numbers;
  uint32_t state = 1;
  for (const int32_t token : tokens) {
    state = state * 1664525u + static_cast<uint32_t>(token) * 69069u + 1;
    numbers.push_back(static_cast<float>(state >> 16));
  }
  return numbers;
}

// Computes up to `end` in steps of `rows` positions; what Commit gives at the
// positions `at` comes back.
inline std::vector<Checkpoint> FillByTokens(Conversation& cache, size_t end,
                                            std::vector<size_t> at = {},
                                            size_t rows = 37) {
  const KvLayout& layout = cache.layout();
  const size_t block_tokens = layout.block_tokens();
  const std::vector<float> numbers = FillNumbers(cache.tokens());
  std::vector<Checkpoint> points;
  for (size_t begin = cache.next_position(); begin < end;) {
    const size_t last = std::min(begin + rows, end);
    std::vector<size_t> here, keep;
    for (const size_t p : at) {
      if (p > begin && p <= last) here.push_back(p);
      if (p > begin && p < last) keep.push_back(p);
    }
    KvStepView view = cache.Prepare(cache.Lock(), begin, last, keep);
    for (size_t layer = 0; layer < layout.layers().size(); ++layer) {
      const KvLayerSpec& spec = layout.layers()[layer];
      auto& table = view.groups[layout.group_of(layer)];
      for (size_t p = begin; p < last; ++p) {
        if (spec.kind == LayerKind::kRecurrent) {
          const auto write = [&](uint8_t* block) {
            float* state =
                reinterpret_cast<float*>(block + layout.state_offset(layer));
            for (size_t i = 0; i < layout.state_floats(layer); ++i) {
              state[i] = numbers[p] + static_cast<float>(i);
            }
          };
          write(table.blocks[0]);
          for (auto& [position, block] : table.kept) {
            if (position == p + 1) write(block.data());
          }
          continue;
        }
        if (p < table.write_begin) continue;
        uint8_t* block = table.blocks[p / block_tokens - table.first_block];
        for (size_t head = 0; head < spec.kv_heads; ++head) {
          const std::vector<float> x(spec.head_dim,
                                     numbers[p] + static_cast<float>(head));
          StoreKey(layout.dtype(), x.data(), spec.head_dim, p % block_tokens,
                   block_tokens, block + layout.key_offset(layer, head));
          StoreValue(layout.dtype(), x.data(), spec.head_dim, p % block_tokens,
                     block_tokens, block + layout.value_offset(layer, head));
        }
      }
    }
    for (Checkpoint& point : cache.Commit(cache.Lock(), view, last, here)) {
      points.push_back(std::move(point));
    }
    begin = last;
  }
  return points;
}

}  // namespace gkv

#endif  // GEMMAKV_TESTS_STORE_FILLED_PREFIX_H_
