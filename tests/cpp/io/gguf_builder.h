#ifndef GEMMAKV_TESTS_CPP_IO_GGUF_BUILDER_H_
#define GEMMAKV_TESTS_CPP_IO_GGUF_BUILDER_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "gemmakv/tensor_type.h"
#include "io/byte_io.h"
#include "io/gguf_value_type.h"
#include "io/temp_file.h"  // IWYU pragma: export

namespace gkv {

// Small GGUF files for tests, in memory or on disk:
//
//   GgufBuilder builder;
//   builder.Set("general.architecture", "gemma3")
//       .Set("gemma3.block_count", uint32_t{2})
//       .Set("tokenizer.ggml.tokens", std::vector<std::string>{"<pad>", "a"})
//       .AddF32("output_norm.weight", 1, 4, {1, 1, 1, 1})
//       .AddTensor("token_embd.weight", TensorType::kQ8_0, 2, 32, bytes);
//   const std::vector<uint8_t> file = builder.Build();
//   GgufFile gguf(file, "in memory");          // `file` must outlive it
//   TempFile on_disk(file);                    // removed at end of scope
//   GgufFile same(on_disk.path());
//
// The type of a metadata value is that of the C++ value (an int is an INT32).
// Nothing is checked: a test that needs a broken file says so with AddRaw, or
// changes the bytes with Patch at an offset from OffsetAfter.
class GgufBuilder {
 public:
  GgufBuilder& Version(uint32_t version) {
    version_ = version;
    return *this;
  }
  // Also writes the key general.alignment.
  GgufBuilder& Alignment(uint32_t alignment) {
    alignment_ = alignment;
    return Set("general.alignment", alignment);
  }

  template <typename T>
  requires std::is_arithmetic_v<T> GgufBuilder& Set(std::string_view key,
                                                    T value) {
    BeginEntry(key, TypeOf<T>());
    WriteScalar(metadata_, value);
    return *this;
  }
  GgufBuilder& Set(std::string_view key, std::string_view value) {
    BeginEntry(key, kGgufString);
    WriteString(metadata_, value);
    return *this;
  }
  template <typename T>
  requires std::is_arithmetic_v<T> GgufBuilder& Set(
      std::string_view key, const std::vector<T>& values) {
    BeginArray(key, TypeOf<T>(), values.size());
    for (const T value : values) WriteScalar(metadata_, value);
    return *this;
  }
  GgufBuilder& Set(std::string_view key,
                   const std::vector<std::string>& values) {
    BeginArray(key, kGgufString, values.size());
    for (const std::string& value : values) WriteString(metadata_, value);
    return *this;
  }
  // An entry of any type id and any bytes.
  GgufBuilder& SetRaw(std::string_view key, uint32_t type,
                      std::span<const uint8_t> value) {
    BeginEntry(key, type);
    metadata_.WriteBytes(value);
    return *this;
  }

  // `bytes`: [rows * RowBytes(type, cols)]. A vector has one row.
  GgufBuilder& AddTensor(std::string_view name, TensorType type, size_t rows,
                         size_t cols, std::span<const uint8_t> bytes) {
    std::vector<uint64_t> shape{cols};
    if (rows != 1) shape.push_back(rows);
    return AddRaw(name, static_cast<uint32_t>(type), shape, bytes);
  }
  // `values`: [rows * cols], row-major.
  GgufBuilder& AddF32(std::string_view name, size_t rows, size_t cols,
                      const std::vector<float>& values) {
    return AddTensor(name, TensorType::kF32, rows, cols,
                     {reinterpret_cast<const uint8_t*>(values.data()),
                      values.size() * sizeof(float)});
  }
  // Any type id, any shape (fastest dimension first), any number of bytes.
  GgufBuilder& AddRaw(std::string_view name, uint32_t type_id,
                      const std::vector<uint64_t>& shape,
                      std::span<const uint8_t> bytes) {
    tensors_.push_back({std::string(name), type_id, shape,
                        std::vector<uint8_t>(bytes.begin(), bytes.end())});
    return *this;
  }

