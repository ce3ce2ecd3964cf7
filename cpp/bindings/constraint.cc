#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "engine/constraint.h"

namespace gkv {
namespace {

class PythonConstraint final : public Constraint {
 public:
  explicit PythonConstraint(std::shared_ptr<PyObject> object,
                            std::vector<int32_t> accepted = {})
      : object_(std::move(object)), accepted_(std::move(accepted)) {}

  bool ComputeMask(std::span<uint32_t> mask) override {
    bool may_end = false;
    RunInPython([&] {
      py::list tokens;
      for (const int32_t token : accepted_) tokens.append(token);
      may_end =
          Call("compute_mask", tokens, reinterpret_cast<uintptr_t>(mask.data()),
               mask.size_bytes())
              .cast<bool>();
    });
    accepted_.clear();
    return may_end;
  }

  size_t Forced(std::span<int32_t> tokens) override {
    std::vector<int32_t> found;
    RunInPython([&] {
      py::list accepted;
      for (const int32_t token : accepted_) accepted.append(token);
      found = Call("forced_tokens", accepted, tokens.size())
                  .cast<std::vector<int32_t>>();
    });
    accepted_.clear();
    const size_t count = std::min(found.size(), tokens.size());
    std::copy_n(found.begin(), count, tokens.begin());
    return count;
  }

  // Called after a step, which must not wait for Python. The next mask does.
  void Accept(int32_t token) override { accepted_.push_back(token); }

  void Rollback(size_t count) override {
    for (; count > 0 && !accepted_.empty(); --count) accepted_.pop_back();
    if (count > 0) RunInPython([&] { Call("rollback", count); });
  }

  std::unique_ptr<Constraint> Clone() const override {
    std::shared_ptr<PyObject> copy;
    RunInPython([&] { copy = Share(Call("clone")); });
    return std::make_unique<PythonConstraint>(std::move(copy), accepted_);
  }

 private:
  // Requires: the interpreter's lock is held.
  template <typename... Arguments>
  py::object Call(const char* method, Arguments&&... arguments) const {
    const py::object bound = py::handle(object_.get()).attr(method);
    return CallPython(bound, std::forward<Arguments>(arguments)...);
  }

  std::shared_ptr<PyObject> object_;
  std::vector<int32_t> accepted_;  // those that the object was not told of
};

}  // namespace

std::shared_ptr<const Constraint> ConstraintOf(py::object object) {
  if (object.is_none()) return nullptr;
  return std::make_shared<PythonConstraint>(Share(std::move(object)));
}

}  // namespace gkv
