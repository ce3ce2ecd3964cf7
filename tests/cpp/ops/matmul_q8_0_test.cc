#include "ops/matmul_conformance.h"

namespace gkv {
namespace {

using Q8_0 = std::integral_constant<TensorType, TensorType::kQ8_0>;
INSTANTIATE_TYPED_TEST_SUITE_P(Q8_0, MatMulConformance, Q8_0);

}  // namespace
}  // namespace gkv
