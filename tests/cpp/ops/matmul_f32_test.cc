#include "ops/matmul_conformance.h"

namespace gkv {
namespace {

using F32 = std::integral_constant<TensorType, TensorType::kF32>;
INSTANTIATE_TYPED_TEST_SUITE_P(F32, MatMulConformance, F32);

}  // namespace
}  // namespace gkv
