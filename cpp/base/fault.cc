#include "base/fault.h"

#if GEMMAKV_FAULT_POINTS

#include <algorithm>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"

namespace gkv {
namespace {

struct Fault {
  std::string name;
  bool kill = false;
  uint32_t delay_ms = 0;
  uint32_t error = 0;
  uint64_t pass = 1;
  uint64_t passed = 0;
};

std::mutex mutex;  // guards what follows
std::vector<Fault> faults;

bool ParseNumber(std::string_view text, auto& number) {
  const char* const end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, number);
  return !text.empty() && result.ec == std::errc() && result.ptr == end;
}

bool Parse(std::string_view text, Fault& out) {
  const size_t name = text.find(':');
  if (name == 0 || name == text.npos) return false;
  out.name = text.substr(0, name);
  std::string_view action = text.substr(name + 1);
  if (const size_t pass = action.find(':'); pass != action.npos) {
    if (!ParseNumber(action.substr(pass + 1), out.pass) || out.pass == 0) {
      return false;
    }
    action = action.substr(0, pass);
  }
  out.kill = action == "kill";
  if (out.kill) return true;
  if (action.starts_with("delay=")) {
    return ParseNumber(action.substr(6), out.delay_ms);
  }
  return action.starts_with("errno=") &&
         ParseNumber(action.substr(6), out.error) && out.error != 0;
}

}  // namespace

std::atomic<bool> internal::fault_is_set = false;

void ReadFault() {
  const char* const variable = std::getenv("GEMMAKV_FAULT");
  std::vector<Fault> found;
  for (std::string_view text = variable != nullptr ? variable : "";
       variable != nullptr;) {
    const size_t comma = std::min(text.find(','), text.size());
    if (!Parse(text.substr(0, comma), found.emplace_back())) {
      throw InvalidArgument(
          StrCat("GEMMAKV_FAULT is \"", variable,
                 "\", expected NAME:ACTION[:PASS],... with kill, "
                 "delay=MILLISECONDS or errno=NUMBER"));
    }
    if (comma == text.size()) break;
    text.remove_prefix(comma + 1);
  }
  const std::lock_guard lock(mutex);
  faults = std::move(found);
  internal::fault_is_set = !faults.empty();
}

int internal::ReachFault(std::string_view name) noexcept {
  uint32_t delay_ms = 0;
  int error = 0;
  {
    const std::lock_guard lock(mutex);
    for (Fault& fault : faults) {
      if (fault.name != "*" && fault.name != name) continue;
      if (++fault.passed < fault.pass) continue;
      if (fault.kill && fault.passed == fault.pass) (void)std::raise(SIGKILL);
      delay_ms += fault.delay_ms;
      if (fault.error != 0) error = static_cast<int>(fault.error);
    }
  }
  if (delay_ms != 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
  }
  return error;
}

}  // namespace gkv

#else  // GEMMAKV_FAULT_POINTS

namespace gkv {

std::atomic<bool> internal::fault_is_set = false;

void ReadFault() {}

int internal::ReachFault(std::string_view) noexcept { return 0; }

}  // namespace gkv

#endif  // GEMMAKV_FAULT_POINTS
