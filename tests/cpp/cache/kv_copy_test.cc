#include "cache/kv_copy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace gkv {
namespace {

constexpr KvDtype kDtypes[] = {KvDtype::kF32, KvDtype::kBF16, KvDtype::kInt8};
constexpr uint8_t kUntouched = 0xA5;

std::vector<KvLayerSpec> Layers() {
  return {{.kind = LayerKind::kFull, .kv_heads = 2, .head_dim = 32},
          {.kind = LayerKind::kRecurrent, .lru_width = 48, .conv_tail = 3},
          {.kind = LayerKind::kFull, .kv_heads = 1, .head_dim = 64},
          {.kind = LayerKind::kRecurrent, .lru_width = 48, .conv_tail = 1}};
}

size_t GroupOf(const KvLayout& layout, LayerKind kind) {
  return layout.groups()[0].kind == kind ? 0 : 1;
}

// Calls fn(layer, head, index of the position in the strip, strips).
template <typename Fn>
void ForHeads(const KvLayout& layout, size_t position, const Fn& fn) {
  for (size_t layer = 0; layer < layout.layers().size(); ++layer) {
    const KvLayerSpec& spec = layout.layers()[layer];
    for (size_t head = 0; head < spec.kv_heads; ++head) {
      fn(layer, head, position % layout.block_tokens());
    }
  }
}

// Numbers that tell the place that they are stored in.
std::vector<float> Numbers(size_t layer, size_t head, size_t position,
                           bool value, size_t count) {
  std::vector<float> numbers(count);
  for (size_t i = 0; i < count; ++i) {
    numbers[i] = static_cast<float>((position * 7 + layer * 5 + head * 3 +
                                     i * (value ? 2 : 1)) % 64);
  }
  return numbers;
}

void Store(const KvLayout& layout, size_t position, uint8_t* block) {
  ForHeads(layout, position, [&](size_t layer, size_t head, size_t index) {
    const size_t dim = layout.layers()[layer].head_dim;
    StoreKey(layout.dtype(),
             Numbers(layer, head, position, false, dim).data(), dim, index,
             layout.block_tokens(), block + layout.key_offset(layer, head));
    StoreValue(layout.dtype(),
               Numbers(layer, head, position, true, dim).data(), dim, index,
               layout.block_tokens(), block + layout.value_offset(layer, head));
  });
}

class KvCopyTest : public testing::TestWithParam<KvDtype> {
 protected:
  KvLayout Layout(size_t block_tokens) const {
    return KvLayout(Layers(), GetParam(), block_tokens);
  }

  // Blocks of a layout with positions [begin, end).
  std::vector<HeldBlock> Filled(const KvLayout& layout, size_t begin,
                                size_t end) {
    const size_t group = GroupOf(layout, LayerKind::kFull);
    std::vector<HeldBlock> held;
    layout.ForBlocks(begin, end, [&](size_t, size_t from, size_t to) {
      held.push_back(
          {from, to, pool_->Acquire(layout.groups()[group].block_bytes)});
      std::memset(held.back().block.data(), kUntouched,
                  held.back().block.size_bytes());
      for (size_t p = from; p < to; ++p) {
        Store(layout, p, held.back().block.data());
      }
    });
    return held;
  }

