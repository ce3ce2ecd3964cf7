#include "gemmakv/tensor_type.h"

#include <cstdint>
#include <iterator>
#include <set>
#include <string_view>

#include "gtest/gtest.h"

namespace gkv {
namespace {

TEST(TensorTypeTest, BlocksAreThoseOfTheGgufSpecification) {
  struct Row {
    uint32_t id;
    const char* name;
    size_t values, bytes;
  };
  const Row rows[] = {
      {0, "F32", 1, 4},       {1, "F16", 1, 2},       {2, "Q4_0", 32, 18},
      {6, "Q5_0", 32, 22},    {8, "Q8_0", 32, 34},    {12, "Q4_K", 256, 144},
      {13, "Q5_K", 256, 176}, {14, "Q6_K", 256, 210}, {30, "BF16", 1, 2},
  };
  size_t found = 0;
  for (const Row& row : rows) {
    const TensorTypeInfo* info = FindTensorType(row.id);
    ASSERT_NE(info, nullptr) << row.name;
    EXPECT_EQ(static_cast<uint32_t>(info->type), row.id);
    EXPECT_EQ(info->name, row.name);
    EXPECT_EQ(info->values, row.values) << row.name;
    EXPECT_EQ(info->bytes, row.bytes) << row.name;
    EXPECT_EQ(&Info(info->type), info);
    ++found;
  }
  EXPECT_EQ(found, std::size(kTensorTypes));
}

TEST(TensorTypeTest, IdsAscendAndNamesAreUnique) {
  std::set<std::string_view> names;
  int64_t last = -1;
  for (const TensorTypeInfo& info : kTensorTypes) {
    EXPECT_GT(static_cast<int64_t>(info.type), last);
    last = static_cast<int64_t>(info.type);
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
  }
}

TEST(TensorTypeTest, UnsupportedIdsAreNotFound) {
  for (const uint32_t id : {3u, 4u, 5u, 7u, 9u, 10u, 11u, 15u, 16u, 29u, 31u,
                            39u, 255u, 0xFFFFFFFFu}) {
    EXPECT_EQ(FindTensorType(id), nullptr) << id;
  }
}

TEST(TensorTypeTest, FloatsAreStoredOneByOne) {
  for (const TensorTypeInfo& info : kTensorTypes) {
    EXPECT_EQ(IsFloat(info.type), info.values == 1) << info.name;
  }
}

TEST(TensorTypeTest, RowBytes) {
  EXPECT_EQ(RowBytes(TensorType::kF32, 640), 2560u);
  EXPECT_EQ(RowBytes(TensorType::kBF16, 640), 1280u);
  EXPECT_EQ(RowBytes(TensorType::kQ8_0, 640), 680u);
  EXPECT_EQ(RowBytes(TensorType::kQ6_K, 2048), 1680u);
  EXPECT_EQ(RowBytes(TensorType::kQ4_K, 0), 0u);
}

}  // namespace
}  // namespace gkv
