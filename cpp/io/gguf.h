#ifndef GEMMAKV_IO_GGUF_H_
#define GEMMAKV_IO_GGUF_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "gemmakv/tensor_source.h"
#include "io/mapped_file.h"

namespace gkv {

// A metadata array. Scalars of every width are widened. Strings are views into
// the file's bytes and are valid as long as the reader lives.
struct GgufArray {
  std::variant<std::vector<int64_t>, std::vector<double>,
               std::vector<std::string_view>>
      values;
};

using GgufValue =
    std::variant<bool, uint64_t, int64_t, double, std::string_view, GgufArray>;

// Reads GGUF files, versions 2 and 3, little-endian, as a TensorSource.
//
// The constructor maps the file and validates its whole header. It checks every
// count, length and offset against the bytes that are left before it uses them.
// After it the bytes of every metadata value, and of every tensor of a known
// type, lie inside the mapping, so no file can make a later call read outside.
// Metadata values stay undecoded (Entry) until they are asked for. Const
// methods are safe from several threads.
//
// Files that say the same in different ways look alike:
// - A stack of matrices (altup_proj.weight, of three dimensions) is listed and
//   found matrix by matrix, as altup_proj.0.weight and so on.
// - Tensors for which some of Ollama's files have names of their own have those
//   of the format: dense.0.weight, dense.1.weight and norm.weight of
//   EmbeddingGemma are dense_2, dense_3 and output_norm, and a layer's
//   ffn_gate_inp.per_expert_scale is ffn_down_exps.scale.
// - A split file (x-00001-of-00003.gguf, metadata split.count) is read as one,
//   by the path of its first part, which has the metadata. The reader of the
//   first part owns the readers of the others and lists the tensors of all.
class GgufFile : public TensorSource {
 public:
  // Throws IoError, which names all parts that are missing, or CorruptFile,
  // which names the offset, what was found there and what was expected.
  explicit GgufFile(const std::string& path);
  // Reads a file that is in memory already, without the other parts of a split
  // one. `bytes` must outlive the reader; `path` is its name in messages.
  GgufFile(std::span<const uint8_t> bytes, std::string path);

  uint32_t version() const { return version_; }
  const std::string& path() const { return path_; }
  size_t file_bytes() const { return bytes_.size(); }

  // Metadata. Each of these returns nullopt if the key is absent, and throws
  // CorruptFile with the key if the value has another type (a string where a
  // number is asked for). Integers of any width and sign are converted if the
  // value fits, and are a CorruptFile if not. An array of bools reads as
  // integers.
  bool Has(std::string_view key) const;
  std::vector<std::string> Keys() const;  // in file order
  std::optional<uint64_t> GetUint(std::string_view key) const;
  std::optional<double> GetFloat(std::string_view key) const;
  std::optional<bool> GetBool(std::string_view key) const;
  std::optional<std::string_view> GetString(std::string_view key) const;
  std::optional<std::vector<std::string_view>> GetStrings(
      std::string_view key) const;
  std::optional<std::vector<double>> GetFloats(std::string_view key) const;
  std::optional<std::vector<int64_t>> GetInts(std::string_view key) const;
  // Returns a value of any type.
  std::optional<GgufValue> Get(std::string_view key) const;

  // TensorSource.
  std::string Description() const override { return path(); }
  std::vector<std::string> Names() const override;  // in file order
  // Throws CorruptFile if the tensor's type is not supported, or if it has more
  // dimensions than its name allows (see HoldsExperts).
  std::optional<TensorView> Find(std::string_view name) override;
  std::shared_ptr<const void> Hold(const TensorView& view) const override;
  void Release(const TensorView& view, size_t begin, size_t end) override;
  std::optional<Hash128> Identity() const override;
  bool Settle() const override;

  // For `gemmakv info`: every tensor of the file, supported or not.
  struct TensorInfo {
    std::string name;
    uint32_t type_id;
    std::vector<uint64_t> shape;  // as in the file: fastest dimension first
    uint64_t offset;              // of the first byte in the file
    uint64_t size_bytes;          // 0 if the type is not supported
    size_t part = 0;              // of a split file, from 0 on
  };
  const std::vector<TensorInfo>& tensors() const { return tensors_; }

 private:
  struct Entry {  // one metadata value, not yet decoded
    uint32_t type;
    uint32_t array_type;
    uint64_t count;
    size_t offset;  // of the first value byte
  };
  void ReadHeader();
  // Reads part `number` (from 1 on) of a split file, for the `parts_` of the
  // first one.
  GgufFile(const std::string& path, uint64_t number, uint64_t count);
  void ReadParts();
  void AddPart(std::unique_ptr<GgufFile> part);
  const GgufFile& PartOf(const TensorInfo& tensor) const {
    return tensor.part == 0 ? *this : *parts_[tensor.part - 1];
  }
  void ReadMetadata(size_t offset, uint64_t count);
  void ReadTensors(uint64_t count);
  void UniteNames();
  std::string PlaceTensor(TensorInfo& tensor, uint64_t data,
                          uint64_t alignment) const;
  // Where the bytes of a tensor, or of one matrix of a stack, begin.
  struct Place {
    const TensorInfo* tensor;
    uint64_t begin;  // counted from the tensor's first byte
  };
  std::optional<Place> FindPlace(std::string_view name) const;
  const Entry* FindEntry(std::string_view key) const;
  std::optional<GgufValue> GetScalar(std::string_view key,
                                     const char* expected) const;
  GgufArray DecodeArray(std::string_view key, const Entry& entry) const;
  template <typename T>
  std::optional<std::vector<T>> GetArray(std::string_view key,
                                         const char* expected) const;
  [[noreturn]] void WrongValue(std::string_view key, const Entry& entry,
                               const std::string& found,
                               const char* expected) const;
  [[noreturn]] void WrongType(std::string_view key, const Entry& entry,
                              const char* expected) const;

  std::string path_;
  std::shared_ptr<const MappedFile> file_;  // null if the file is in memory
  std::span<const uint8_t> bytes_;  // the whole file
  uint32_t version_ = 0;
  size_t tensors_offset_ = 0;  // of the tensor descriptions
  std::vector<std::string> key_order_;
  std::map<std::string, Entry, std::less<>> metadata_;
  std::vector<TensorInfo> tensors_;
  std::map<std::string, size_t, std::less<>> tensor_index_;
  std::vector<std::unique_ptr<GgufFile>> parts_;  // all but the first
};

}  // namespace gkv

#endif  // GEMMAKV_IO_GGUF_H_