  const std::shared_ptr<BlockPool> pool_ = BlockPool::Create();
};
INSTANTIATE_TEST_SUITE_P(Dtypes, KvCopyTest, testing::ValuesIn(kDtypes));

// What is copied is what storing the same positions there gives, and no other
// byte changes.
TEST_P(KvCopyTest, PositionsInBlocksOfAnotherSize) {
  for (const auto& [from_tokens, to_tokens] :
       {std::pair{16, 64}, {64, 16}, {128, 32}, {32, 32}}) {
    const KvLayout from = Layout(from_tokens), to = Layout(to_tokens);
    const size_t group = GroupOf(from, LayerKind::kFull);
    for (const auto& [begin, end] :
         {std::pair<size_t, size_t>{128, 144}, {131, 133}, {129, 143}}) {
      const auto held = Filled(from, 100, 150);
      std::vector<uint8_t> block(to.groups()[group].block_bytes, kUntouched);
      std::vector<uint8_t> expected = block;
      for (size_t p = begin; p < end; ++p) Store(to, p, expected.data());
      CopyPositions(from, held, to, group, begin, end, block.data());
      EXPECT_EQ(block, expected) << from_tokens << " " << to_tokens;
    }
  }
}

TEST_P(KvCopyTest, HeldPositionsKeepTheirGaps) {
  const KvLayout from = Layout(64), to = Layout(32);
  const size_t group = GroupOf(from, LayerKind::kFull);
  auto held = Filled(from, 10, 150);
  for (HeldBlock& more : Filled(from, 512, 520)) held.push_back(more);
  const auto copies = CopyHeld(from, held, to, group, *pool_);
  std::vector<std::pair<size_t, size_t>> ranges;
  for (const HeldBlock& copy : copies) {
    ranges.emplace_back(copy.begin, copy.end);
    std::vector<uint8_t> expected(copy.block.data(),
                                  copy.block.data() + copy.block.size_bytes());
    for (size_t p = copy.begin; p < copy.end; ++p) {
      Store(to, p, expected.data());
    }
    EXPECT_EQ(std::memcmp(expected.data(), copy.block.data(), expected.size()),
              0);
  }
  EXPECT_EQ(ranges,
            (std::vector<std::pair<size_t, size_t>>{
                {10, 32}, {32, 64}, {64, 96}, {96, 128}, {128, 150},
                {512, 520}}));
  EXPECT_TRUE(CopyHeld(from, {}, to, group, *pool_).empty());
}

// One layer alone, to strips of as many positions as a range has.
TEST_P(KvCopyTest, ALayerAsASnapshotHasIt) {
  const KvLayout layout = Layout(64);
  constexpr size_t kBegin = 70, kEnd = 120, kFirst = 64, kTokens = 64;
  const auto held = Filled(layout, kBegin, kEnd);
  for (const size_t layer : {size_t{0}, size_t{2}}) {
    const KvLayerSpec& spec = layout.layers()[layer];
    const size_t strip = KvStripBytes(GetParam(), kTokens, spec.head_dim);
    std::vector<uint8_t> bytes(2 * spec.kv_heads * strip, kUntouched);
    const uint8_t* const block = held[0].block.data();
    CopyLayer(layout, layer, kBegin, kEnd,
              StripsIn(layout, layer, block, kBegin),
              {bytes.data(), kFirst, kTokens});
    for (size_t head = 0; head < spec.kv_heads; ++head) {
      std::vector<float> found(spec.head_dim), stored(spec.head_dim);
      for (size_t p = kBegin; p < kEnd; ++p) {
        LoadKey(GetParam(), &bytes[2 * head * strip], spec.head_dim,
                p - kFirst, kTokens, found.data());
        LoadKey(GetParam(), block + layout.key_offset(layer, head),
                spec.head_dim, p % 64, 64, stored.data());
        EXPECT_EQ(found, stored);
        LoadValue(GetParam(), &bytes[(2 * head + 1) * strip], spec.head_dim,
                  p - kFirst, kTokens, found.data());
        LoadValue(GetParam(), block + layout.value_offset(layer, head),
                  spec.head_dim, p % 64, 64, stored.data());
        EXPECT_EQ(found, stored);
      }
    }
  }
}

TEST_P(KvCopyTest, States) {
  const KvLayout layout = Layout(64);
  const size_t group = GroupOf(layout, LayerKind::kRecurrent);
  const BlockRef state = pool_->Acquire(layout.state_bytes());
  for (size_t i = 0; i < layout.state_bytes(); ++i) {
    state.data()[i] = static_cast<uint8_t>(i % 251);
  }
  std::vector<std::pair<size_t, size_t>> places;
  ForStates(layout, [&](size_t offset, size_t bytes) {
    places.emplace_back(offset, bytes);
  });
  EXPECT_EQ(places, (std::vector<std::pair<size_t, size_t>>{
                        {0, 4 * 48 * 4}, {4 * 48 * 4, 2 * 48 * 4}}));
  const HeldBlock held[] = {{90, 90, state}, {100, 100, state}};
  const auto copies = CopyHeld(layout, held, layout, group, *pool_);
  ASSERT_EQ(copies.size(), 2u);
  EXPECT_EQ(copies[0].begin, 90u);
  EXPECT_EQ(copies[1].end, 100u);
  EXPECT_NE(copies[0].block.data(), state.data());
  for (const auto& [offset, bytes] : places) {
    EXPECT_EQ(std::memcmp(copies[1].block.data() + offset,
                          state.data() + offset, bytes),
              0);
  }
}

}  // namespace
}  // namespace gkv
