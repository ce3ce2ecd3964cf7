#include "ops/matmul_conformance.h"

namespace gkv {
namespace {

using F16 = std::integral_constant<TensorType, TensorType::kF16>;
INSTANTIATE_TYPED_TEST_SUITE_P(F16, MatMulConformance, F16);

}  // namespace
}  // namespace gkv
