#include "cache/kv_layout.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "base/error.h"

namespace gkv {
namespace {

constexpr KvLayerSpec kFull{LayerKind::kFull, 2, 64, 0};
constexpr KvLayerSpec kSliding{LayerKind::kSliding, 1, 32, 24};

TEST(KvLayoutTest, StripsOfAGroupTileItsBlock) {
  for (const KvDtype dtype : {KvDtype::kF32, KvDtype::kBF16, KvDtype::kInt8}) {
    const KvLayout layout({kSliding, kFull, kSliding, kFull}, dtype, 32);
    ASSERT_EQ(layout.groups().size(), 2u);
    for (size_t group = 0; group < 2; ++group) {
      size_t at = 0;
      for (size_t layer = 0; layer < 4; ++layer) {
        if (layout.group_of(layer) != group) continue;
        for (size_t h = 0; h < layout.layers()[layer].kv_heads; ++h) {
          EXPECT_EQ(layout.key_offset(layer, h), at);
          at += layout.strip_bytes(layer);
          EXPECT_EQ(layout.value_offset(layer, h), at);
          at += layout.strip_bytes(layer);
        }
      }
      EXPECT_EQ(layout.groups()[group].block_bytes, at);
      EXPECT_EQ(layout.bytes_per_token(layout.groups()[group].kind) * 32, at);
    }
  }
}

TEST(KvLayoutTest, BytesAtCountsTheWindowOnce) {
  const KvLayout layout({kSliding, kFull}, KvDtype::kBF16, 16);
  const size_t full = 2 * 2 * 64 * 2, sliding = 2 * 32 * 2;
  EXPECT_EQ(layout.bytes_at(10), 10 * (full + sliding));
  EXPECT_EQ(layout.bytes_at(1000), 1000 * full + 24 * sliding);
}

TEST(KvLayoutTest, BytesOfMoreTokensThanCanBeCountedAreNoNumber) {
  const KvLayout layout({kSliding, kFull}, KvDtype::kBF16, 16);
  const size_t full = 2 * 2 * 64 * 2, sliding = 2 * 32 * 2;
  const size_t most = std::numeric_limits<size_t>::max() / (full + sliding);
  EXPECT_EQ(layout.bytes_at(most), most * full + 24 * sliding);
  EXPECT_THROW(layout.bytes_at(most + 1), InvalidArgument);
  EXPECT_THROW(layout.bytes_at(std::numeric_limits<size_t>::max()),
               InvalidArgument);
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
}

TEST(KvLayoutTest, GroupsAreLayersOfOneKindAndWindow) {
  KvLayerSpec wide = kSliding, tall = kSliding;
  wide.window = 100;
  tall.head_dim = 64;
  const KvLayerSpec state{
      .kind = LayerKind::kRecurrent, .lru_width = 5, .conv_tail = 3};
  const KvLayout layout({wide, kFull, kSliding, state, tall, wide},
                        KvDtype::kBF16, 16);
  const std::span<const KvGroup> groups = layout.groups();
  ASSERT_EQ(groups.size(), 4u);
  EXPECT_EQ(groups[0].kind, LayerKind::kSliding);
  EXPECT_EQ(groups[0].window, 100u);
  EXPECT_EQ(groups[0].layers, (std::vector<size_t>{0, 5}));
  EXPECT_EQ(groups[1].kind, LayerKind::kFull);
  EXPECT_EQ(groups[1].window, 0u);
  EXPECT_EQ(groups[2].window, 24u);
  EXPECT_EQ(groups[2].layers, (std::vector<size_t>{2, 4}));
  EXPECT_EQ(groups[3].kind, LayerKind::kRecurrent);
  EXPECT_EQ(groups[3].block_bytes, layout.state_bytes());
  // Layers of a group may differ in their heads.
  const size_t narrow = 2 * 32 * 2, twice = 2 * narrow, full = 2 * 2 * 64 * 2;
  EXPECT_EQ(groups[2].block_bytes, 16 * (narrow + twice));
  EXPECT_EQ(layout.key_offset(4, 0), 16 * narrow);
  EXPECT_EQ(layout.bytes_per_token(LayerKind::kSliding), 3 * narrow + twice);
  EXPECT_EQ(layout.bytes_at(1000), 1000 * full + 100 * 2 * narrow +
                                       24 * (narrow + twice) +
                                       layout.state_bytes());
  EXPECT_EQ(layout.checkpoint_bytes(), 8 * groups[0].block_bytes +
                                           3 * groups[2].block_bytes +
                                           layout.state_bytes());
}

TEST(KvLayoutTest, ALayerThatSharesOwnsNothing) {
  KvLayerSpec second = kSliding, third = kFull;
  second.shares = 0;
  third.shares = 1;
  const KvLayout layout({kSliding, kFull, second, kFull, third},
                        KvDtype::kInt8, 16);
  const KvLayout without({kSliding, kFull, kFull}, KvDtype::kInt8, 16);
  ASSERT_EQ(layout.groups().size(), 2u);
  EXPECT_EQ(layout.groups()[0].layers, std::vector<size_t>{0});
  EXPECT_EQ(layout.groups()[1].layers, (std::vector<size_t>{1, 3}));
  EXPECT_EQ(layout.group_of(2), 0u);
  EXPECT_EQ(layout.group_of(4), 1u);
  EXPECT_EQ(layout.key_offset(4, 1), layout.key_offset(1, 1));
  EXPECT_EQ(layout.value_offset(2, 0), layout.value_offset(0, 0));
  EXPECT_EQ(layout.bytes_at(100), without.bytes_at(100));
  EXPECT_NE(layout.hash(),
            KvLayout({kSliding, kFull, kSliding, kFull, third}, KvDtype::kInt8,
                     16)
                .hash());

  const auto shared = [](KvLayerSpec spec, size_t owner) {
    spec.shares = owner;
    return spec;
  };
  KvLayerSpec wider = kSliding, taller = kFull;
  wider.window = 25;
  taller.head_dim = 32;
  const KvLayerSpec state{.kind = LayerKind::kRecurrent, .lru_width = 5};
  const std::vector<KvLayerSpec> bad[] = {
      {shared(kFull, 0)},                                // itself
      {kFull, shared(kFull, 2), kFull},                  // a later one
      {kFull, shared(kSliding, 0)},                      // of another kind
      {kSliding, shared(wider, 0)},                      // of another window
      {kFull, shared(taller, 0)},                        // of another shape
      {kFull, shared(kFull, 0), shared(kFull, 1)},       // that owns nothing
      {state, shared(state, 0)},                         // without keys
  };
  for (const auto& layers : bad) {
    EXPECT_THROW(KvLayout(layers, KvDtype::kBF16, 16), InvalidArgument);
  }
}

TEST(KvLayoutTest, FirstDifferenceNamesWhatDiffers) {
  KvLayerSpec wider = kSliding, taller = kFull, shared = kFull;
  wider.window = 25;
  taller.head_dim = 32;
  shared.shares = 1;
  const KvLayerSpec state{
      .kind = LayerKind::kRecurrent, .lru_width = 5, .conv_tail = 3};
  KvLayerSpec longer = state;
  longer.conv_tail = 4;
  using Layers = std::vector<KvLayerSpec>;
  const auto differ = [](const Layers& found, const Layers& expected,
                         KvDtype dtype = KvDtype::kBF16) {
    return FirstDifference(KvLayout(found, dtype, 16),
                           KvLayout(expected, KvDtype::kBF16, 32));
  };
  EXPECT_EQ(differ({kSliding, kFull}, {kSliding, kFull}), "");
  EXPECT_EQ(differ({kFull}, {kFull}, KvDtype::kInt8),
            "its dtype is int8, expected bf16");
  EXPECT_EQ(differ({kFull}, {kFull, kFull}), "it has 1 layers, expected 2");
  EXPECT_EQ(differ({kFull, kFull}, {kFull, kSliding}),
            "layer 1: it is full, expected sliding");
  EXPECT_EQ(differ({taller}, {kFull}),
            "layer 0: head_dim is 32, expected 64");
  EXPECT_EQ(differ({kFull, wider}, {kFull, kSliding}),
            "layer 1: window is 25, expected 24");
  EXPECT_EQ(differ({longer}, {state}), "layer 0: conv_tail is 4, expected 3");
  EXPECT_EQ(differ({kFull, kFull, shared}, {kFull, kFull, kFull}),
            "layer 2: its keys and values are of layer 1, expected of its "
            "own");
}

// Snapshots and prefix indexes of the past name layouts by these.
TEST(KvLayoutTest, HashesStay) {
  const KvLayerSpec state{
      .kind = LayerKind::kRecurrent, .lru_width = 5, .conv_tail = 3};
  EXPECT_EQ(KvLayout({kSliding, kFull}, KvDtype::kBF16, 16).hash().Hex(),
            "edc0178625722698c643c59734070930");
  EXPECT_EQ(KvLayout({state, kSliding}, KvDtype::kInt8, 16).hash().Hex(),
            "fd42d0cdeefe76d461d11cebee8c89e3");
}

}  // namespace
}  // namespace gkv
