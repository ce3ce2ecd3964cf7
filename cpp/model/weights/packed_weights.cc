#include "model/weights/packed_weights.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fp_environment.h"
#include "base/process.h"
#include "io/file.h"
#include "model/weights/packed_file.h"
#include "model/weights/quantization.h"
#include "model/weights/source_reader.h"
#include "model/weights/weight_table.h"

namespace gkv {
namespace {

// A link from the identity of a source to the packed file of its weights.
class SourceRecord {
 public:
  SourceRecord(const PackedOptions& options, const ModelConfig& config,
               const TensorSource& source) {
    const std::optional<Hash128> identity = source.Identity();
    if (!identity) return;
    Hasher hasher;
    hasher.UpdateValue(kVersion);
    hasher.UpdateValue(static_cast<uint32_t>(kSlabRows));
    hasher.UpdateValue(options.quantize
                           ? static_cast<int64_t>(*options.quantize)
                           : int64_t{-1});
    hasher.UpdateValue(*identity);
    hasher.UpdateValue(config.Hash());
    path_ = StrCat(options.folder, "/", hasher.Finish().Hex(), ".gkvsource");
  }

  // Returns the fingerprint of the weights; nullopt if nobody noted it.
  std::optional<Hash128> Read() const {
    std::error_code error;
    const std::string target = std::filesystem::read_symlink(path_, error);
    const auto info = Directory::Working().InfoOf(path_);
    if (error || !info || (info->owner != UserId() && info->owner != 0)) {
      return std::nullopt;
    }
    return FingerprintOf(target);
  }

  // Requires: the source was settled before it was read.
  void Write(const Hash128& fingerprint) const {
    const std::string target = PackedFileName(fingerprint);
    // If it cannot be noted, the next load hashes the source again.
    std::error_code error;
    std::filesystem::create_symlink(target, path_, error);
    if (error == std::errc::file_exists &&
        Directory::Working().Remove(path_) == 0) {
      std::filesystem::create_symlink(target, path_, error);
    }
  }

 private:
  // The version of the fingerprint's definition: of the order of the table of
  // weights, and of what readers make of a file.
  static constexpr uint32_t kVersion = 1;
  std::string path_;  // empty: the source has no identity
};

// Returns weights as views into a packed file. Matrices are checked at their
// first use, gates here. Vectors, which are small, are checked here and copied.
// Tables of rows are in the source alone.
Weights ReadPackedFile(const ModelConfig& config, const PackedFile& file,
                       TensorSource& source, ThreadPool& pool) {
  const ScopedFpEnvironment fp_environment;
  Weights weights;
  for (const WeightEntry& entry : ListWeights(config, weights)) {
    if (entry.table() != nullptr) {
      OpenTable(entry, *FindTensor(entry, source), source);
      entry.table()->ExpectRows();
      continue;
    }
    const PackedFile::Tensor* const tensor = file.Find(entry.name);
    PackedMatrix* const matrix = entry.matrix();
    const bool is_vector = matrix == nullptr;
    if (tensor == nullptr &&
        (entry.role == WeightRole::kHead || file.Find(entry.instead))) {
      continue;
    }
    if (tensor == nullptr || tensor->is_vector != is_vector ||
        tensor->rows != (is_vector ? 1 : entry.rows) ||
        tensor->rows * tensor->cols != entry.rows * entry.cols ||
        (MustBeFloat(entry.role) && !IsFloat(tensor->type))) {
      throw CorruptFile(StrCat(file.path(), ": tensor ", entry.name,
                               " is missing, or of another type or shape than "
                               "[",
                               entry.rows, ", ", entry.cols, "]"));
    }
    if (MustBeFloat(entry.role) && !file.Check(*tensor, pool)) {
      throw CorruptFile(StrCat(file.path(), ": tensor ", entry.name,
                               " does not match its sum"));
    }
    if (is_vector) {
      FloatVector values(entry.rows * entry.cols);
      std::memcpy(values.data(), file.data(*tensor), tensor->size_bytes());
      CheckOrdering(file.path(), entry, values);
      StoreFloats(entry, std::move(values));
      continue;
    }
    matrix->type = tensor->type;
    matrix->rows = entry.rows;
    matrix->cols = entry.cols;
    matrix->data = file.data(*tensor);
    matrix->file = &file;
    matrix->tensor = tensor;
    weights.matrices.push_back(
        {entry.name, tensor->type, entry.rows, entry.cols});
  }
  return weights;
}

// One load by way of a packed file.
class PackedLoad {
 public:
  PackedLoad(const ModelConfig& config, TensorSource& source, ThreadPool& pool,
             const LoadProgress& progress, const PackedOptions& options)
      : config_(config),
        source_(source),
        pool_(pool),
        options_(options),
        names_(TensorNames(config, source)) {
    if (options.quantize) RequireFloatMatrix(config, source);
    if (!progress) return;
    // Progress never goes back, even where something is tried again.
    progress_ = [this, &progress](size_t done, size_t total) {
      done_ = std::max(done_, done);
      progress(done_, total);
    };
  }
  PackedLoad(const PackedLoad&) = delete;

