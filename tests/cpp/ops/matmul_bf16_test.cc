#include "ops/matmul_conformance.h"

namespace gkv {
namespace {

using BF16 = std::integral_constant<TensorType, TensorType::kBF16>;
INSTANTIATE_TYPED_TEST_SUITE_P(BF16, MatMulConformance, BF16);

}  // namespace
}  // namespace gkv
