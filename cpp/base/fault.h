#ifndef GEMMAKV_BASE_FAULT_H_
#define GEMMAKV_BASE_FAULT_H_

#include <atomic>
#include <string_view>

namespace gkv {

// Places where a C++ test makes something go wrong, by an environment variable:
//
//   GEMMAKV_FAULT=NAME:ACTION[:PASS][,NAME:ACTION[:PASS]]...
//
// NAME is that of a FaultAt call, or * for any. ACTION is kill (SIGKILL to this
// process), delay=MILLISECONDS or errno=NUMBER (the call fails with it). PASS
// counts from 1, the default: a kill is at that pass, others from it on.
//
// Test programs alone have this switch: they are linked with fault.cc as it is
// compiled with GEMMAKV_FAULT_POINTS, ahead of the library. The library itself,
// so whatever is made of it, does not read the variable, and no fault is ever
// reached.

// Reads the variable, if it is set. Throws InvalidArgument for one that says
// something else. Whoever has fault points calls it before the first.
void ReadFault();

namespace internal {
extern std::atomic<bool> fault_is_set;
int ReachFault(std::string_view name) noexcept;
}  // namespace internal

// The errno value to fail with; 0 to go on.
inline int FaultAt(std::string_view name) noexcept {
  if (!internal::fault_is_set.load(std::memory_order_relaxed)) return 0;
  return internal::ReachFault(name);
}

}  // namespace gkv

#endif  // GEMMAKV_BASE_FAULT_H_