  Weights Run(PackedReport& report) {
    const SourceRecord record(options_, config_, source_);
    std::optional<Weights> weights;
    if (const std::optional<Hash128> noted = record.Read()) {
      SetFingerprint(*noted);
      weights = Open(report, false);
    }
    if (weights) {
      report.state = PackedReport::State::kReused;
    } else {
      const bool settled = source_.Settle();
      if (progress_) source_bytes_ = SourceBytes(source_, names_);
      const SourceContents survey =
          Read({.into = ReadOptions::Into::kNothing});
      SetFingerprint(survey.weights.fingerprint);
      table_hashes_ = survey.table_hashes;
      weights = Open(report, false);
      if (weights) {
        report.state = PackedReport::State::kReused;
      } else {
        weights = Write(survey.tensors, report);
      }
      if (weights && settled) record.Write(fingerprint_);
    }
    if (weights) {
      report.path = path_;
    } else {
      report.state = PackedReport::State::kMemory;
      weights = Read({.into = ReadOptions::Into::kMemory}).weights;
    }
    return std::move(*weights);
  }

 private:
  SourceContents Read(ReadOptions options) {
    options.quantize = options_.quantize;
    options.progress = progress_;
    options.total = 2 * source_bytes_;
    if (!table_hashes_.empty()) options.table_hashes = &table_hashes_;
    if (options.into != ReadOptions::Into::kNothing) {
      options.done = source_bytes_;
    }
    return ReadSource(config_, source_, pool_, options);
  }

  void SetFingerprint(const Hash128& fingerprint) {
    fingerprint_ = fingerprint;
    path_ = options_.folder + "/" + PackedFileName(fingerprint_);
  }

  // Returns nullopt if there is no sound file; the report says why, unless
  // there is no file at all. With `whole`, all tensors are checked here.
  std::optional<Weights> Open(PackedReport& report, bool whole) {
    try {
      const auto file = std::make_shared<PackedFile>(path_, fingerprint_);
      if (whole || !file->CanDelete()) {
        file->CheckAll(pool_, [&](size_t done, size_t) {
          if (!progress_ || source_bytes_ == 0) return;
          progress_(std::min(source_bytes_ + done, 2 * source_bytes_),
                    2 * source_bytes_);
        });
      }
      Weights weights = ReadPackedFile(config_, *file, source_, pool_);
      weights.file = file;
      weights.fingerprint = fingerprint_;
      const size_t total =
          source_bytes_ == 0 ? file->size_bytes() : 2 * source_bytes_;
      if (progress_) progress_(total, total);
      return weights;
    } catch (const IoError& error) {
      if (error.error_number() != ENOENT) report.reason = error.what();
    } catch (const CorruptFile& error) {
      report.reason = error.what();
    }
    return std::nullopt;
  }

  std::optional<Weights> Write(const std::vector<PackedTensor>& tensors,
                               PackedReport& report) {
    try {
      std::optional<PartFile> part =
          PartFile::Create(path_, options_.patience, [&] {
            if (progress_) progress_(source_bytes_, 2 * source_bytes_);
          });
      if (!part) {
        report.reason = StrCat(path_, ".part: another process has held it for ",
                               options_.patience.count(), " ms");
        return std::nullopt;
      }
      // Another process may have written it meanwhile.
      if (std::optional<Weights> weights = Open(report, false)) {
        report.state = PackedReport::State::kReused;
        return weights;
      }
      const std::string replaced = report.reason;
      PackedFileWriter writer(*part, fingerprint_, tensors);
      const SourceContents packed =
          Read({.into = ReadOptions::Into::kFile, .writer = &writer});
      if (packed.weights.fingerprint != fingerprint_) {
        report.reason =
            StrCat(source_.Description(), ": changed while it was read");
        return std::nullopt;
      }
      writer.Finish();
      part->Publish();
      std::optional<Weights> weights = Open(report, true);
      if (weights) {
        report.state = PackedReport::State::kWritten;
        report.reason = replaced;
      }
      return weights;
    } catch (const IoError& error) {
      report.reason = error.what();
      return std::nullopt;
    }
  }

  const ModelConfig& config_;
  TensorSource& source_;
  ThreadPool& pool_;
  const PackedOptions& options_;
  const std::vector<std::string> names_;
  LoadProgress progress_;
  size_t source_bytes_ = 0;
  size_t done_ = 0;
  Hash128 fingerprint_;
  TableHashes table_hashes_;  // once the source was read
  std::string path_;
};

}  // namespace

const char* NameOf(PackedReport::State state) {
  switch (state) {
    case PackedReport::State::kReused:
      return "reused";
    case PackedReport::State::kWritten:
      return "written";
    case PackedReport::State::kMemory:
      return "memory";
    case PackedReport::State::kOff:
      break;
  }
  return "off";
}

Weights LoadPackedWeights(const ModelConfig& config, TensorSource& source,
                          ThreadPool& pool, const LoadProgress& progress,
                          const PackedOptions& options, PackedReport& report) {
  config.Validate();
  return PackedLoad(config, source, pool, progress, options).Run(report);
}

}  // namespace gkv
