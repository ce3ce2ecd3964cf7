#include "ops/target.h"

#include "base/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/target.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

bool HasFusedMultiplyAdd() { return HWY_NATIVE_FMA != 0; }

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

HWY_EXPORT(HasFusedMultiplyAdd);

namespace {

// What the processor can run, best first. Computed once, before the first
// ForceTarget: afterwards Highway reports only the forced target.
const std::vector<int64_t>& AttainableMasks() {
  static const std::vector<int64_t> masks = hwy::SupportedAndGeneratedTargets();
  return masks;
}

}  // namespace

std::vector<std::string> AttainableTargets() {
  std::vector<std::string> names;
  for (const int64_t mask : AttainableMasks()) {
    names.emplace_back(hwy::TargetName(mask));
  }
  return names;
}

std::string CurrentTarget() {
  return hwy::TargetName(hwy::SupportedAndGeneratedTargets().front());
}

void ForceTarget(std::string_view name) {
  int64_t chosen = 0;  // no restriction
  for (const int64_t mask : AttainableMasks()) {
    if (name == hwy::TargetName(mask)) chosen = mask;
  }
  if (chosen == 0 && !name.empty()) {
    std::string attainable;
    for (const std::string& target : AttainableTargets()) {
      attainable += " " + target;
    }
    throw InvalidArgument(
        StrCat("SIMD target \"", name,
               "\" is not attainable here; expected one of:", attainable));
  }
  hwy::SetSupportedTargetsForTest(chosen);
  // Dispatch reads a cached choice: without this it stays uninitialized and
  // every HWY_DYNAMIC_DISPATCH would take the slow first-call path once.
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

uint32_t NumericsId() {
  constexpr Architecture kArchitecture = HWY_ARCH_X86   ? Architecture::kX86
                                         : HWY_ARCH_ARM ? Architecture::kArm
                                                        : Architecture::kOther;
  return NumericsIdOf(kArchitecture,
                      HWY_DYNAMIC_DISPATCH(HasFusedMultiplyAdd)());
}

}  // namespace gkv

#endif  // HWY_ONCE
