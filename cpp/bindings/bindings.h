#ifndef GEMMAKV_BINDINGS_BINDINGS_H_
#define GEMMAKV_BINDINGS_BINDINGS_H_

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

#include "base/error.h"
#include "cache/conversation.h"
#include "gemmakv/kv_dtype.h"
#include "gemmakv/results.h"

// Declarations that the files of this folder share. Each file registers one
// group of classes; module.cc calls them in order.
//
// A thread takes the interpreter's lock with WithGil() or RunInPython(), and
// releases it with GilReleased or WithoutGil(), which take it back at their
// end. All of these ask for it in CallOrStay(), since a thread may not get it
// while the interpreter shuts down.

namespace gkv {

class Constraint;
class Engine;

namespace py = pybind11;
using py::literals::operator""_a;

void RegisterErrors(py::module_& module);
void RegisterConfig(py::module_& module);
void RegisterCache(py::module_& module);
void RegisterOptions(py::module_& module);
void RegisterGemma(py::module_& module);
void RegisterPaddedCache(py::module_& module);
void RegisterPrefix(py::module_& module);
void RegisterFolderStore(py::module_& module);  // by RegisterPrefix
void RegisterRemoteStore(py::module_& module);
void RegisterInfo(py::module_& module);

using TokenArray =
    py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

// Returns a NumPy array that owns `values`, with the given shape.
template <typename T>
py::array_t<T> ArrayOf(std::vector<T> values,
                       const std::vector<size_t>& shape) {
  auto owner = std::make_unique<std::vector<T>>(std::move(values));
  const T* data = owner->data();
  py::capsule release(owner.release(), [](void* pointer) {
    delete static_cast<std::vector<T>*>(pointer);
  });
  return py::array_t<T>(shape, data, release);
}

// Returns the names in a table.
template <typename Table>
std::vector<std::string> NamesOf(const Table& table) {
  std::vector<std::string> names;
  for (const auto& row : table) names.emplace_back(row.name);
  return names;
}

// Returns the enumerator that has the place of `value` among `names`. Throws
// InvalidArgument, which calls the value `what`, if it is none of them.
template <typename Enum, size_t n>
Enum EnumFromName(const char* const (&names)[n], const char* what,
                  const std::string& value) {
  std::string expected;
  for (size_t i = 0; i < n; ++i) {
    if (value == names[i]) return static_cast<Enum>(i);
    expected += StrCat(i == 0      ? "'"
                       : i + 1 < n ? ", '"
                                   : " or '",
                       names[i], "'");
  }
  throw InvalidArgument(Unexpected(what, expected, StrCat("'", value, "'")));
}

// Whether the interpreter shuts down, or has done so.
inline bool InterpreterEnds() { return Py_IsInitialized() == 0; }
// Whether it does so on another thread. This one will not get its lock again.
bool InterpreterIsLost();

// Calls `use`, which asks for the interpreter's lock. While the interpreter
// shuts down, Python ends a thread that asks (pthread_exit), which unwinds its
// stack. Through noexcept code, such as most destructors, that would end the
// process. So the thread stays here instead, as in later Pythons, and the
// process ends without it. Objects of `use`, and of what it calls, are
// destroyed without the lock then, so `use` should call into Python and do
// nothing else.
template <typename Use>
void CallOrStay(const Use& use) {
  while (InterpreterIsLost()) pause();
#if defined(__GLIBCXX__)
  try {
    use();
  } catch (const abi::__forced_unwind&) {
    while (true) pause();
  }
#else
  use();
#endif
}

// Releases the interpreter's lock for as long as it is alive.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    CallOrStay([&] { PyEval_RestoreThread(state_); });
  }
  GilReleased(const GilReleased&) = delete;

 private:
  PyThreadState* const state_;
};

// Calls `use` without the interpreter's lock, and returns what it returns.
template <typename Use>
auto WithoutGil(const Use& use) {
  const GilReleased no_gil;
  return use();
}

// Whether Python code runs on a thread that Python did not make: one of the
// engine, of a prefix cache or of a store.
inline thread_local bool python_is_guest = false;

