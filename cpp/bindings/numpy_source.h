#ifndef GEMMAKV_BINDINGS_NUMPY_SOURCE_H_
#define GEMMAKV_BINDINGS_NUMPY_SOURCE_H_

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/bindings.h"
#include "gemmakv/tensor_source.h"

namespace gkv {

// Weights from a Python mapping of tensor name to NumPy array: float32,
// float16, or bfloat16 (ml_dtypes) of one or two dimensions, three if it holds
// experts. An array is fetched when its tensor is loaded and dropped after
// that. Requires: the loading thread holds the interpreter's lock.
class __attribute__((visibility("hidden"))) NumpySource : public TensorSource {
 public:
  // Throws InvalidArgument if `mapping` has no keys() and no [].
  explicit NumpySource(py::object mapping);

  std::string Description() const override { return "tensors in memory"; }
  std::vector<std::string> Names() const override;
  std::optional<TensorView> Find(std::string_view name) override;
  void Release(const TensorView& view, size_t begin, size_t end) override;

 private:
  py::object mapping_;
  std::map<std::string, py::array, std::less<>> held_;
};

}  // namespace gkv

#endif  // GEMMAKV_BINDINGS_NUMPY_SOURCE_H_
