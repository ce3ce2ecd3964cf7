#ifndef GEMMAKV_TENSOR_TYPE_H_
#define GEMMAKV_TENSOR_TYPE_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace gkv {

// The storage formats of weights. Values are the type ids of the GGUF file
// format.
enum class TensorType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ5_0 = 6,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
};

// A row is a whole number of blocks; a block is `values` numbers in `bytes`.
struct TensorTypeInfo {
  TensorType type;
  std::string_view name;  // as the GGUF specification prints it: "Q4_K"
  size_t values;
  size_t bytes;
};

// All supported types, in ascending id order.
inline constexpr TensorTypeInfo kTensorTypes[] = {
    {TensorType::kF32, "F32", 1, 4},
    {TensorType::kF16, "F16", 1, 2},
    {TensorType::kQ4_0, "Q4_0", 32, 18},
    {TensorType::kQ5_0, "Q5_0", 32, 22},
    {TensorType::kQ8_0, "Q8_0", 32, 34},
    {TensorType::kQ4_K, "Q4_K", 256, 144},
    {TensorType::kQ5_K, "Q5_K", 256, 176},
    {TensorType::kQ6_K, "Q6_K", 256, 210},
    {TensorType::kBF16, "BF16", 1, 2},
};

// Returns nullptr if `id` is not supported.
constexpr const TensorTypeInfo* FindTensorType(uint32_t id) {
  for (const TensorTypeInfo& info : kTensorTypes) {
    if (static_cast<uint32_t>(info.type) == id) return &info;
  }
  return nullptr;
}

// Requires: `type` is one of the enumerators.
constexpr const TensorTypeInfo& Info(TensorType type) {
  return *FindTensorType(static_cast<uint32_t>(type));
}

// Whether values are stored one by one, as floating-point numbers.
constexpr bool IsFloat(TensorType type) {
  return type == TensorType::kF32 || type == TensorType::kF16 ||
         type == TensorType::kBF16;
}

// Returns the bytes of one row of `cols` values. Requires: cols %
// Info(type).values == 0.
constexpr size_t RowBytes(TensorType type, size_t cols) {
  return cols / Info(type).values * Info(type).bytes;
}

}  // namespace gkv

#endif  // GEMMAKV_TENSOR_TYPE_H_
