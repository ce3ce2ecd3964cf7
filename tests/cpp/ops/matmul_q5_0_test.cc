#include "ops/matmul_conformance.h"

namespace gkv {
namespace {

using Q5_0 = std::integral_constant<TensorType, TensorType::kQ5_0>;
INSTANTIATE_TYPED_TEST_SUITE_P(Q5_0, MatMulConformance, Q5_0);

}  // namespace
}  // namespace gkv
