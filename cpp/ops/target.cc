#include "ops/target.h"

#include <atomic>

#include "base/error.h"
#include "ops/byte_dot.h"

#if GKV_HAVE_AVX_VNNI
#include <cpuid.h>
#endif

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

// Returns the best that the processor has for the kernels of AVX2.
ByteDot BestByteDot() {
#if GKV_HAVE_AVX_VNNI
  unsigned a = 0, b = 0, c = 0, d = 0;
  // Leaf 7, subleaf 1: bit 4 of EAX is AVX-VNNI.
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0) {
    return ByteDot::kAvxVnni;
  }
#endif
#if GKV_HAVE_AVX512_VNNI
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vnni")) {
    return ByteDot::kAvx512Vnni;
  }
#endif
  return ByteDot::kOfTarget;
}

struct Target {
  std::string Name() const {
    const std::string name = hwy::TargetName(mask);
    return byte_dot == ByteDot::kOfTarget ? name : name + "_VNNI";
  }

  int64_t mask;
  ByteDot byte_dot;  // of AVX2; others have their own
};

// Returns what the processor can run, best first. Computed once, before the
// first ForceTarget: after it Highway reports only the forced target.
const std::vector<Target>& Attainable() {
  static const std::vector<Target> targets = [] {
    std::vector<Target> found;
    for (const int64_t mask : hwy::SupportedAndGeneratedTargets()) {
      const ByteDot best = BestByteDot();
      if (mask == HWY_AVX2 && best != ByteDot::kOfTarget) {
        found.push_back({mask, best});
      }
      found.push_back({mask, ByteDot::kOfTarget});
    }
    return found;
  }();
  return targets;
}

// Returns the target and all worse ones, on which kernels fall back that are
// not compiled for it. No target (0) gives 0, which restricts nothing.
int64_t AddFallbacks(int64_t mask) {
  int64_t all = mask;
  bool worse = false;
  for (const Target& target : Attainable()) {
    worse = worse || target.mask == mask;
    if (worse) all |= target.mask;
  }
  return all;
}

std::atomic<ByteDot>& ChosenByteDot() {
  static std::atomic<ByteDot> chosen{BestByteDot()};
  return chosen;
}

}  // namespace

ByteDot CurrentByteDot() {
  return ChosenByteDot().load(std::memory_order_relaxed);
}

std::vector<std::string> AttainableTargets() {
  std::vector<std::string> names;
  for (const Target& target : Attainable()) names.push_back(target.Name());
  return names;
}

std::vector<std::string> CompiledTargets() {
  std::vector<std::string> names;
  // The better a target, the lower its bit.
  for (int64_t rest = HWY_TARGETS; rest != 0; rest &= rest - 1) {
    const int64_t mask = rest & -rest;
    if (mask == HWY_AVX2 && GKV_HAVE_BYTE_DOT) {
      names.push_back(Target{mask, ByteDot::kAvx512Vnni}.Name());
    }
    names.push_back(Target{mask, ByteDot::kOfTarget}.Name());
  }
  return names;
}

std::string CurrentTarget() {
  const int64_t mask = hwy::SupportedAndGeneratedTargets().front();
  return Target{mask, mask == HWY_AVX2 ? CurrentByteDot() : ByteDot::kOfTarget}
      .Name();
}

void ForceTarget(std::string_view name) {
  Target chosen = {0, BestByteDot()};  // no restriction
  for (const Target& target : Attainable()) {
    if (name == target.Name()) chosen = target;
  }
  if (chosen.mask == 0 && !name.empty()) {
    std::string attainable;
    for (const std::string& target : AttainableTargets()) {
      attainable += " " + target;
    }
    throw InvalidArgument(
        StrCat("SIMD target \"", name,
               "\" is not attainable here; expected one of:", attainable));
  }
  ChosenByteDot().store(chosen.byte_dot, std::memory_order_relaxed);
  hwy::SetSupportedTargetsForTest(AddFallbacks(chosen.mask));
  // Dispatch reads a cached choice. Without this it stays uninitialized, and
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
