#include "ops/matmul_conformance.h"

namespace gkv {
namespace {

using Q6_K = std::integral_constant<TensorType, TensorType::kQ6_K>;
INSTANTIATE_TYPED_TEST_SUITE_P(Q6_K, MatMulConformance, Q6_K);

}  // namespace
}  // namespace gkv
