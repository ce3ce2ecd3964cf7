#ifndef GEMMAKV_OPS_TARGET_H_
#define GEMMAKV_OPS_TARGET_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gkv {

// Returns the names of the SIMD targets that were compiled in and that this
// processor can run, best first: "AVX3_ZEN4", "AVX2_VNNI", "AVX2", ...
// AVX2_VNNI is AVX2 with the instruction for products of bytes, which came
// later.
std::vector<std::string> AttainableTargets();

// Returns all that were compiled in, best first, whether this processor can run
// them or not.
std::vector<std::string> CompiledTargets();

// Returns the one that kernels run on now.
std::string CurrentTarget();

// Makes all kernels of this process run on `name` from now on; an empty name
// means the best again. Throws InvalidArgument if it is not attainable. For
// tests and `verify`; not to be called while kernels run.
void ForceTarget(std::string_view name);

// Raised with every change of any bit of keys, values or logits. A test
// (test_numerics.py) compares their hashes with those of this version. Version
// 1 of x86 has the ids of files that were written before there were versions.
inline constexpr uint32_t kNumericsVersion = 2;

enum class Architecture : uint32_t { kX86 = 0, kArm = 1, kOther = 2 };

constexpr uint32_t NumericsIdOf(Architecture architecture, bool fused) {
  return (kNumericsVersion - 1) << 8 |
         static_cast<uint32_t>(architecture) << 4 | (fused ? 1 : 2);
}

// Returns the identity of the arithmetic of the current target. Two targets
// with the same id produce the same bits for the same weights and tokens: those
// of one architecture that have a fused multiply-add, and those that lack it.
uint32_t NumericsId();

}  // namespace gkv

#endif  // GEMMAKV_OPS_TARGET_H_
