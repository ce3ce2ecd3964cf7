#include <pybind11/stl.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/error.h"
#include "bindings/bindings.h"
#include "cache/snapshot.h"
#include "cache/snapshot_check.h"
#include "model/create_conversation.h"

namespace gkv {
namespace {

constexpr const char* kDtypeNames[] = {"f32", "bf16", "int8"};

const KvLayerSpec& LayerOf(const Conversation& cache, size_t layer) {
  const std::vector<KvLayerSpec>& layers = cache.layout().layers();
  CheckRange<py::index_error>(layer, 0, layers.size() - 1, "layer");
  return layers[layer];
}

// Makes a method of the cache that takes a layer.
template <typename Fn>
auto ByLayer(Fn fn) {
  return [fn](const Conversation& cache, size_t layer) {
    return fn(LayerOf(cache, layer), cache, layer);
  };
}

py::array_t<float> LayerArray(const Conversation& cache, size_t layer,
                              bool values) {
  const KvLayerSpec& spec = LayerOf(cache, layer);
  if (spec.kind == LayerKind::kRecurrent) return ArrayOf<float>({}, {0, 0, 0});
  std::vector<float> copy =
      WithoutGil([&] { return cache.CopyLayer(layer, values); });
  const size_t tokens = copy.size() / (spec.kv_heads * spec.head_dim);
  return ArrayOf(std::move(copy), {tokens, spec.kv_heads, spec.head_dim});
}

py::array_t<float> LayerState(const Conversation& cache, size_t layer) {
  const KvLayerSpec& spec = LayerOf(cache, layer);
  if (spec.kind != LayerKind::kRecurrent) return ArrayOf<float>({}, {0, 0});
  return ArrayOf(cache.CopyLayerState(layer),
                 {1 + spec.conv_tail, spec.lru_width});
}

// The bytes of any object with a contiguous buffer, while this is alive.
class BufferBytes {
 public:
  explicit BufferBytes(const py::handle& object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) {
      throw py::error_already_set();
    }
  }
  ~BufferBytes() { PyBuffer_Release(&view_); }
  BufferBytes(const BufferBytes&) = delete;

  std::span<const uint8_t> bytes() const {
    return {static_cast<const uint8_t*>(view_.buf),
            static_cast<size_t>(view_.len)};
  }

 private:
  Py_buffer view_;
};

std::shared_ptr<Conversation> FromBytes(
    const py::buffer& data, const std::optional<std::string>& expected,
    std::shared_ptr<BlockPool> pool) {
  const BufferBytes buffer(data);
  std::shared_ptr<Conversation> cache = WithoutGil([&] {
    return Conversation::FromBytes(buffer.bytes(), {.pool = std::move(pool)});
  });
  const Hash128 found = cache->fingerprint();
  if (expected && found != Hash128{} && found.Hex() != *expected) {
    throw OtherFingerprint("the snapshot holds keys and values", found.Hex(),
                           *expected);
  }
  return cache;
}

py::bytes ToBytes(const Conversation& cache, bool checkpoints) {
  const SnapshotWriter writer(cache, checkpoints);
  auto bytes = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(
      nullptr, static_cast<py::ssize_t>(writer.size_bytes())));
  if (!bytes) throw py::error_already_set();
  char* to = PyBytes_AS_STRING(bytes.ptr());
  const GilReleased no_gil;
  writer.Write([&](std::span<const uint8_t> piece) {
    to = std::copy(piece.begin(), piece.end(), to);
  });
  return bytes;
}

void Save(const Conversation& cache, const py::function& write,
          bool checkpoints) {
  const GilReleased no_gil;
  cache.Save(
      [&](std::span<const uint8_t> piece) {
        WithGil([&] { CallPython(write, BytesOf(piece)); });
      },
      checkpoints);
}

void RegisterPool(py::module_& module) {
  py::class_<BlockPool, std::shared_ptr<BlockPool>>(module, "BlockPool")
      .def(py::init(&BlockPool::Create), py::arg("bytes") = 0)
      .def_property_readonly("bytes", &BlockPool::budget_bytes)
      .def_property_readonly("used_bytes", &BlockPool::bytes_in_use)
      .def_property_readonly("blocks_in_use", &BlockPool::blocks_in_use);
}

}  // namespace

KvDtype DtypeFromName(const std::string& name) {
  return EnumFromName<KvDtype>(kDtypeNames, "kv_dtype", name);
}

const char* NameOf(KvDtype dtype) {
  return kDtypeNames[static_cast<size_t>(dtype)];
}

