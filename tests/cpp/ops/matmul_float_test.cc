#include "ops/matmul_conformance.h"

namespace gkv {
namespace {

using F32 = std::integral_constant<TensorType, TensorType::kF32>;
INSTANTIATE_TYPED_TEST_SUITE_P(F32, MatMulConformance, F32);

using F16 = std::integral_constant<TensorType, TensorType::kF16>;
INSTANTIATE_TYPED_TEST_SUITE_P(F16, MatMulConformance, F16);

using BF16 = std::integral_constant<TensorType, TensorType::kBF16>;
INSTANTIATE_TYPED_TEST_SUITE_P(BF16, MatMulConformance, BF16);

}  // namespace
}  // namespace gkv
