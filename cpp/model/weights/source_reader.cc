#include "model/weights/source_reader.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/error.h"
#include "base/float16.h"
#include "base/fp_environment.h"
#include "base/hash.h"
#include "model/weights/quantization.h"
#include "model/weights/weight_table.h"
#include "ops/quantize_weights.h"

namespace gkv {
namespace {

static_assert(kSlabRows % kRowGroup == 0);

// The number of source bytes that are read between two releases of source
// pages.
constexpr size_t kReleaseBytes = size_t{8} << 20;

using Into = ReadOptions::Into;

class Reader {
 public:
  Reader(const ModelConfig& config, TensorSource& source, ThreadPool& pool,
         const ReadOptions& options)
      : config_(config),
        source_(source),
        pool_(pool),
        options_(options),
        done_(options.done),
        scratch_(pool.num_threads()) {
    hasher_.UpdateValue(config.Hash());
  }

  SourceContents Run() {
    const ScopedFpEnvironment fp_environment;
    for (const WeightEntry& entry : ListWeights(config_, contents_.weights)) {
      const std::optional<TensorView> view = FindTensor(entry, source_);
      if (!view) continue;
      if (entry.table() != nullptr) {
        ReadTable(entry, *view);
      } else if (entry.matrix() != nullptr) {
        ReadMatrix(entry, *view, *entry.matrix());
      } else {
        ReadFloats(entry, *view);
      }
    }
    contents_.weights.fingerprint = hasher_.Finish();
    return std::move(contents_);
  }

 private:
  struct Scratch {
    AlignedBuffer<uint8_t> gathered;   // one group's rows
    AlignedBuffer<uint8_t> quantized;  // the same
    AlignedBuffer<uint8_t> slab;       // packed
  };

  // Notes the next tensor; with kFile, compares it with the writer's.
  const PackedTensor& Begin(const TensorView& view, bool is_vector,
                            TensorType type) {
    PackedTensor& tensor = contents_.tensors.emplace_back();
    tensor.name = view.name;
    tensor.type = type;
    tensor.is_vector = is_vector;
    tensor.rows = is_vector ? 1 : view.rows;
    tensor.cols = is_vector ? view.rows * view.cols : view.cols;
    tensor.piece_bytes =
        is_vector ? tensor.size_bytes()
                  : NumGroups(std::min(view.rows, kSlabRows)) *
                        GroupBytes(type, view.cols);
    if (options_.into != Into::kFile) return tensor;
    options_.writer->ThrowIfFailed();
    const std::vector<PackedTensor>& expected = options_.writer->tensors();
    const size_t index = contents_.tensors.size() - 1;
    if (index == expected.size() || expected[index].name != tensor.name ||
        expected[index].type != type) {
      throw IoError("packed weights: the source changed while it was read", 0,
                    "");
    }
    return tensor;
  }

  void ReadMatrix(const WeightEntry& entry, const TensorView& view,
                  PackedMatrix& matrix) {
    matrix.type = KeptType(view, entry.role, options_.quantize);
    matrix.rows = view.rows;
    matrix.cols = view.cols;
    contents_.weights.matrices.push_back(
        {view.name, matrix.type, view.rows, view.cols});
    const PackedTensor& tensor = Begin(view, false, matrix.type);
    if (options_.into == Into::kMemory) {
      matrix.owned = AlignedBuffer<uint8_t>(tensor.size_bytes());
      matrix.data = matrix.owned.data();
      PreferLargePages(matrix.data, matrix.owned.size());
    }
    // The clusters of the vocabulary come one after the other.
    const FloatVector& ordering = contents_.weights.drafter.ordering;
    order_ = entry.role == WeightRole::kEmbedding && ordering.size() != 0
                 ? ordering.data()
                 : nullptr;
    for (Scratch& scratch : scratch_) {
      if (order_ != nullptr) {
        scratch.gathered.EnsureSize(kRowGroup *
                                    RowBytes(view.type, view.cols));
      }
      if (options_.into == Into::kFile) {
        scratch.slab.EnsureSize(tensor.piece_bytes);
      }
      if (matrix.type != view.type) {
        scratch.quantized.EnsureSize(GroupBytes(matrix.type, view.cols));
      }
    }
    const std::vector<Hash128> hashes = ReadSlabs(
        view,
        [&](size_t slab, size_t thread) {
          TakeSlab(view, tensor, slab, scratch_[thread], matrix);
        },
        [&](size_t first, size_t end) {
          if (representable_) return;
          ThrowNotRepresentable(source_.Description(), view, first, end,
                                matrix.type);
        });
    AddToFingerprint(view, matrix.type, hashes);
  }

