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

// The number of rows that one task reads while they are in cache, and that are
// one piece of a packed file. Part of the definition of the fingerprint. A
// whole number of groups.
inline constexpr size_t kSlabRows = 256;

// The hashes of the slabs of tables of rows, by the table's name.
using TableHashes = std::map<std::string, std::vector<Hash128>>;

// How a source is read, and where its matrices go.
struct ReadOptions {
  enum class Into { kNothing, kMemory, kFile };
  Into into = Into::kMemory;
  PackedFileWriter* writer = nullptr;  // for kFile
  std::optional<TensorType> quantize{};  // see KeptType
  // Those of an earlier reading of the same source; null: tables are hashed.
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

// Reads all tensors of a model from a source once, in parallel, releases bytes
// after it has read them, and takes the fingerprint of all. Throws CorruptFile
// for a tensor that is missing or has the wrong shape or type, what KeptType
// throws, and what ThrowNotRepresentable throws for a matrix that cannot be
// quantized. With kFile, throws IoError for a write that failed, and if the
// tensors are not the writer's because the source has changed. Requires:
// config.Validate() passes.
SourceContents ReadSource(const ModelConfig& config, TensorSource& source,
                          ThreadPool& pool, const ReadOptions& options);

// Returns the tensor of an entry; nullopt for a head that is not there, and if
// the source has the tensor that may be there instead. Throws CorruptFile for a
// tensor that is missing, has the wrong shape or type, or is there beside the
// one that may be there instead.
std::optional<TensorView> FindTensor(const WeightEntry& entry,
                                     TensorSource& source);

// Opens an entry's table: its rows are read from where the source has it, or
// from a copy if the source cannot hold it.
void OpenTable(const WeightEntry& entry, const TensorView& view,
               TensorSource& source);

// Returns the number of bytes of these tensors of a source.
size_t SourceBytes(TensorSource& source, const std::vector<std::string>& names);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_WEIGHTS_SOURCE_READER_H_
