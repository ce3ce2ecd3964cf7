#ifndef GEMMAKV_OPS_TARGET_H_
#define GEMMAKV_OPS_TARGET_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gkv {

// Names of the SIMD targets that were compiled in and that this processor can
// run, best first: "AVX3_ZEN4", "AVX2", ...
std::vector<std::string> AttainableTargets();

// The one that kernels run on now.
std::string CurrentTarget();

// From now on kernels run on `name`, process-wide; an empty name means the
// best again. Throws InvalidArgument if it is not attainable. For tests and
// `verify`; not to be called while kernels run.
void ForceTarget(std::string_view name);

// Identity of the arithmetic of the current target. Two targets with the same
// id produce the same bits for the same weights and tokens. Targets that have
// a fused multiply-add share one id; those that lack it share another.
uint32_t NumericsId();

}  // namespace gkv

#endif  // GEMMAKV_OPS_TARGET_H_
