#include "base/aligned_buffer.h"

#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include "gtest/gtest.h"

namespace gkv {
namespace {

static_assert(!std::is_copy_constructible_v<AlignedBuffer<float>>);
static_assert(!std::is_copy_assignable_v<AlignedBuffer<float>>);
static_assert(std::is_nothrow_move_constructible_v<AlignedBuffer<float>>);
static_assert(std::is_nothrow_move_assignable_v<AlignedBuffer<float>>);

template <typename T>
void ExpectAlignedAndPadded() {
  for (size_t size = 1; size < 200; ++size) {
    AlignedBuffer<T> buffer(size);
    ASSERT_EQ(buffer.size(), size);
    ASSERT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % kAlignment, 0u);
    // The padding is ours to touch: the address sanitizer watches.
    const size_t padded =
        (size * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    std::memset(buffer.data(), 0x5A, padded);
  }
}

TEST(AlignedBufferTest, AlignedAndPaddedToWholeVectors) {
  ExpectAlignedAndPadded<uint8_t>();
  ExpectAlignedAndPadded<uint16_t>();
  ExpectAlignedAndPadded<float>();
  ExpectAlignedAndPadded<double>();
}

TEST(AlignedBufferTest, EmptyHoldsNothing) {
  const AlignedBuffer<float> none;
  EXPECT_EQ(none.data(), nullptr);
  EXPECT_EQ(none.size(), 0u);
  const AlignedBuffer<float> zero(0);
  EXPECT_EQ(zero.data(), nullptr);
  EXPECT_EQ(zero.size(), 0u);
}

TEST(AlignedBufferTest, MoveTakesTheStorage) {
  AlignedBuffer<int> a(10);
  a[3] = 7;
  const int* data = a.data();
  AlignedBuffer<int> b(std::move(a));
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(b[3], 7);
  EXPECT_EQ(b.size(), 10u);
  AlignedBuffer<int> c(5);
  c = std::move(b);
  EXPECT_EQ(c.data(), data);
  EXPECT_EQ(std::as_const(c)[3], 7);
  EXPECT_EQ(c.size(), 10u);
}

TEST(AlignedBufferTest, EnsureSizeGrowsAndNeverShrinks) {
  AlignedBuffer<float> buffer;
  buffer.EnsureSize(100);
  ASSERT_EQ(buffer.size(), 100u);
  buffer[99] = 1.0f;
  const float* data = buffer.data();
  buffer.EnsureSize(50);
  EXPECT_EQ(buffer.data(), data);
  EXPECT_EQ(buffer.size(), 100u);
  EXPECT_EQ(buffer[99], 1.0f);
  buffer.EnsureSize(101);
  EXPECT_EQ(buffer.size(), 101u);
}

TEST(AlignedBufferTest, SizesThatOverflowAreBadAlloc) {
  for (const size_t size : {SIZE_MAX, SIZE_MAX / 8, SIZE_MAX / 8 - 7}) {
    EXPECT_THROW(AlignedBuffer<double>{size}, std::bad_alloc) << size;
  }
}

}  // namespace
}  // namespace gkv
