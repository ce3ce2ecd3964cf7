#include "base/float16.h"
#include "ops/matmul_kernel.h"

#ifndef GKV_KERNEL_BATCH
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul_float.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#endif

#include "hwy/highway.h"
#include "ops/matmul_float-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

struct WeightsF32 {
  using Element = float;
  static constexpr TensorType kType = TensorType::kF32;
  static HWY_INLINE VF32 Load(const uint8_t* weights) {
    return hn::LoadU(DF32(), reinterpret_cast<const float*>(weights));
  }
  static float ToFloat(Element element) { return element; }
};

// 16-bit elements, of Highway's type Half.
template <TensorType kTensorType, class Half, float (*kToFloat)(uint16_t)>
struct Weights16 {
  using Element = uint16_t;
  static constexpr TensorType kType = kTensorType;
  static HWY_INLINE VF32 Load(const uint8_t* weights) {
    const hn::Rebind<Half, DF32> d;
    const hn::Repartition<uint8_t, decltype(d)> du8;
    return hn::PromoteTo(DF32(), hn::BitCast(d, hn::LoadU(du8, weights)));
  }
  static float ToFloat(Element element) { return kToFloat(element); }
};

using KernelF32 = FloatKernel<WeightsF32>;
using KernelF16 = FloatKernel<
    Weights16<TensorType::kF16, hwy::float16_t, Float32FromFloat16>>;
using KernelBF16 = FloatKernel<
    Weights16<TensorType::kBF16, hwy::bfloat16_t, Float32FromBFloat16>>;

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

GKV_FLOAT_MATMUL_KERNEL(F32);
GKV_FLOAT_MATMUL_KERNEL(F16);
GKV_FLOAT_MATMUL_KERNEL(BF16);

}  // namespace gkv

#endif  // HWY_ONCE
