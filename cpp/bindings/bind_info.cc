#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <variant>

#include "base/aligned_buffer.h"
#include "base/error.h"
#include "base/fp_environment.h"
#include "base/heap_trim.h"
#include "base/process.h"
#include "base/processors.h"
#include "base/thread_pool.h"
#include "bindings/bindings.h"
#include "engine/piece_encoder.h"
#include "engine/vocabulary.h"
#include "io/gguf.h"
#include "model/weights/packed_file.h"
#include "model/weights/quantization.h"
#include "model/weights/weight_table.h"
#include "ops/machine_probe.h"
#include "ops/matmul.h"
#include "ops/target.h"

namespace gkv {
namespace {

py::object ToPython(const GgufValue& value);

py::object StringToPython(std::string_view text) {
  // Strings of a file need not be valid UTF-8.
  PyObject* object = PyUnicode_DecodeUTF8(
      text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

py::object ArrayToPython(const GgufArray& array) {
  return std::visit(
      [](const auto& values) -> py::object {
        py::list list(values.size());
        for (size_t i = 0; i < values.size(); ++i) {
          list[i] = ToPython(GgufValue(values[i]));
        }
        return list;
      },
      array.values);
}

py::object ToPython(const GgufValue& value) {
  return std::visit(
      [](const auto& v) -> py::object {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<T, std::string_view>) {
          return StringToPython(v);
        } else if constexpr (std::is_same_v<T, GgufArray>) {
          return ArrayToPython(v);
        } else {
          return py::cast(v);
        }
      },
      value);
}

using TensorTuple = std::tuple<std::string, std::string, uint32_t,
                               std::vector<uint64_t>, uint64_t>;

std::vector<TensorTuple> Tensors(const GgufFile& file) {
  std::vector<TensorTuple> tensors;
  for (const GgufFile::TensorInfo& tensor : file.tensors()) {
    const TensorTypeInfo* type = FindTensorType(tensor.type_id);
    tensors.emplace_back(tensor.name,
                         type ? std::string(type->name) : std::string("?"),
                         tensor.type_id, tensor.shape, tensor.size_bytes);
  }
  return tensors;
}

// Reads a tensor as models do: packed as the kernels read it, then unpacked to
// floats.
py::array_t<float> ReadTensor(GgufFile& file, const std::string& name) {
  const std::optional<TensorView> view = file.Find(name);
  if (!view) throw py::key_error(name);
  py::array_t<float> result({view->rows, view->cols});
  float* out = result.mutable_data();
  const GilReleased no_gil;
  const ScopedFpEnvironment fp_environment;
  AlignedBuffer<uint8_t> group(GroupBytes(view->type, view->cols));
  const size_t row_bytes = RowBytes(view->type, view->cols);
  for (size_t begin = 0; begin < view->rows; begin += kRowGroup) {
    const size_t rows = std::min(kRowGroup, view->rows - begin);
    PackGroup(view->type, view->data + begin * row_bytes, rows, view->cols,
              group.data());
    const PackedView packed{view->type, rows, view->cols, group.data()};
    for (size_t row = 0; row < rows; ++row) {
      UnpackRow(packed, row, out + (begin + row) * view->cols);
    }
  }
  return result;
}

void CheckPackedFile(const std::string& path) {
  const std::optional<Hash128> fingerprint =
      FingerprintOf(std::string_view(path).substr(path.rfind('/') + 1));
  if (!fingerprint) {
    throw CorruptFile(path + ": expected a packed file of this version");
  }
  ThreadPool pool(ThreadPool::AvailableProcessors());
  PackedFile(path, *fingerprint).CheckAll(pool);
}

using ProcessorTuple = std::tuple<int, int, int>;

std::vector<ProcessorTuple> PlacementTuples(const std::vector<int>& ids,
                                            const std::string& folder) {
  std::vector<ProcessorTuple> order;
  for (const Processor& p : PlacementOrder(
           DescribeProcessors(ids, folder.empty() ? kProcessorsFolder
                                                  : folder))) {
    order.emplace_back(p.id, p.core, p.node);
  }
  return order;
}

// Texts that are longer are encoded without the interpreter's lock, so that
// other threads need not wait. Releasing it takes longer than a shorter text.
constexpr size_t kLongTextBytes = 16 << 10;

std::vector<int32_t> Encode(const PieceEncoder& encoder,
                            std::string_view text) {
  std::optional<GilReleased> no_gil;
  if (text.size() > kLongTextBytes) no_gil.emplace();
  return encoder.Encode(text);
}

// Requires: `id` is a token.
py::object PieceOf(const PieceEncoder& encoder, int32_t id) {
  return StringToPython(encoder.Piece(id));
}

bool IsByte(const PieceEncoder& encoder, int32_t id) {
  return encoder.TypeOf(id) == Vocabulary::kByte;
}

py::list PiecesOf(const PieceEncoder& encoder) {
  py::list pieces(encoder.size());
  for (size_t i = 0; i < encoder.size(); ++i) {
    pieces[i] = StringToPython(encoder.Piece(static_cast<int32_t>(i)));
  }
  return pieces;
}

std::vector<int32_t> SilentOf(const PieceEncoder& encoder) {
  std::vector<int32_t> ids;
  for (size_t i = 0; i < encoder.size(); ++i) {
    const auto id = static_cast<int32_t>(i);
    const Vocabulary::Type type = encoder.TypeOf(id);
    if (type == Vocabulary::kControl || type == Vocabulary::kUnused ||
        type == Vocabulary::kUnknown) {
      ids.push_back(id);
    }
  }
  return ids;
}

py::dict CpuInfo() {
  return py::dict("target"_a = CurrentTarget(),
                  "targets"_a = AttainableTargets(),
                  "compiled"_a = CompiledTargets(),
                  "threads"_a = ThreadPool::AvailableProcessors(),
                  "l1_bytes"_a = ProcessorCacheBytes(1),
                  "l2_bytes"_a = ProcessorCacheBytes(2),
                  "l3_bytes"_a = ProcessorCacheBytes(3));
}

}  // namespace

void RegisterInfo(py::module_& module) {
  py::class_<GgufFile>(module, "GgufFile")
      .def(py::init<const std::string&>(), py::arg("path"))
      .def_property_readonly("version", &GgufFile::version)
      .def("keys", &GgufFile::Keys)
      .def(
          "get",
          [](const GgufFile& file, const std::string& key) {
            const std::optional<GgufValue> value = file.Get(key);
            if (!value) throw py::key_error(key);
            return ToPython(*value);
          },
          py::arg("key"))
      .def("read_tensor", &ReadTensor, py::arg("name"),
           "Returns weights as float32 [rows, columns], exactly as the model "
           "uses them; a vector is one row.")
      .def("tensors", &Tensors,
           "Returns (name, type, type id, shape, bytes) of each tensor. The "
           "shape is the file's: fastest dimension first.");

  module.def(
      "sentencepiece_model",
      [](const GgufFile& file) {
        return py::bytes(
            WithoutGil([&] { return Vocabulary(file).SentencePieceModel(); }));
      },
      py::arg("file"),
      "Returns the serialized SentencePiece model of a file's vocabulary.");
  module.def("has_merges", &Vocabulary::HasMerges, py::arg("file"),
             "Returns whether a file's vocabulary goes by merges, not scores.");
  py::class_<PieceEncoder>(module, "PieceEncoder")
      .def(py::init([](const GgufFile& file) {
             const GilReleased no_gil;
             return std::make_unique<PieceEncoder>(Vocabulary(file),
                                                   file.path());
           }),
           py::arg("file"))
      .def("__len__", &PieceEncoder::size)
      .def("encode", &Encode, py::arg("text"))
      .def("find", &PieceEncoder::Find, py::arg("piece"),
           "Returns the token of a piece; -1 if there is none.")
      .def("piece", &PieceOf, py::arg("id"))
      .def("pieces", &PiecesOf)
      .def("is_byte", &IsByte, py::arg("id"))
      .def("silent", &SilentOf,
           "Returns the control, unused and unknown tokens.");
  module.def("is_control_name", &IsControlName, py::arg("piece"),
             "Returns whether a piece is a control token by its name.");
  module.def(
      "other_parts",
      [](const std::vector<std::string>& names) {
        std::vector<std::string> found;
        std::copy_if(names.begin(), names.end(), std::back_inserter(found),
                     [](const std::string& name) { return IsOtherPart(name); });
        return found;
      },
      py::arg("names"),
      "Returns the names of tensors of parts beside a language model, such as "
      "image encoders.");
  module.def("tensor_types", [] { return NamesOf(kTensorTypes); },
             "Returns the names of the tensor types that models may use.");
  module.def("quantize_types", [] { return NamesOf(kQuantizeTargets); },
             "Returns the types that matrices can be quantized to while they "
             "are loaded.");
  const auto no_lock = py::call_guard<GilReleased>();
  py::class_<MachineProbe>(module, "MachineProbe")
      .def(py::init<size_t>(), py::arg("threads"), no_lock)
      .def("read_bytes_per_s", &MachineProbe::ReadBytesPerSecond, no_lock)
      .def("int8_ops_per_s", &MachineProbe::Int8OpsPerSecond, no_lock)
      .def("float_ops_per_s", &MachineProbe::FloatOpsPerSecond, no_lock);
  module.def("check_packed_file", &CheckPackedFile, py::arg("path"), no_lock,
             "Raises CorruptFile unless every byte is as it was packed.");
  module.def("cpu_info", &CpuInfo);
  module.def(
      "is_guest", [] { return python_is_guest; },
      "Returns whether this is a thread of the core. If it waits for what the "
      "core does, it may wait for itself.");
  const ControlGroups groups;
  module.def(
      "control_groups",
      [](const std::string& root, const std::string& own) {
        py::list folders;
        for (const std::string& folder : ControlGroupFolders({root, own}, "")) {
          folders.append(FsDecode(folder));
        }
        return folders;
      },
      py::arg("root") = groups.root, py::arg("own") = groups.own,
      "Returns the folders of the control groups (version 2) that hold this "
      "process, each one inside the one before it. Tests give others.");
  module.def(
      "memory_limit",
      [](const std::string& root, const std::string& own) {
        return MemoryLimit({root, own});
      },
      py::arg("root") = groups.root, py::arg("own") = groups.own,
      "Returns the bytes of memory that this process may use: those of the "
      "machine, or the lowest limit of its control groups.");
  module.def("placement_order", &PlacementTuples, py::arg("ids"),
             py::arg("folder") = "",
             "Returns (id, core, NUMA node) of processors, in the order in "
             "which threads are placed. Tests give the `folder` that describes "
             "them.");
  module.def("trim_heap", &TrimHeap,
             "Gives freed memory back to the system. Called after loading.");
  module.def("force_target", &ForceTarget, py::arg("name"));
  module.def("numerics_id", &NumericsId,
             "Returns the id of the current target's arithmetic: equal ids, "
             "equal bits.");
  module.def("numerics_version", [] { return kNumericsVersion; });
}

}  // namespace gkv