  std::vector<uint8_t> Build() const {
    ByteWriter file;
    file.Write(uint32_t{0x46554747});
    file.Write(version_);
    file.Write(uint64_t{tensors_.size()});
    file.Write(num_entries_);
    ByteWriter metadata = metadata_;
    file.WriteBytes(metadata.bytes());
    uint64_t offset = 0;
    for (const Tensor& tensor : tensors_) {
      WriteString(file, tensor.name);
      file.Write(static_cast<uint32_t>(tensor.shape.size()));
      for (const uint64_t size : tensor.shape) file.Write(size);
      file.Write(tensor.type_id);
      file.Write(offset);
      offset += Padded(tensor.bytes.size());
    }
    for (const Tensor& tensor : tensors_) {
      file.bytes().resize(Padded(file.size()));
      file.WriteBytes(tensor.bytes);
    }
    return file.bytes();
  }

 private:
  struct Tensor {
    std::string name;
    uint32_t type_id;
    std::vector<uint64_t> shape;
    std::vector<uint8_t> bytes;
  };

  template <typename T>
  static constexpr uint32_t TypeOf() {
    if constexpr (std::is_same_v<T, bool>) return kGgufBool;
    if constexpr (std::is_same_v<T, float>) return kGgufFloat32;
    if constexpr (std::is_same_v<T, double>) return kGgufFloat64;
    constexpr bool kSigned = std::is_signed_v<T>;
    switch (sizeof(T)) {
      case 1:
        return kSigned ? kGgufInt8 : kGgufUint8;
      case 2:
        return kSigned ? kGgufInt16 : kGgufUint16;
      case 4:
        return kSigned ? kGgufInt32 : kGgufUint32;
      default:
        return kSigned ? kGgufInt64 : kGgufUint64;
    }
  }

  static void WriteString(ByteWriter& to, std::string_view text) {
    to.Write(uint64_t{text.size()});
    to.WriteBytes({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  }
  template <typename T>
  static void WriteScalar(ByteWriter& to, T value) {
    to.Write(value);
  }
  void BeginEntry(std::string_view key, uint32_t type) {
    WriteString(metadata_, key);
    metadata_.Write(type);
    ++num_entries_;
  }
  void BeginArray(std::string_view key, uint32_t type, uint64_t count) {
    BeginEntry(key, kGgufArray);
    metadata_.Write(type);
    metadata_.Write(count);
  }
  size_t Padded(size_t size) const {
    return (size + alignment_ - 1) / alignment_ * alignment_;
  }

  uint32_t version_ = 3;
  uint32_t alignment_ = 32;
  uint64_t num_entries_ = 0;
  ByteWriter metadata_;
  std::vector<Tensor> tensors_;
};

// Overwrites the bytes at `offset` with those of `value`.
template <typename T>
void Patch(std::vector<uint8_t>& bytes, size_t offset, T value) {
  if (offset + sizeof(T) > bytes.size()) throw std::out_of_range("Patch");
  std::memcpy(&bytes[offset], &value, sizeof(T));
}

// Offset of the first byte after the first occurrence of `text`: after a key
// stand u32 type and value, after a tensor's name u32 dimensions, u64 sizes,
// u32 type, u64 offset. The u64 length of `text` stands text.size() + 8 before.
inline size_t OffsetAfter(const std::vector<uint8_t>& bytes,
                          std::string_view text) {
  const auto at =
      std::search(bytes.begin(), bytes.end(), text.begin(), text.end());
  if (at == bytes.end()) throw std::out_of_range("OffsetAfter");
  return static_cast<size_t>(at - bytes.begin()) + text.size();
}

}  // namespace gkv

#endif  // GEMMAKV_TESTS_CPP_IO_GGUF_BUILDER_H_
