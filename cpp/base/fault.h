#ifndef GEMMAKV_BASE_FAULT_H_
#define GEMMAKV_BASE_FAULT_H_

#include <atomic>
#include <string_view>

namespace gkv {

// Fault points are places where a C++ test makes something go wrong, by an
// environment variable:
//
//   GEMMAKV_FAULT=NAME:ACTION[:PASS][,NAME:ACTION[:PASS]]...
//
// NAME is that of a FaultAt call, or * for any. ACTION is kill (SIGKILL to this
// process), delay=MILLISECONDS or errno=NUMBER (the call fails with it). PASS
// counts the calls from 1, the default. A kill happens at that call; the other
// actions happen at it and at all later ones.
//
// Only test programs have this switch. They are linked with a fault.cc that is
// compiled with GEMMAKV_FAULT_POINTS, ahead of the library. The library itself
// does not read the variable, and neither does any program made of it: there no
// fault is ever reached.

// Reads the variable, if it is set. Throws InvalidArgument if it has another
// form. Code that has fault points calls this before it reaches the first one.
void ReadFault();

namespace internal {
extern std::atomic<bool> fault_is_set;
int ReachFault(std::string_view name) noexcept;
}  // namespace internal

// Returns the errno value to fail with; 0 to go on.
inline int FaultAt(std::string_view name) noexcept {
  if (!internal::fault_is_set.load(std::memory_order_relaxed)) return 0;
  return internal::ReachFault(name);
}

}  // namespace gkv

#endif  // GEMMAKV_BASE_FAULT_H_