  // Hashes a table once. Its rows are read later, from where the table is.
  void ReadTable(const WeightEntry& entry, const TensorView& view) {
    if (options_.into == Into::kMemory) OpenTable(entry, view, source_);
    std::vector<Hash128>& hashes = contents_.table_hashes[view.name];
    if (options_.table_hashes == nullptr) {
      hashes = ReadSlabs(view, [](size_t, size_t) {}, [](size_t, size_t) {});
    } else {
      hashes = options_.table_hashes->at(view.name);
      Advance(view.size_bytes());
    }
    AddToFingerprint(view, view.type, hashes);
    if (options_.into == Into::kMemory) entry.table()->ExpectRows();
  }

  // Returns the hashes of all slabs. Calls `take` for each slab, on any thread,
  // then `taken` for the rows of several slabs, after which their bytes are
  // given back.
  std::vector<Hash128> ReadSlabs(
      const TensorView& view,
      const std::function<void(size_t slab, size_t thread)>& take,
      const std::function<void(size_t begin, size_t end)>& taken) {
    const size_t slab_bytes = kSlabRows * RowBytes(view.type, view.cols);
    const size_t slabs_per_batch =
        std::max<size_t>(2 * pool_.num_threads(), kReleaseBytes / slab_bytes);
    std::vector<Hash128> hashes(CeilDiv(view.rows, kSlabRows));
    for (size_t first = 0; first < hashes.size(); first += slabs_per_batch) {
      const size_t count = std::min(slabs_per_batch, hashes.size() - first);
      pool_.Run(count, [&](size_t task, size_t thread) {
        const size_t slab = first + task;
        take(slab, thread);
        const size_t begin = slab * slab_bytes;
        hashes[slab] =
            HashBytes({view.data + begin,
                       std::min(slab_bytes, view.size_bytes() - begin)});
      });
      taken(first * kSlabRows,
            std::min(view.rows, (first + count) * kSlabRows));
      const size_t begin = first * slab_bytes;
      const size_t end =
          std::min(view.size_bytes(), begin + count * slab_bytes);
      source_.Release(view, begin, end);
      Advance(end - begin);
    }
    return hashes;
  }

  // Runs on any thread.
  void TakeSlab(const TensorView& view, const PackedTensor& tensor, size_t slab,
                Scratch& scratch, PackedMatrix& matrix) {
    const size_t begin = slab * tensor.piece_bytes;
    switch (options_.into) {
      case Into::kNothing:
        break;
      case Into::kMemory:
        PackSlab(view, slab, matrix.type, scratch, matrix.owned.data() + begin);
        break;
      case Into::kFile:
        if (options_.writer->failed()) break;
        PackSlab(view, slab, matrix.type, scratch, scratch.slab.data());
        options_.writer->WritePiece(
            contents_.tensors.size() - 1, slab,
            {scratch.slab.data(),
             std::min<size_t>(tensor.piece_bytes,
                              tensor.size_bytes() - begin)});
    }
  }

  // `out` is undefined for a slab that cannot be of the type.
  void PackSlab(const TensorView& view, size_t slab, TensorType type,
                Scratch& scratch, uint8_t* out) {
    const size_t row_bytes = RowBytes(view.type, view.cols);
    const size_t end = std::min(view.rows, (slab + 1) * kSlabRows);
    for (size_t row = slab * kSlabRows; row < end;
         row += kRowGroup, out += GroupBytes(type, view.cols)) {
      const size_t rows = std::min(kRowGroup, end - row);
      const uint8_t* group = view.data + row * row_bytes;
      if (order_ != nullptr) {
        for (size_t i = 0; i < rows; ++i) {
          std::memcpy(scratch.gathered.data() + i * row_bytes,
                      view.data + static_cast<size_t>(order_[row + i]) *
                                      row_bytes,
                      row_bytes);
        }
        group = scratch.gathered.data();
      }
      if (type != view.type) {
        if (!QuantizeWeights(view.type, group, rows * view.cols, type,
                             scratch.quantized.data())) {
          representable_ = false;
          return;
        }
        group = scratch.quantized.data();
      }
      PackGroup(type, group, rows, view.cols, out);
    }
  }

