#include "ops/stored_row.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/matmul_fixture.h"

namespace gkv {
namespace {

TEST(StoredRowTest, ValuesAreThoseOfThePackedRow) {
  for (const TensorTypeInfo& info : kTensorTypes) {
    for (const size_t blocks : {1, 3, 9}) {
      const size_t cols = blocks * std::max<size_t>(info.values, 32);
      TestWeights weights(info.type, 18, cols);
      weights.FillRandom(static_cast<uint32_t>(cols));
      weights.Pack();
      for (size_t row = 0; row < weights.rows; ++row) {
        std::vector<float> expected(cols), out(cols + 1, 7.5f);
        UnpackRow(weights.View(), row, expected.data());
        const uint8_t* stored =
            weights.source.data() + row * RowBytes(info.type, cols);
        for (size_t at = 0; at < cols; at += kMaxStoredCols) {
          UnpackStored(info.type, stored + RowBytes(info.type, at),
                       std::min(kMaxStoredCols, cols - at), &out[at]);
        }
        EXPECT_EQ(
            std::memcmp(out.data(), expected.data(), cols * sizeof(float)), 0)
            << info.name << " " << cols << " " << row;
        EXPECT_EQ(out[cols], 7.5f) << info.name;
      }
    }
  }
}

}  // namespace
}  // namespace gkv
