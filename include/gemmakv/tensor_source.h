#ifndef GEMMAKV_TENSOR_SOURCE_H_
#define GEMMAKV_TENSOR_SOURCE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gemmakv/hash.h"
#include "gemmakv/tensor_type.h"

namespace gkv {

// One stored tensor: a matrix of `rows` x `cols` values, row-major; rows are
// whole blocks, back to back. A vector has rows == 1. A tensor of three
// dimensions is that many `parts` of equal shape, one below the other; `rows`
// counts the rows of all.
struct TensorView {
  std::string name;
  TensorType type = TensorType::kF32;
  size_t rows = 0;
  size_t cols = 0;
  const uint8_t* data = nullptr;  // [rows * RowBytes(type, cols)], unaligned
  size_t parts = 1;

  size_t size_bytes() const { return rows * RowBytes(type, cols); }
};

// Whether a tensor of this name holds a matrix for each expert: it has three
// dimensions, any other has one or two.
inline bool HoldsExperts(std::string_view name) {
  return name.ends_with("_exps.weight");
}

// The source of weights: a file, arrays in memory, a network store. Names are
// those of the GGUF convention ("blk.0.attn_q.weight"); norm weights are stored
// with the model's "+ 1" already added, as in that convention. The data of a
// view stays valid until the end of the tensor is released, or else as long as
// the source lives.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  // Returns the source's name for error messages: a path, or "tensors in
  // memory".
  virtual std::string Description() const = 0;
  virtual std::vector<std::string> Names() const = 0;
  // Returns nullopt if there is no such tensor. Throws CorruptFile or
  // InvalidArgument if there is one that cannot be represented.
  virtual std::optional<TensorView> Find(std::string_view name) = 0;
  // Identifies the bytes of all tensors without reading them. If Settle() was
  // true before the source was read, another source of the same identity has
  // the same bytes. nullopt: only reading tells.
  virtual std::optional<Hash128> Identity() const { return std::nullopt; }
  // Whether no byte can change from now on without changing the identity.
  virtual bool Settle() const { return false; }
  // Returns what keeps the bytes of a view readable after its end was released
  // and the source is gone, such as a file's mapping. nullptr: nothing does,
  // and a caller that needs them copies them.
  virtual std::shared_ptr<const void> Hold(const TensorView& view) const {
    (void)view;
    return nullptr;
  }
  // Hint: bytes [begin, end) of the tensor will not be read again.
  virtual void Release(const TensorView& view, size_t begin, size_t end) {
    (void)view, (void)begin, (void)end;
  }
};

}  // namespace gkv

#endif  // GEMMAKV_TENSOR_SOURCE_H_
