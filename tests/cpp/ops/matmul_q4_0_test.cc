#include "ops/matmul_conformance.h"

namespace gkv {
namespace {

using Q4_0 = std::integral_constant<TensorType, TensorType::kQ4_0>;
INSTANTIATE_TYPED_TEST_SUITE_P(Q4_0, MatMulConformance, Q4_0);

}  // namespace
}  // namespace gkv
