#include "bindings/numpy_source.h"

#include <utility>

#include "base/error.h"

namespace gkv {
namespace {

TensorType TypeOf(const std::string& name, const py::array& array) {
  const std::string dtype = py::str(array.dtype());
  if (dtype == "float32") return TensorType::kF32;
  if (dtype == "float16") return TensorType::kF16;
  if (dtype == "bfloat16") return TensorType::kBF16;
  throw InvalidArgument(StrCat("tensor ", name, " has dtype ", dtype,
                               ", expected float32, float16 or bfloat16"));
}

std::string NameOf(const py::handle& key) {
  if (PyUnicode_Check(key.ptr())) {
    Py_ssize_t size = 0;
    const char* name = PyUnicode_AsUTF8AndSize(key.ptr(), &size);
    if (name != nullptr) return {name, static_cast<size_t>(size)};
    PyErr_Clear();  // a lone surrogate
  }
  throw InvalidArgument(StrCat("source has the key ",
                               std::string(py::repr(key)),
                               ", expected names of tensors"));
}

}  // namespace

NumpySource::NumpySource(py::object mapping) : mapping_(std::move(mapping)) {
  if (!py::hasattr(mapping_, "keys") || !py::hasattr(mapping_, "__getitem__")) {
    throw InvalidArgument(
        StrCat("source is a ", std::string(py::str(py::type::of(mapping_))),
               ", expected a mapping of tensor name to array"));
  }
}

std::vector<std::string> NumpySource::Names() const {
  std::vector<std::string> names;
  for (const py::handle name : mapping_.attr("keys")()) {
    names.push_back(NameOf(name));
  }
  return names;
}

std::optional<TensorView> NumpySource::Find(std::string_view name_view) {
  const std::string name(name_view);
  py::array array;
  try {
    array = py::array::ensure(mapping_[py::str(name)], py::array::c_style);
  } catch (py::error_already_set& error) {
    if (error.matches(PyExc_KeyError)) return std::nullopt;
    throw;
  }
  if (!array) {
    PyErr_Clear();
    throw InvalidArgument(StrCat("tensor ", name, " is not an array"));
  }
  const bool experts = HoldsExperts(name);
  if (experts ? array.ndim() != 3 : array.ndim() != 1 && array.ndim() != 2) {
    throw InvalidArgument(StrCat("tensor ", name, " has ", array.ndim(),
                                 " dimensions, expected ",
                                 experts ? "3" : "1 or 2"));
  }
  TensorView view;
  view.name = name;
  view.type = TypeOf(name, array);
  view.parts = experts ? static_cast<size_t>(array.shape(0)) : 1;
  view.rows = view.parts;
  if (array.ndim() > 1) {
    view.rows *= static_cast<size_t>(array.shape(array.ndim() - 2));
  }
  view.cols = static_cast<size_t>(array.shape(array.ndim() - 1));
  view.data = static_cast<const uint8_t*>(array.data());
  held_[name] = std::move(array);
  return view;
}

void NumpySource::Release(const TensorView& view, size_t begin, size_t end) {
  (void)begin;
  if (end == view.size_bytes()) held_.erase(view.name);
}

}  // namespace gkv
