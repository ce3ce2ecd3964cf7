#include <pybind11/stl.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>

#include "base/aligned_buffer.h"
#include "base/error.h"
#include "bindings/bindings.h"
#include "store/remote_store.h"

namespace gkv {
namespace {

constexpr double kMaxTimeoutS = 3600;
constexpr const char* kMethods[] = {"get_many", "put_many", "has_many"};

// A reference to a Python object, in a thread that has the interpreter's lock.
// Dropping the last one may run Python code.
class Ref {
 public:
  explicit Ref(PyObject* object) : object_(object) {}
  ~Ref() {
    if (object_ != nullptr) CallOrStay([this] { Py_DECREF(object_); });
  }
  Ref(const Ref&) = delete;
  PyObject* get() const { return object_; }

 private:
  PyObject* const object_;
};

// Bytes that Python sees as a read-only buffer. Views of it keep their owner.
class __attribute__((visibility("hidden"))) SharedBytes {
 public:
  explicit SharedBytes(RemoteValue value) : value_(std::move(value)) {}
  py::buffer_info Info() const {
    return {value_.bytes.data(), static_cast<py::ssize_t>(value_.bytes.size())};
  }

 private:
  RemoteValue value_;
};

// Buffers of Python objects. They may be released on any thread.
struct Buffers {
  std::vector<Py_buffer> views;
  Buffers() = default;
  Buffers(const Buffers&) = delete;
  ~Buffers() {
    if (views.empty() || InterpreterEnds()) return;
    WithGil([this] {
      for (Py_buffer& view : views) PyBuffer_Release(&view);
    });
  }
};

// Throws the Python exception that is set as a std::runtime_error with its
// words, since threads that have no interpreter report it.
[[noreturn]] void ThrowPythonError() {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  const Ref owners[] = {Ref(type), Ref(value), Ref(traceback)};
  std::string text = type != nullptr
                         ? reinterpret_cast<PyTypeObject*>(type)->tp_name
                         : "an error without a type";
  PyObject* said = nullptr;
  if (value != nullptr) CallOrStay([&] { said = PyObject_Str(value); });
  const Ref said_owner(said);
  const char* words = said != nullptr ? PyUnicode_AsUTF8(said) : nullptr;
  if (words != nullptr) {  // some have pages of them
    const std::string_view line(words);
    text += StrCat(": ", OneLine(line.substr(0, line.find('\n'))));
  }
  PyErr_Clear();
  throw std::runtime_error(text);
}

// A Python object as a client. Only the threads of remote calls call it. They
// take the interpreter's lock here and nowhere else.
class __attribute__((visibility("hidden"))) PythonClient final
    : public RemoteClient {
 public:
  // Requires: the interpreter's lock is held. Nothing else here requires that.
  explicit PythonClient(const py::object& client)
      : client_(client.inc_ref().ptr()),
        deletes_(py::hasattr(client, "delete_many")),
        clears_(py::hasattr(client, "delete_some")) {}
  ~PythonClient() override {
    if (InterpreterEnds()) return;  // the object ends with it
    WithGil([this] { const Ref last(client_); });
  }
  PythonClient(const PythonClient&) = delete;

  std::vector<std::optional<RemoteValue>> GetMany(
      std::span<const std::string> keys) override {
    std::vector<std::optional<RemoteValue>> values(keys.size());
    const auto buffers = std::make_shared<Buffers>();
    buffers->views.reserve(keys.size());
    WithGil([&] {
      const Ref result(Call("get_many", KeyList(keys)));
      CheckItems(result.get(), "get_many", keys.size());
      for (size_t i = 0; i < keys.size(); ++i) {
        PyObject* const item = ItemAt(result.get(), i);
        if (item == Py_None) continue;
        Py_buffer view;
        int status = 0;
        // Exporters may be written in Python.
        CallOrStay(
            [&] { status = PyObject_GetBuffer(item, &view, PyBUF_SIMPLE); });
        if (status != 0) ThrowPythonError();
        buffers->views.push_back(view);
        values[i] = RemoteValue{{static_cast<const uint8_t*>(view.buf),
                                 static_cast<size_t>(view.len)},
                                buffers};
      }
    });
    return values;
  }

  void PutMany(std::span<const RemoteItem> items) override {
    WithGil([&] {
      py::list list;
      for (const RemoteItem& item : items) {
        const py::object bytes = py::cast(SharedBytes(item.value));
        list.append(py::make_tuple(item.key,
                                   py::reinterpret_steal<py::object>(
                                       PyMemoryView_FromObject(bytes.ptr()))));
      }
      const Ref done(Call("put_many", std::move(list)));
    });
  }

  std::vector<bool> HasMany(std::span<const std::string> keys) override {
    std::vector<bool> found(keys.size());
    WithGil([&] {
      const Ref result(Call("has_many", KeyList(keys)));
      CheckItems(result.get(), "has_many", keys.size());
      for (size_t i = 0; i < keys.size(); ++i) {
        PyObject* const item = ItemAt(result.get(), i);
        CheckBool(item, "has_many");
        found[i] = item == Py_True;
      }
    });
    return found;
  }

  void DeleteMany(std::span<const std::string> keys) override {
    if (!deletes_) return;
    WithGil([&] { const Ref done(Call("delete_many", KeyList(keys))); });
  }

  bool DeleteSome(const std::string& prefix) override {
    bool more = false;
    WithGil([&] {
      const Ref result(Call("delete_some", py::str(prefix)));
      CheckBool(result.get(), "delete_some");
      more = result.get() == Py_True;
    });
    return more;
  }

  bool can_clear() const override { return clears_; }

 private:
  static py::list KeyList(std::span<const std::string> keys) {
    py::list list(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) list[i] = py::str(keys[i]);
    return list;
  }

  // Returns a new reference. Throws the words of what the method raises.
  PyObject* Call(const char* method, const py::object& argument) const {
    PyObject* result = nullptr;
    CallOrStay([&] {
      PyObject* const bound = PyObject_GetAttrString(client_, method);
      if (bound == nullptr) return;
      result = PyObject_CallOneArg(bound, argument.ptr());
      Py_DECREF(bound);
    });
    if (result == nullptr) ThrowPythonError();
    return result;
  }

  static void CheckItems(PyObject* result, const char* method,
                         size_t expected) {
    if (!PyList_Check(result) && !PyTuple_Check(result)) {
      throw std::runtime_error(StrCat(method, " returned a ",
                                      Py_TYPE(result)->tp_name,
                                      ", expected a list"));
    }
    const auto found = static_cast<size_t>(PySequence_Fast_GET_SIZE(result));
    if (found != expected) {
      throw std::runtime_error(
          StrCat(method, " returned ", found, " items, expected ", expected));
    }
  }

  // Returns an item. Another thread may have made the list shorter meanwhile.
  static PyObject* ItemAt(PyObject* result, size_t i) {
    if (i >= static_cast<size_t>(PySequence_Fast_GET_SIZE(result))) {
      throw std::runtime_error("a returned list changed while it was read");
    }
    return PySequence_Fast_GET_ITEM(result, static_cast<Py_ssize_t>(i));
  }

  static void CheckBool(PyObject* item, const char* method) {
    if (PyBool_Check(item)) return;
    throw std::runtime_error(StrCat(method, " gave a ", Py_TYPE(item)->tp_name,
                                    ", expected True or False"));
  }

  PyObject* const client_;  // owned
  const bool deletes_, clears_;
};

std::shared_ptr<RemoteStore> MakeStore(const py::object& client,
                                       const std::string& secret,
                                       double timeout_s) {
  for (const char* method : kMethods) {
    if (py::hasattr(client, method) &&
        PyCallable_Check(client.attr(method).ptr()) != 0) {
      continue;
    }
    throw InvalidArgument(
        StrCat("remote: expected an object with get_many, put_many and "
               "has_many, found a ",
               Py_TYPE(client.ptr())->tp_name, " without ", method));
  }
  if (!(timeout_s > 0 && timeout_s <= kMaxTimeoutS)) {
    throw InvalidArgument(Unexpected(
        "timeout_s", StrCat("more than 0, at most ", kMaxTimeoutS),
        timeout_s));
  }
  RemoteOptions options;
  options.secret.assign(secret.begin(), secret.end());
  options.calls.timeout =
      std::chrono::nanoseconds(std::llround(timeout_s * 1e9));
  return MakeRemoteStore(std::make_shared<PythonClient>(client), options);
}

py::dict CallStatsOf(const RemoteStore& store) {
  const RemoteCallStats stats = WithoutGil([&] { return store.call_stats(); });
  return py::dict("calls"_a = stats.calls, "failures"_a = stats.failures,
                  "timeouts"_a = stats.timeouts, "refused"_a = stats.refused,
                  "opened"_a = stats.opened, "reads_open"_a = stats.reads_open,
                  "writes_open"_a = stats.writes_open,
                  "running"_a = stats.running,
                  "last_error"_a = stats.last_error);
}

// kind, address, parent, end, digest of the salt
using PlainKey =
    std::tuple<uint32_t, std::string, std::string, uint64_t, std::string>;

Address AddressOf(const std::string& bytes) {
  Address address;
  CheckRange(bytes.size(), address.bytes.size(), address.bytes.size(),
             "bytes of an address");
  std::memcpy(address.bytes.data(), bytes.data(), bytes.size());
  return address;
}

std::vector<ObjectKey> KeysOf(const std::vector<PlainKey>& plain) {
  std::vector<ObjectKey> keys;
  for (const auto& [kind, address, parent, end, salt] : plain) {
    keys.push_back({static_cast<ObjectKind>(kind), AddressOf(address),
                    AddressOf(parent), end, AddressOf(salt)});
  }
  return keys;
}

// Registers calls of a tier by itself, without a model, for tests.
void RegisterPlainCalls(py::module_& module) {
  module.def("_store_put", [](BlockStore& store, const PlainKey& key,
                              const py::bytes& data) {
    const std::string_view view(data);
    auto buffer = std::make_shared<AlignedBuffer<uint8_t>>(view.size());
    if (!view.empty()) std::memcpy(buffer->data(), view.data(), view.size());
    const ObjectKey object = KeysOf({key}).front();
    const GilReleased no_gil;
    store.Put(object, {{buffer->data(), buffer->size()}, buffer});
  });
  module.def("_store_load",
             [](BlockStore& store, const std::vector<PlainKey>& plain) {
               const std::vector<ObjectKey> keys = KeysOf(plain);
               const std::vector<Loaded> loaded =
                   WithoutGil([&] { return store.Load(keys); });
               py::list all;
               for (const Loaded& one : loaded) {
                 if (one.state == LoadState::kHit) {
                   all.append(BytesOf(one.object.bytes));
                 } else {
                   all.append(py::none());
                 }
               }
               return all;
             });
  module.def("_store_has",
             [](BlockStore& store, const std::vector<PlainKey>& plain) {
               const std::vector<ObjectKey> keys = KeysOf(plain);
               std::vector<uint8_t> found(keys.size());
               WithoutGil([&] { store.Has(keys, found); });
               return std::vector<bool>(found.begin(), found.end());
             });
  module.def("_store_remove",
             [](BlockStore& store, const std::vector<PlainKey>& plain) {
               const std::vector<ObjectKey> keys = KeysOf(plain);
               const GilReleased no_gil;
               store.Remove(keys);
             });
  module.def("_store_clear_salt",
             [](BlockStore& store, const std::string& salt) {
               const Address digest = AddressOf(salt);
               const GilReleased no_gil;
               return store.Clear(&digest) == Cleared::kAll;
             });
}

}  // namespace

void RegisterRemoteStore(py::module_& module) {
  py::class_<SharedBytes>(module, "_SharedBytes", py::buffer_protocol())
      .def_buffer(&SharedBytes::Info);
  py::class_<RemoteStore, BlockStore, std::shared_ptr<RemoteStore>>(
      module, "RemoteStore")
      .def(py::init(&MakeStore), py::arg("client"), py::kw_only(),
           py::arg("secret"), py::arg("timeout_s"))
      .def("call_stats", &CallStatsOf);
  RegisterPlainCalls(module);
}

}  // namespace gkv
