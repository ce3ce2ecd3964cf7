// The kernels of some types of quantized weights, GKV_MATMUL_KERNELS: CMake has
// translation units with two types each.

#include "ops/matmul_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul_type.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "ops/matmul_stream-inl.h"

#if HWY_ONCE

namespace gkv {

GKV_MATMUL_KERNELS;

}  // namespace gkv

#endif  // HWY_ONCE
