#ifndef GEMMAKV_MODEL_WEIGHTS_PACKED_FILE_H_
#define GEMMAKV_MODEL_WEIGHTS_PACKED_FILE_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "base/mutex.h"
#include "base/rounding.h"
#include "base/thread_pool.h"
#include "gemmakv/tensor_type.h"
#include "io/mapped_file.h"
#include "io/part_file.h"

// A model's weights as the kernels read them, in a file that processes map
// (docs/internals/packed-format.md). A file is immutable. Its name and its
// header carry the fingerprint of the weights, so it cannot be taken for that
// of others.

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
  // The number of bytes that are written and hashed as one; the last piece may
  // be shorter.
  uint64_t piece_bytes = 0;
  uint64_t offset = 0;  // of the first byte in the file
  Hash128 sum;          // hash of the hashes of the pieces, in order

  uint64_t size_bytes() const;
  uint64_t num_pieces() const { return CeilDiv(size_bytes(), piece_bytes); }
};

// Returns the file name of the weights with this fingerprint, for this build's
// versions.
std::string PackedFileName(const Hash128& fingerprint);
// Returns the fingerprint that such a name has; nullopt for any other name.
std::optional<Hash128> FingerprintOf(std::string_view file_name);

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
  // An error is kept for Finish.
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
  static constexpr uint64_t kLargePage = uint64_t{2} << 20;

  // Writes zeros to the large pages of [offset, offset + size) that have none
  // yet. The system caches a write in pages no larger than the write, and
  // pieces are small, so zeros come before them, a large page at a time.
  // Decoding from large pages is 1.13 times as fast (1B shape). Returns 0 or an
  // errno value.
  int BeginPages(uint64_t offset, uint64_t size) noexcept;

  PartFile& file_;
  const Hash128 fingerprint_;
  std::vector<PackedTensor> tensors_;
  std::vector<std::vector<Hash128>> pieces_;  // [tensor][piece]
  uint64_t header_bytes_ = 0;
  uint64_t file_bytes_ = 0;
  std::vector<uint8_t> zeros_;
  std::vector<std::once_flag> begun_;  // of the file's large pages
  std::atomic<int> error_{0};
};

// An open packed file. The constructor checks its header. Check() checks a
// tensor, which is then known to be sound. Thread-safe.
class PackedFile {
 public:
  using Progress = std::function<void(size_t done, size_t total)>;

  struct Tensor : PackedTensor {
    explicit Tensor(PackedTensor tensor) : PackedTensor(std::move(tensor)) {}
    mutable std::atomic<bool> is_sound{false};  // once it has matched its sum
    mutable Mutex mutex{AtFork::kWaits};
    // The hashes of its first pieces, from CheckAhead.
    mutable std::vector<Hash128> ahead GUARDED_BY(mutex);
  };

  // Throws IoError (no such file, ...), and CorruptFile if this is no packed
  // file of these versions and this fingerprint, if it has another length than
  // it states, or if neither this user nor root owns it.
  PackedFile(const std::string& path, const Hash128& fingerprint);

  const std::string& path() const { return file_.path(); }
  size_t size_bytes() const { return file_.bytes().size(); }
  // nullptr if there is no such tensor.
  const Tensor* Find(std::string_view name) const;
  // Returns a tensor's bytes, 64-byte aligned and valid as long as this lives.
  const uint8_t* data(const PackedTensor& tensor) const {
    return file_.bytes().data() + tensor.offset;
  }

  // Compares a tensor with its sum, in parallel. Returns whether it is as it
  // was written.
  bool Check(const Tensor& tensor, ThreadPool& pool) const;
  // Does, for all tensors, as much of the work of Check as it can before
  // `deadline`, on this thread. Returns whether there is more to do. Tensors
  // that it finds damaged are left to Check.
  bool CheckAhead(std::chrono::steady_clock::time_point deadline) const;
  // Checks every tensor. Throws CorruptFile, which names one that is damaged.
  // `progress` counts bytes, and may throw.
  void CheckAll(ThreadPool& pool, const Progress& progress = {}) const;
  // Deletes a file of which a tensor in use is found damaged, so that the next
  // load of the model does not find it. Throws CorruptFile, which says so.
  [[noreturn]] void DeleteDamaged(const Tensor& tensor) const;
  // Whether DeleteDamaged is expected to be able to delete the file.
  bool CanDelete() const;

 private:
  void ReadHeader(const Hash128& fingerprint);
  Hash128 HashOf(const Tensor& tensor, size_t piece) const;
  void CheckOwner() const;
  [[noreturn]] void ThrowDamaged(const std::string& what) const;

  MappedFile file_;
  std::map<std::string, Tensor, std::less<>> tensors_;
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_WEIGHTS_PACKED_FILE_H_
