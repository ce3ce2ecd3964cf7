#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "base/error.h"
#include "bindings/bindings.h"
#include "gemmakv/options.h"

namespace gkv {
namespace {

using Row = py::array_t<float, py::array::c_style | py::array::forcecast>;

// Calls `processor` with copies of the arrays, which it may keep.
void Process(PyObject* processor, std::span<const int32_t> token_ids,
             std::span<float> logits) {
  const py::array_t<int32_t> ids(static_cast<py::ssize_t>(token_ids.size()),
                                 token_ids.data());
  const py::array_t<float> row(static_cast<py::ssize_t>(logits.size()),
                               logits.data());
  py::object result = CallPython(processor, ids, row);
  if (result.is_none()) result = row;
  const Row given = Row::ensure(result);
  if (!given || given.ndim() != 1 || given.shape(0) != row.shape(0)) {
    throw py::value_error(
        StrCat("logits_processor: expected it to return None or an array of ",
               logits.size(), " numbers, found ",
               given ? "another shape" : Py_TYPE(result.ptr())->tp_name));
  }
  std::copy_n(given.data(), logits.size(), logits.data());
}

LogitsProcessor ProcessorOf(const py::object& callable) {
  if (callable.is_none()) return nullptr;
  return [callable = Share(callable)](std::span<const int32_t> token_ids,
                                      std::span<float> logits) {
    RunInPython([&] { Process(callable.get(), token_ids, logits); });
  };
}

constexpr const char* kPrefixModes[] = {"off", "read", "write", "on"};
constexpr const char* kSpeculations[] = {"off", "lookup", "draft"};

}  // namespace

void RegisterOptions(py::module_& module) {
  using O = GenerateOptions;
  py::class_<O>(module, "GenerateOptions")
      .def(py::init<>())
      .def_readwrite("max_tokens", &O::max_tokens)
      .def_readwrite("min_tokens", &O::min_tokens)
      .def_readwrite("temperature", &O::temperature)
      .def_readwrite("top_k", &O::top_k)
      .def_readwrite("top_p", &O::top_p)
      .def_readwrite("min_p", &O::min_p)
      .def_readwrite("repetition_penalty", &O::repetition_penalty)
      .def_readwrite("presence_penalty", &O::presence_penalty)
      .def_readwrite("frequency_penalty", &O::frequency_penalty)
      .def_readwrite("logit_bias", &O::logit_bias)
      .def_readwrite("seed", &O::seed)
      .def_readwrite("stop", &O::stop)
      .def_readwrite("reply_stop", &O::reply_stop)
      .def_readwrite("stop_token_ids", &O::stop_token_ids)
      .def_readwrite("ignore_eos", &O::ignore_eos)
      .def_readwrite("logprobs", &O::logprobs)
      .def_readwrite("top_logprobs", &O::top_logprobs)
      .def_readwrite("deadline", &O::deadline)
      .def_property(
          "logits_processor",
          [](const O& options) { return bool(options.logits_processor); },
          [](O& options, const py::object& callable) {
            options.logits_processor = ProcessorOf(callable);
          },
          "Set to None or a function; reads as whether there is one.")
      .def_property(
          "prefix_cache",
          [](const O& options) {
            return kPrefixModes[static_cast<size_t>(options.prefix_cache)];
          },
          [](O& options, const std::string& name) {
            options.prefix_cache =
                EnumFromName<PrefixMode>(kPrefixModes, "prefix_cache", name);
          })
      .def_property(
          "speculate",
          [](const O& options) {
            return kSpeculations[static_cast<size_t>(options.speculate)];
          },
          [](O& options, const std::string& name) {
            options.speculate =
                EnumFromName<Speculate>(kSpeculations, "speculate", name);
          })
      .def("validate", &O::Validate, py::arg("vocab_size"));
}

}  // namespace gkv
