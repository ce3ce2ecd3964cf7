#ifndef GEMMAKV_IO_TENSOR_FILES_H_
#define GEMMAKV_IO_TENSOR_FILES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/aligned_buffer.h"
#include "gemmakv/tensor_source.h"
#include "io/mapped_file.h"

namespace gkv {

// How stored values become those that a model takes.
enum class TensorForm {
  kAsStored,
  kPlusOne,           // 1 + value as F32, of norm weights stored as offsets
  kIntegers,          // F32 of 64-bit integers, of which few are large
  kBlocksTransposed,  // blocks one below the other, each stored transposed
};

// One tensor in a file, row-major from `offset` on.
struct TensorPlace {
  std::string name;  // for Find()
  size_t file = 0;   // index into the files
  uint64_t offset = 0;
  TensorType type = TensorType::kF32;  // F32, F16 or BF16; kIntegers: F32
  size_t rows = 0;                     // as delivered
  size_t cols = 0;
  TensorForm form = TensorForm::kAsStored;
  // kBlocksTransposed: the number of blocks of [rows / blocks, cols], each
  // stored as [cols, rows / blocks]. kAsStored: the parts of the TensorView.
  size_t blocks = 1;
};

// Tensors at known places in memory-mapped files, such as the shards of a
// safetensors model, as a TensorSource. Tensors that are stored as they are
// needed are read in place. Other forms are made when they are asked for and
// kept until they are released. Not thread-safe.
class TensorFiles : public TensorSource {
 public:
  // `description` names the whole in messages. Throws IoError or CorruptFile
  // for a file that cannot be mapped, CorruptFile for a place that is not
  // inside its file, and InvalidArgument for a place that is impossible: its
  // type is no float, its form does not fit its shape, or its name comes twice.
  TensorFiles(std::string description, const std::vector<std::string>& paths,
              const std::vector<TensorPlace>& places);

  std::string Description() const override { return description_; }
  std::vector<std::string> Names() const override;  // as in `places`
  std::optional<TensorView> Find(std::string_view name) override;
  std::shared_ptr<const void> Hold(const TensorView& view) const override;
  void Release(const TensorView& view, size_t begin, size_t end) override;
  std::optional<Hash128> Identity() const override;
  bool Settle() const override;

 private:
  void Check(const TensorPlace& place) const;
  const uint8_t* DataOf(const TensorPlace& place) const;
  const uint8_t* Convert(const TensorPlace& place);

  std::string description_;
  std::vector<std::shared_ptr<const MappedFile>> files_;
  std::vector<TensorPlace> places_;
  std::map<std::string, size_t, std::less<>> index_;  // into places_
  std::map<std::string, AlignedBuffer<uint8_t>, std::less<>> converted_;
};

}  // namespace gkv

#endif  // GEMMAKV_IO_TENSOR_FILES_H_