  // Reads a tensor of few values, which are kept as floats whatever their type.
  void ReadFloats(const WeightEntry& entry, const TensorView& view) {
    FloatVector values(view.rows * view.cols);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = FloatAt(view.type, view.data, i);
    }
    Begin(view, true, TensorType::kF32);
    if (options_.into == Into::kFile) {
      options_.writer->WritePiece(
          contents_.tensors.size() - 1, 0, AsBytes(values));
    }
    CheckOrdering(source_.Description(), entry, values);
    StoreFloats(entry, std::move(values));
    AddToFingerprint(view, view.type,
                     {HashBytes({view.data, view.size_bytes()})});
    source_.Release(view, 0, view.size_bytes());
    Advance(view.size_bytes());
  }

  // The bytes of a quantized matrix follow from the source's bytes and the type
  // alone.
  void AddToFingerprint(const TensorView& view, TensorType kept,
                        const std::vector<Hash128>& hashes) {
    hasher_.UpdateValue(static_cast<uint32_t>(view.type));
    if (kept != view.type) hasher_.UpdateValue(static_cast<uint32_t>(kept));
    hasher_.Update(AsBytes(hashes));
  }

  void Advance(size_t bytes) {
    done_ += bytes;
    if (options_.progress) options_.progress(done_, options_.total);
  }

  const ModelConfig& config_;
  TensorSource& source_;
  ThreadPool& pool_;
  const ReadOptions& options_;
  SourceContents contents_;
  Hasher hasher_;
  size_t done_;
  std::vector<Scratch> scratch_;  // [thread]
  const float* order_ = nullptr;  // of the matrix's rows; null: the source's
  std::atomic<bool> representable_{true};
};

}  // namespace

std::optional<TensorView> FindTensor(const WeightEntry& entry,
                                     TensorSource& source) {
  const std::optional<TensorView> view = source.Find(entry.name);
  if (!view && entry.role == WeightRole::kHead) return view;
  const bool other = !entry.instead.empty() && source.Find(entry.instead);
  if (!view && other) return view;
  const auto refuse = [&](const auto&... what) {
    throw CorruptFile(
        StrCat(source.Description(), ": tensor ", entry.name, what...));
  };
  const auto shape = [](const auto& of) {
    const std::string parts = of.parts == 1 ? "" : StrCat(of.parts, ", ");
    return StrCat("[", parts, of.rows / of.parts, ", ", of.cols, "]");
  };
  if (!view) {
    refuse(" is missing, expected shape ", shape(entry),
           entry.instead.empty() ? "" : StrCat(", or ", entry.instead));
  }
  if (other) refuse(" is there beside ", entry.instead, ", expected one of them");
  if (view->rows != entry.rows || view->cols != entry.cols ||
      view->parts != entry.parts) {
    refuse(" has shape ", shape(*view), ", expected ", shape(entry));
  }
  if (!IsFloat(view->type) && MustBeFloat(entry.role)) {
    refuse(" has type ", Info(view->type).name, ", expected F32, F16 or BF16");
  }
  return view;
}

void OpenTable(const WeightEntry& entry, const TensorView& view,
               TensorSource& source) {
  RowTable& table = *entry.table();
  table.type = view.type;
  table.rows = view.rows;
  table.cols = view.cols;
  table.data = view.data;
  table.held = source.Hold(view);
  if (table.held) return;
  const auto copy = std::make_shared<std::vector<uint8_t>>(
      view.data, view.data + view.size_bytes());
  table.data = copy->data();
  table.held = copy;
}

SourceContents ReadSource(const ModelConfig& config, TensorSource& source,
                          ThreadPool& pool, const ReadOptions& options) {
  return Reader(config, source, pool, options).Run();
}

size_t SourceBytes(TensorSource& source,
                   const std::vector<std::string>& names) {
  size_t total = 0;
  for (const std::string& name : names) {
    const std::optional<TensorView> view = source.Find(name);
    if (!view) continue;
    total += view->size_bytes();
    // Sources that make a tensor when asked for it need not keep all of them.
    source.Release(*view, 0, view->size_bytes());
  }
  return total;
}

}  // namespace gkv
