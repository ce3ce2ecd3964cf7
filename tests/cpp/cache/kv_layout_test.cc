#include "cache/kv_layout.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/error.h"

namespace gkv {
namespace {

constexpr KvLayerSpec kFull{LayerKind::kFull, 2, 64, 0};
constexpr KvLayerSpec kSliding{LayerKind::kSliding, 1, 32, 24};

TEST(KvLayoutTest, StripsOfAGroupTileItsBlock) {
  for (const KvDtype dtype : {KvDtype::kF32, KvDtype::kBF16, KvDtype::kInt8}) {
    const KvLayout layout({kSliding, kFull, kSliding, kFull}, dtype, 32);
    for (const GroupId group : {GroupId::kFull, GroupId::kSliding}) {
      size_t at = 0;
      for (size_t layer = 0; layer < 4; ++layer) {
        if (layout.group(layer) != group) continue;
        for (size_t h = 0; h < layout.layers()[layer].kv_heads; ++h) {
          EXPECT_EQ(layout.key_offset(layer, h), at);
          at += layout.strip_bytes(layer);
          EXPECT_EQ(layout.value_offset(layer, h), at);
          at += layout.strip_bytes(layer);
        }
      }
      EXPECT_EQ(layout.block_bytes(group), at);
      EXPECT_EQ(layout.bytes_per_token(group) * 32, at);
    }
  }
}

TEST(KvLayoutTest, BytesAtCountsTheWindowOnce) {
  const KvLayout layout({kSliding, kFull}, KvDtype::kBF16, 16);
  const size_t full = 2 * 2 * 64 * 2, sliding = 2 * 32 * 2;
  EXPECT_EQ(layout.bytes_at(10), 10 * (full + sliding));
  EXPECT_EQ(layout.bytes_at(1000), 1000 * full + 24 * sliding);
}

TEST(KvLayoutTest, HashIsOfWhatIsStored) {
  const KvLayout layout({kSliding, kFull}, KvDtype::kBF16, 16);
  EXPECT_EQ(KvLayout({kSliding, kFull}, KvDtype::kBF16, 128).hash(),
            layout.hash());
  EXPECT_NE(KvLayout({kSliding, kFull}, KvDtype::kF32, 16).hash(),
            layout.hash());
  EXPECT_NE(KvLayout({kFull, kSliding}, KvDtype::kBF16, 16).hash(),
            layout.hash());
  KvLayerSpec wider = kSliding;
  wider.window = 25;
  EXPECT_NE(KvLayout({wider, kFull}, KvDtype::kBF16, 16).hash(), layout.hash());
}

TEST(KvLayoutTest, BadShapesAreRefused) {
  const auto make = [](std::vector<KvLayerSpec> layers, size_t block) {
    return KvLayout(std::move(layers), KvDtype::kBF16, block);
  };
  EXPECT_THROW(make({}, 16), InvalidArgument);
  for (const size_t block : {0, 8, 24, 256}) {
    EXPECT_THROW(make({kFull}, block), InvalidArgument) << block;
  }
  KvLayerSpec bad = kFull;
  bad.head_dim = 48;
  EXPECT_THROW(make({bad}, 16), InvalidArgument);
  bad = kFull;
  bad.kv_heads = 0;
  EXPECT_THROW(make({bad}, 16), InvalidArgument);
  bad = kFull;
  bad.window = 5;
  EXPECT_THROW(make({bad}, 16), InvalidArgument);
  bad = kSliding;
  bad.window = 0;
  EXPECT_THROW(make({bad}, 16), InvalidArgument);
  bad.window = 25;
  EXPECT_THROW(make({kSliding, bad}, 16), InvalidArgument);
}

}  // namespace
}  // namespace gkv
