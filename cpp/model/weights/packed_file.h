#ifndef GEMMAKV_MODEL_WEIGHTS_PACKED_FILE_H_
#define GEMMAKV_MODEL_WEIGHTS_PACKED_FILE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/hash.h"
#include "base/thread_pool.h"
#include "gemmakv/tensor_type.h"
#include "io/mapped_file.h"
#include "io/part_file.h"

// A model's weights as the kernels read them, in a file that processes map:
// docs/packed-format.md. A file is immutable; its name and its header carry the
// fingerprint of the weights, so that it cannot be taken for that of others.

namespace gkv {

inline constexpr uint32_t kPackedFileVersion = 1;

// A tensor of a packed file: a matrix in the layout of ops/matmul.h, or a
// vector of floats (type kF32, rows 1).
struct PackedTensor {
  std::string name;
  TensorType type = TensorType::kF32;
  bool is_vector = false;
  uint64_t rows = 0;
  uint64_t cols = 0;
  // Bytes that are written and hashed as one; the last piece may be shorter.
  uint64_t piece_bytes = 0;
  uint64_t offset = 0;  // of the first byte in the file
  Hash128 sum;          // hash of the hashes of the pieces, in order

  uint64_t size_bytes() const;
  uint64_t num_pieces() const {
    return (size_bytes() + piece_bytes - 1) / piece_bytes;
  }
};

// File name of the weights with this fingerprint, of this build's versions.
std::string PackedFileName(const Hash128& fingerprint);

// Fills a part file.
class PackedFileWriter {
 public:
  // Takes name, type, is_vector, rows, cols and piece_bytes of `tensors`, in
  // the order of the file. Throws IoError if there is no space.
  PackedFileWriter(PartFile& file, const Hash128& fingerprint,
                   std::vector<PackedTensor> tensors);
  PackedFileWriter(const PackedFileWriter&) = delete;

  const std::vector<PackedTensor>& tensors() const { return tensors_; }
  // Writes one piece of tensors()[tensor]. Thread-safe for different pieces.
  // What goes wrong is kept for Finish.
  void WritePiece(size_t tensor, size_t piece,
                  std::span<const uint8_t> bytes) noexcept;
  // Whether a write has failed: the rest may be skipped.
  bool failed() const { return error_.load() != 0; }
  // Throws IoError for the first failure, if there was one.
  void ThrowIfFailed() const;
  // Writes the header. Throws IoError for the first failure of all writes.
  // Requires: every piece was written.
  void Finish();

 private:
  PartFile& file_;
  const Hash128 fingerprint_;
  std::vector<PackedTensor> tensors_;
  std::vector<std::vector<Hash128>> pieces_;  // [tensor][piece]
  uint64_t header_bytes_ = 0;
  uint64_t file_bytes_ = 0;
  std::atomic<int> error_{0};
};

// A packed file, open and checked to the last byte.
class PackedFile {
 public:
  using Progress = std::function<void(size_t done, size_t total)>;

  // Throws IoError (no such file, ...) and CorruptFile: not a packed file of
  // these versions and this fingerprint, damaged, or owned by another user.
  // `progress` counts bytes.
  PackedFile(const std::string& path, const Hash128& fingerprint,
             ThreadPool& pool, const Progress& progress = {});

  const std::string& path() const { return file_.path(); }
  size_t size_bytes() const { return file_.bytes().size(); }
  // nullptr if there is no such tensor.
  const PackedTensor* Find(std::string_view name) const;
  // 64-byte aligned; valid as long as this lives.
  const uint8_t* data(const PackedTensor& tensor) const {
    return file_.bytes().data() + tensor.offset;
  }

 private:
  void ReadHeader(const Hash128& fingerprint);
  void CheckOwner() const;
  void CheckSums(ThreadPool& pool, const Progress& progress) const;
  [[noreturn]] void Damaged(const std::string& what) const;

  MappedFile file_;
  std::map<std::string, PackedTensor, std::less<>> tensors_;
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_WEIGHTS_PACKED_FILE_H_
