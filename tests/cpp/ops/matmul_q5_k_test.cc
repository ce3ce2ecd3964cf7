#include "ops/matmul_conformance.h"

namespace gkv {
namespace {

using Q5_K = std::integral_constant<TensorType, TensorType::kQ5_K>;
INSTANTIATE_TYPED_TEST_SUITE_P(Q5_K, MatMulConformance, Q5_K);

}  // namespace
}  // namespace gkv