void RegisterCache(py::module_& module) {
  RegisterPool(module);
  py::class_<Truncation>(module, "Truncation",
                         "The cost of `KVCache.truncate` at the next use.")
      .def_readonly("replay_tokens", &Truncation::replay_tokens,
                    "The number of tokens that the next use computes again.")
      .def("__repr__", [](const Truncation& t) {
        return StrCat("Truncation(replay_tokens=", t.replay_tokens, ")");
      });

  py::class_<Conversation, std::shared_ptr<Conversation>>(module, "KVCache")
      .def("__len__", &Conversation::length)
      .def_property_readonly("capacity_tokens", &Conversation::capacity_tokens)
      .def_property_readonly("nbytes", &Conversation::nbytes)
      .def_property_readonly("shared_nbytes", &Conversation::shared_nbytes)
      .def_property_readonly("mapped_nbytes", &Conversation::mapped_nbytes)
      .def_property_readonly(
          "model_type",
          [](const Conversation& cache) -> std::optional<std::string> {
            if (cache.model_type().empty()) return std::nullopt;
            return cache.model_type();
          })
      .def_property_readonly(
          "fingerprint",
          [](const Conversation& cache) -> std::optional<std::string> {
            const Hash128 fingerprint = cache.fingerprint();
            if (fingerprint == Hash128{}) return std::nullopt;
            return fingerprint.Hex();
          })
      .def_property_readonly("kv_dtype",
                             [](const Conversation& cache) {
                               return NameOf(cache.layout().dtype());
                             })
      .def_property_readonly("num_layers",
                             [](const Conversation& cache) {
                               return cache.layout().layers().size();
                             })
      .def_property_readonly("tokens",
                             [](const Conversation& cache) {
                               std::vector<int32_t> tokens = cache.tokens();
                               const size_t count = tokens.size();
                               return ArrayOf(std::move(tokens), {count});
                             })
      .def("fork",
           [](const Conversation& cache) {
             return std::shared_ptr<Conversation>(cache.Fork());
           })
      .def(
          "append",
          [](Conversation& cache, const TokenArray& tokens) {
            const std::span<const int32_t> ids(
                tokens.data(), static_cast<size_t>(tokens.size()));
            const GilReleased no_gil;
            cache.Append(cache.Lock(&CheckSignals), ids);
          },
          py::arg("tokens"), "Appends tokens, which the next use computes.")
      .def(
          "truncate",
          [](Conversation& cache, size_t n) {
            return cache.Truncate(cache.Lock(&CheckSignals), n);
          },
          py::arg("n"), py::call_guard<GilReleased>())
      .def(
          "reset",
          [](Conversation& cache) { cache.Reset(cache.Lock(&CheckSignals)); },
          py::call_guard<GilReleased>())
      .def(
          "checkpoint",
          [](Conversation& cache) {
            return cache.MakeCheckpoint(cache.Lock(&CheckSignals));
          },
          py::call_guard<GilReleased>())
      .def_property_readonly("checkpoints", &Conversation::CheckpointLengths)
      .def_property_readonly("checkpoint_bytes",
                             &Conversation::checkpoint_bytes)
      .def_property("for_one_request", &Conversation::for_one_request,
                    &Conversation::set_for_one_request)
      .def("to_bytes", &ToBytes, py::arg("checkpoints") = false)
      .def("save", &Save, py::arg("write"), py::arg("checkpoints") = false)
      .def_static("from_bytes", &FromBytes, py::arg("data"),
                  py::arg("fingerprint") = py::none(),
                  py::arg("pool") = py::none())
      .def(
          "fits",
          [](const Conversation& cache, const ModelConfig& config) {
            const KvLayout& layout = cache.layout();
            return layout.hash() ==
                   config.MakeKvLayout(layout.dtype(), layout.block_tokens())
                       ->hash();
          },
          py::arg("config"),
          "Returns whether a model of this shape can use the cache.")
      .def("layer_kind",
           ByLayer([](const KvLayerSpec& spec, const Conversation&, size_t) {
             return NameOf(spec.kind);
           }),
           py::arg("layer"))
      .def("layer_shape",
           ByLayer([](const KvLayerSpec& spec, const Conversation&, size_t) {
             return std::pair(spec.kv_heads, spec.head_dim);
           }),
           py::arg("layer"))
      .def("layer_window",
           ByLayer([](const KvLayerSpec& spec, const Conversation&, size_t) {
             return spec.window;
           }),
           py::arg("layer"))
      .def("layer_nbytes",
           ByLayer([](const KvLayerSpec&, const Conversation& cache,
                      size_t layer) { return cache.LayerBytes(layer); }),
           py::arg("layer"))
      .def("held_range",
           ByLayer([](const KvLayerSpec&, const Conversation& cache,
                      size_t layer) { return cache.HeldRange(layer); }),
           py::arg("layer"))
      .def("layer_array", &LayerArray, py::arg("layer"), py::arg("values"))
      .def("layer_state", &LayerState, py::arg("layer"));

  module.def(
      "check_snapshot",
      [](const py::bytes& data) {
        const std::string_view view = data;
        const SnapshotCheck check =
            WithoutGil([&] { return CheckSnapshot(AsBytes(view)); });
        py::list sections;
        for (const SnapshotSection& section : check.sections) {
          sections.append(py::make_tuple(section.name, section.offset,
                                         section.size_bytes, section.problem));
        }
        return py::make_tuple(check.version, sections);
      },
      py::arg("data"),
      "Returns the format version, and (name, offset, bytes, problem) of each "
      "section.");

  module.def(
      "create_kv_cache",
      [](const ModelConfig& config, size_t capacity_tokens,
         const std::string& kv_dtype, size_t block_tokens,
         std::optional<size_t> checkpoint_bytes,
         std::shared_ptr<BlockPool> pool) {
        CacheOptions options;
        options.capacity_tokens = capacity_tokens;
        options.kv_dtype = DtypeFromName(kv_dtype);
        options.block_tokens = block_tokens;
        options.checkpoint_bytes = checkpoint_bytes;
        options.pool = std::move(pool);
        return CreateConversation(config, options);
      },
      py::arg("config"), py::arg("capacity_tokens") = 0,
      py::arg("kv_dtype") = "bf16", py::arg("block_tokens") = 64,
      py::arg("checkpoint_bytes") = py::none(), py::arg("pool") = py::none());
}

}  // namespace gkv
