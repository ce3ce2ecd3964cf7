#include "base/error.h"
#include "base/worker.h"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "bindings/bindings.h"

namespace gkv {
namespace {

void SetError(PyObject* type, const Error& error) {
  PyErr_SetString(type, error.what());  // UTF-8, whatever is in it
}

void SetObject(const py::object& value) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())),
                  value.ptr());
}

// Raises the OSError subclass of the error number: FileNotFoundError, ...
void SetOsError(const IoError& error) {
  const int number = error.error_number() != 0 ? error.error_number() : EIO;
  const py::object type = py::reinterpret_borrow<py::object>(PyExc_OSError);
  SetObject(error.path().empty()
                ? type(number, error.what())
                : type(number, std::strerror(number), FsDecode(error.path())));
}

struct ErrorTypes {
  py::object base, corrupt, mismatch, full;
  py::object argument;  // makes the error of a message; none: a ValueError
};

ErrorTypes* error_types = nullptr;  // lives as long as the interpreter

void SetArgumentError(const Error& error) {
  const py::object& make = error_types->argument;
  if (!make) return SetError(PyExc_ValueError, error);
  SetObject(CallPython(make, error.what()));
}

std::atomic<std::thread::id> exiting_thread;  // it shuts the interpreter down

// A Python exception on its way through threads.
struct Raised {
  std::shared_ptr<PyObject> value;
  mutable const void* owner = nullptr;  // see RaisedFor
};

// Drops a reference, on any thread. The thread must hold no lock that another
// one may want while that has the interpreter's: both would wait for ever.
void Drop(PyObject* object) {
  WithGil([&] { Py_DECREF(object); });
}

py::object NewError(py::module_& module, const char* name,
                    const py::object& base, const char* doc) {
  const std::string full_name = std::string("gemmakv.") + name;
  auto type = py::reinterpret_steal<py::object>(
      PyErr_NewExceptionWithDoc(full_name.c_str(), doc, base.ptr(), nullptr));
  if (!type) throw py::error_already_set();
  module.attr(name) = type;
  return type;
}

}  // namespace

py::str FsDecode(const std::string& text) {
  PyObject* object = PyUnicode_DecodeFSDefaultAndSize(
      text.data(), static_cast<Py_ssize_t>(text.size()));
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(object);
}

std::shared_ptr<PyObject> Share(py::object object) {
  return {object.release().ptr(), &Drop};
}

void EndElsewhere(std::shared_ptr<void> object) {
  // The object stays if there is no thread for it.
  auto* const last = new std::shared_ptr<void>(std::move(object));
  try {
    RunElsewhere([last] { delete last; });
  } catch (const std::exception&) {
  }
}

void RunInPython(const std::function<void()>& use) {
  WithGil([&] {
    try {
      use();
    } catch (py::error_already_set& error) {
      if (error.trace()) {
        PyException_SetTraceback(error.value().ptr(), error.trace().ptr());
      }
      throw Raised{Share(error.value())};
    } catch (py::builtin_exception& error) {
      error.set_error();
      throw Raised{Share(py::error_already_set().value())};
    }
  });
}

PyObject* RaisedFor(const void* owner, const std::exception_ptr& error) {
  if (!error) return nullptr;
  try {
    std::rethrow_exception(error);
  } catch (const Raised& raised) {
    if (raised.owner == nullptr) raised.owner = owner;
    return raised.owner == owner ? raised.value.get() : nullptr;
  } catch (...) {
    return nullptr;
  }
}

void RegisterErrors(py::module_& module) {
  error_types = new ErrorTypes;
  error_types->base =
      NewError(module, "GemmaKVError",
               py::reinterpret_borrow<py::object>(PyExc_Exception),
               "Base of this package's own errors.");
  error_types->corrupt =
      NewError(module, "CorruptFile", error_types->base,
               "Bytes that claim to be of a known format are not.");
  error_types->mismatch = NewError(module, "MismatchError", error_types->base,
                                   "Two sound things do not belong together.");
  error_types->full = NewError(
      module, "CacheFullError", error_types->base,
      "A conversation is at its capacity, or memory for it is used up.");
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Raised& raised) {
      PyObject* const value = raised.value.get();
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value)), value);
    } catch (const InvalidArgument& error) {
      SetArgumentError(error);
    } catch (const IoError& error) {
      SetOsError(error);
    } catch (const CorruptFile& error) {
      SetError(error_types->corrupt.ptr(), error);
    } catch (const Mismatch& error) {
      SetError(error_types->mismatch.ptr(), error);
    } catch (const CacheFull& error) {
      SetError(error_types->full.ptr(), error);
    } catch (const Error& error) {
      SetError(error_types->base.ptr(), error);
    }
  });
  module.def(
      "set_argument_error",
      [](py::object make) { error_types->argument = std::move(make); },
      py::arg("make"),
      "Has `make(message)` give the error of what the core refuses.");
  py::module_::import("atexit").attr("register")(
      py::cpp_function([] { exiting_thread = std::this_thread::get_id(); }));
}

void CheckSignals() {
  WithGil([] {
    int raised = 0;
    CallOrStay([&] { raised = PyErr_CheckSignals(); });
    if (raised != 0) throw py::error_already_set();
  });
}

bool InterpreterIsLost() {
  return InterpreterEnds() &&
         exiting_thread.load() != std::this_thread::get_id();
}

}  // namespace gkv
