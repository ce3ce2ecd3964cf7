#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/bindings.h"
#include "padded/padded_cache.h"

namespace gkv {
namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

std::string ShapeOf(const py::array& array) {
  std::string text = "[";
  for (py::ssize_t i = 0; i < array.ndim(); ++i) {
    text += StrCat(i ? ", " : "", array.shape(i));
  }
  return text + "]";
}

// Throws InvalidArgument unless the array has the expected shape, where -1
// stands for any size.
void CheckShape(const char* name, const py::array& array,
                const std::vector<py::ssize_t>& expected, const char* layout) {
  bool good = array.ndim() == static_cast<py::ssize_t>(expected.size());
  for (size_t i = 0; good && i < expected.size(); ++i) {
    good = expected[i] < 0 ||
           array.shape(static_cast<py::ssize_t>(i)) == expected[i];
  }
  if (good) return;
  std::string sizes;
  for (const py::ssize_t size : expected) {
    sizes += sizes.empty() ? "" : ", ";
    sizes += size < 0 ? std::string("any") : std::to_string(size);
  }
  throw InvalidArgument(Unexpected(name, StrCat(layout, " = [", sizes, "]"),
                                   StrCat("shape ", ShapeOf(array))));
}

void Append(PaddedCache& cache, const Floats& k, const Floats& v,
            const std::vector<size_t>& pads) {
  const PaddedShape& shape = cache.shape();
  const auto batch = static_cast<py::ssize_t>(shape.batch);
  const auto kv_heads = static_cast<py::ssize_t>(shape.kv_heads);
  const auto head_dim = static_cast<py::ssize_t>(shape.head_dim);
  constexpr char kLayout[] = "[batch, seq, kv_heads, head_dim]";
  CheckShape("k", k, {batch, -1, kv_heads, head_dim}, kLayout);
  CheckShape("v", v, {batch, k.shape(1), kv_heads, head_dim}, kLayout);
  const auto columns = static_cast<size_t>(k.shape(1));
  if (!pads.empty() && pads.size() != shape.batch) {
    throw InvalidArgument(Unexpected(
        "pads", StrCat("one per row, ", shape.batch), pads.size()));
  }
  for (const size_t pad : pads) {
    if (pad > columns) {
      throw InvalidArgument(
          Unexpected("pads", StrCat("at most seq, ", columns), pad));
    }
  }
  const float* keys = k.data();
  const float* values = v.data();
  const GilReleased no_gil;
  cache.Append(keys, values, columns, pads);
}

py::array_t<float> CopyOf(const PaddedCache& cache, bool values) {
  PaddedCache::Slots slots =
      WithoutGil([&] { return values ? cache.Values() : cache.Keys(); });
  const PaddedShape& shape = cache.shape();
  return ArrayOf(std::move(slots.data), {shape.batch, slots.slots,
                                         shape.kv_heads, shape.head_dim});
}

py::array_t<uint8_t> CausalMask(const PaddedCache& cache, size_t q_len) {
  PaddedCache::Mask mask = WithoutGil([&] { return cache.CausalMask(q_len); });
  return ArrayOf(std::move(mask.data),
                 {cache.shape().batch, q_len, mask.slots});
}

py::array_t<float> Attend(const PaddedCache& cache, const Floats& q,
                          float scale, float soft_cap) {
  CheckShape("q", q,
             {static_cast<py::ssize_t>(cache.shape().batch), -1, -1,
              static_cast<py::ssize_t>(cache.shape().head_dim)},
             "[batch, q_len, heads, head_dim]");
  py::array_t<float> out({q.shape(0), q.shape(1), q.shape(2), q.shape(3)});
  const PaddedCache::Query query{q.data(), static_cast<size_t>(q.shape(1)),
                                 static_cast<size_t>(q.shape(2)), scale,
                                 soft_cap};
  float* to = out.mutable_data();
  WithoutGil([&] { cache.Attend(query, to); });
  return out;
}

// Returns int64 [batch].
py::array_t<int64_t> CountsOf(const std::vector<size_t>& counts) {
  return ArrayOf(std::vector<int64_t>(counts.begin(), counts.end()),
                 {counts.size()});
}

}  // namespace

void RegisterPaddedCache(py::module_& module) {
  py::class_<PaddedCache>(module, "PaddedCache")
      .def(py::init([](size_t batch, size_t capacity, size_t window,
                       size_t kv_heads, size_t head_dim,
                       const std::string& dtype) {
             return std::make_unique<PaddedCache>(
                 PaddedShape{batch, capacity, window, kv_heads, head_dim,
                             DtypeFromName(dtype)});
           }),
           py::arg("batch"), py::arg("capacity"), py::arg("window"),
           py::arg("kv_heads"), py::arg("head_dim"), py::arg("dtype"))
      .def_property_readonly(
          "lengths",
          [](const PaddedCache& cache) { return CountsOf(cache.lengths()); })
      .def_property_readonly(
          "positions",
          [](const PaddedCache& cache) { return CountsOf(cache.positions()); })
      .def_property_readonly("nbytes", &PaddedCache::nbytes)
      .def("append", &Append, py::arg("k"), py::arg("v"), py::arg("pads"))
      .def("reset", &PaddedCache::Reset,
           py::call_guard<GilReleased>())
      .def("copy", &CopyOf, py::arg("values"))
      .def("causal_mask", &CausalMask, py::arg("q_len"))
      .def("attend", &Attend, py::arg("q"), py::arg("scale"),
           py::arg("soft_cap"));
}

}  // namespace gkv
