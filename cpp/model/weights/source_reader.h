#ifndef GEMMAKV_MODEL_WEIGHTS_SOURCE_READER_H_
#define GEMMAKV_MODEL_WEIGHTS_SOURCE_READER_H_

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/hash.h"
#include "base/rounding.h"
#include "base/thread_pool.h"
#include "gemmakv/config.h"
#include "gemmakv/tensor_source.h"
#include "model/weights/packed_file.h"
#include "model/weights/weight_table.h"
#include "model/weights/weights.h"

// Internal to model.

namespace gkv {

// Rows that one task reads while they are in cache, and one piece of a packed
// file. Part of the definition of the fingerprint. A whole number of groups.
inline constexpr size_t kSlabRows = 256;

// Of tables of rows, by name: the hashes of their slabs.
using TableHashes = std::map<std::string, std::vector<Hash128>>;

// How a source is read, and what becomes of its matrices.
struct ReadOptions {
  enum class Into { kNothing, kMemory, kFile };
  Into into = Into::kMemory;
  PackedFileWriter* writer = nullptr;  // of kFile
  std::optional<TensorType> quantize{};  // see KeptType
  // Of the same source, read before: tables of rows are not hashed again.
  const TableHashes* table_hashes = nullptr;
  // Counts bytes of the source, from `done` on up to `total`.
  LoadProgress progress{};
  size_t done = 0;
  size_t total = 0;
};

struct SourceContents {
  Weights weights;  // matrices have data with kMemory only
  std::vector<PackedTensor> tensors;  // what a packed file holds, in order
  TableHashes table_hashes;
};

// Reads all tensors of a model from a source once, in parallel, gives its bytes
// back behind itself, and takes the fingerprint of what it read.
// Throws CorruptFile for a tensor that is missing, or of the wrong shape or
// type; what KeptType throws, and what ThrowNotRepresentable does for a matrix
// that cannot be quantized; with kFile, IoError for a write that failed, and
// for other tensors than the writer's: the source has changed.
// Requires: config.Validate() passes.
SourceContents ReadSource(const ModelConfig& config, TensorSource& source,
                          ThreadPool& pool, const ReadOptions& options);

// The tensor of an entry; nullopt for a head that is not there, and where the
// source has another instead. Throws CorruptFile for one that is missing, or of
// the wrong shape or type, or beside the one that is instead.
std::optional<TensorView> FindTensor(const WeightEntry& entry,
                                     TensorSource& source);

// Lets the rows of an entry's table be read from where the source has it; from
// a copy if the source cannot hold it.
void OpenTable(const WeightEntry& entry, const TensorView& view,
               TensorSource& source);

// Bytes of these tensors of a source.
size_t SourceBytes(TensorSource& source, const std::vector<std::string>& names);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_WEIGHTS_SOURCE_READER_H_
