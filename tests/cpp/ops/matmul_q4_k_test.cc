#include "ops/matmul_conformance.h"

namespace gkv {
namespace {

using Q4_K = std::integral_constant<TensorType, TensorType::kQ4_K>;
INSTANTIATE_TYPED_TEST_SUITE_P(Q4_K, MatMulConformance, Q4_K);

}  // namespace
}  // namespace gkv
