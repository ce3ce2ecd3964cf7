#ifndef GEMMAKV_TESTS_STORE_CHAIN_OBJECTS_H_
#define GEMMAKV_TESTS_STORE_CHAIN_OBJECTS_H_

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "cache/block_pool.h"
#include "cache/kv_layout.h"
#include "store/address.h"
#include "store/block_store.h"
#include "store/object.h"

// Whole objects without a model, as a chain of pages with a resume point.

namespace gkv {

inline constexpr Hash128 kChainFingerprint{21, 34};

struct ChainObject {
  ObjectKey key;
  StoredBytes bytes;
};

inline const KvLayout& ChainLayout() {
  static const auto* const layout =
      new KvLayout(std::vector<KvLayerSpec>{{LayerKind::kFull, 1, 32, 0}},
                   KvDtype::kInt8, kStoredBlockTokens);
  return *layout;
}

inline Address ChainSalt(std::string_view salt) {
  return SaltDigest(AsBytes(salt));
}

// Pages from the root, then the resume point. The same for the same arguments.
inline std::vector<ChainObject> Chain(std::string_view salt, uint32_t seed,
                                      size_t pages) {
  const KvLayout& layout = ChainLayout();
  const auto pool = BlockPool::Create();
  std::mt19937 random(seed);
  std::vector<ChainObject> chain;
  ObjectHead head;
  head.fingerprint = kChainFingerprint;
  head.layout = layout.hash();
  head.salt = ChainSalt(salt);
  head.parent = RootAddress(head.fingerprint, head.layout, head.salt);
  for (size_t i = 0; i <= pages; ++i) {
    const bool resume = i == pages;
    head.kind = resume ? ObjectKind::kResume : ObjectKind::kPage;
    head.begin = i * kPageTokens;
    head.end = head.begin + (resume ? 70 : kPageTokens);
    head.tokens.clear();
    HeldSet held(1);
    for (uint64_t p = head.begin; p < head.end; ++p) {
      head.tokens.push_back(static_cast<int32_t>(random() % 1000));
    }
    for (uint64_t p = head.begin; p < head.end; p += kStoredBlockTokens) {
      BlockRef block = pool->Acquire(layout.groups()[0].block_bytes);
      for (size_t at = 0; at < layout.groups()[0].block_bytes; ++at) {
        block.data()[at] = static_cast<uint8_t>(random());
      }
      held[0].push_back(
          {p, std::min(p + kStoredBlockTokens, head.end), std::move(block)});
    }
    ObjectKey key{head.kind, AddressOf(head), head.parent, head.end, head.salt};
    chain.push_back({key, EncodeObject(head, layout, held)});
    head.parent = key.address;
  }
  return chain;
}

inline bool SameBytes(std::span<const uint8_t> a, std::span<const uint8_t> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

}  // namespace gkv

#endif  // GEMMAKV_TESTS_STORE_CHAIN_OBJECTS_H_