// Calls `use` with the interpreter's lock, on any thread.
template <typename Use>
void WithGil(const Use& use) {
  struct Held {
    const bool guest = PyGILState_GetThisThreadState() == nullptr;
    PyGILState_STATE state = PyGILState_Ensure();
    Held() {
      if (guest) python_is_guest = true;
    }
    // Python code that ran meanwhile may have lost the lock for ever.
    ~Held() {
      if (PyGILState_Check() != 0) PyGILState_Release(state);
      if (guest) python_is_guest = false;
    }
  };
  CallOrStay([&] {
    const Held held;
    use();
  });
}

// Returns callable(...). Python code may release the interpreter's lock and not
// get it back; pybind11's own calls would be unwound then.
template <typename... Arguments>
py::object CallPython(const py::handle& callable, Arguments&&... arguments) {
  const py::tuple tuple =
      py::make_tuple(std::forward<Arguments>(arguments)...);
  PyObject* result = nullptr;
  CallOrStay(
      [&] { result = PyObject_CallObject(callable.ptr(), tuple.ptr()); });
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// Returns a Python object that any thread may drop, with the lock or without.
std::shared_ptr<PyObject> Share(py::object object);

// Calls `use` with the interpreter's lock, on a thread of the engine. An
// exception that Python raises there is raised, as it is, by the call that it
// belongs to.
void RunInPython(const std::function<void()>& use);

// Returns the Python exception in what RunInPython throws, for the garbage
// collector; null for anything else. Only one `owner` gets it, the first that
// asks, since the collector must see a reference once. Requires: the
// interpreter's lock is held, and `error` is kept elsewhere, too.
PyObject* RaisedFor(const void* owner, const std::exception_ptr& error);

inline py::bytes BytesOf(std::span<const uint8_t> bytes) {
  return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Decodes a path, or a message with one in it, as os.fsdecode does: the bytes
// may have any encoding.
py::str FsDecode(const std::string& text);

// The name is "f32", "bf16" or "int8". Throws InvalidArgument for another one.
KvDtype DtypeFromName(const std::string& name);
const char* NameOf(KvDtype dtype);
// "full", "sliding" or "recurrent".
inline constexpr const char* kKindNames[] = {"full", "sliding", "recurrent"};
constexpr const char* NameOf(LayerKind kind) {
  return kKindNames[static_cast<size_t>(kind)];
}
// "divergent", "evicted", ...; "" for none.
const char* NameOf(PrefixMiss miss);

// Returns {"ram": n, ...} without the tiers that gave nothing.
py::dict TokensByTier(PrefixHit hit);

// Returns the constraint that a Python object is; null for None. The object has
// compute_mask(token_ids, address, bytes), which takes tokens in and fills a
// mask, forced_tokens(token_ids, count), rollback(count) and clone(); see
// engine/constraint.h.
std::shared_ptr<const Constraint> ConstraintOf(py::object object);

// Drops an object on a thread of its own.
void EndElsewhere(std::shared_ptr<void> object);

// Returns a model whose last reference may be dropped on any thread. The end of
// a model waits for running steps, which may wait for the interpreter's lock to
// call a logits processor, so the lock is released meanwhile. Once the
// interpreter ends, the model stays. A thread of the core might wait for
// itself, as where a processor had the last reference to its model, or where
// the garbage collector ran; there another thread ends the model.
template <typename T>
std::shared_ptr<T> LetEndAnywhere(std::shared_ptr<T> object) {
  T* const raw = object.get();
  return {raw, [object = std::move(object)](T*) mutable {
            if (InterpreterEnds()) {
              new std::shared_ptr<T>(std::move(object));
              return;
            }
            if (python_is_guest) return EndElsewhere(std::move(object));
            if (PyGILState_Check() == 0) return object.reset();
            const GilReleased no_gil;
            object.reset();
          }};
}

// Runs pending Python signal handlers (Ctrl-C); throws what they raise.
// Requires: the interpreter's lock is not held.
void CheckSignals();

}  // namespace gkv

#endif  // GEMMAKV_BINDINGS_BINDINGS_H_
