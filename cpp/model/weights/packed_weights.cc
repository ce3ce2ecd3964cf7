#include "model/weights/packed_weights.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fp_environment.h"
#include "model/weights/packed_file.h"
#include "model/weights/quantization.h"
#include "model/weights/source_reader.h"
#include "model/weights/weight_table.h"

namespace gkv {
namespace {

// Weights as views into a packed file; vectors, which are small, are copied.
Weights ReadPackedFile(const ModelConfig& config, const PackedFile& file) {
  const ScopedFpEnvironment fp_environment;
  Weights weights;
  for (const WeightEntry& entry : ListWeights(config, weights)) {
    const PackedTensor* const tensor = file.Find(entry.name);
    PackedMatrix* const matrix = entry.matrix();
    const bool is_vector = matrix == nullptr;
    if (tensor == nullptr && entry.role == WeightRole::kHead) continue;
    if (tensor == nullptr || tensor->is_vector != is_vector ||
        tensor->rows != (is_vector ? 1 : entry.rows) ||
        tensor->rows * tensor->cols != entry.rows * entry.cols ||
        (MustBeFloat(entry.role) && !IsFloat(tensor->type))) {
      throw CorruptFile(StrCat(file.path(), ": tensor ", entry.name,
                               " is missing, or of another type or shape than "
                               "[",
                               entry.rows, ", ", entry.cols, "]"));
    }
    if (is_vector) {
      FloatVector values(entry.rows * entry.cols);
      std::memcpy(values.data(), file.data(*tensor), tensor->size_bytes());
      StoreFloats(entry, std::move(values));
      continue;
    }
    matrix->type = tensor->type;
    matrix->rows = entry.rows;
    matrix->cols = entry.cols;
    matrix->data = file.data(*tensor);
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
      : config_(config), source_(source), pool_(pool), options_(options) {
    const std::vector<std::string> names = TensorNames(config, source);
    if (options.quantize) RequireFloatMatrix(source, names);
    if (!progress) return;
    source_bytes_ = SourceBytes(source, names);
    // A second attempt at something is not a step back.
    progress_ = [this, &progress](size_t done, size_t total) {
      done_ = std::max(done_, done);
      progress(done_, total);
    };
  }
  PackedLoad(const PackedLoad&) = delete;

  Weights Run(PackedReport& report) {
    const SourceContents survey = Read({.into = ReadOptions::Into::kNothing});
    fingerprint_ = survey.weights.fingerprint;
    path_ = options_.folder + "/" + PackedFileName(fingerprint_);
    std::optional<Weights> weights = Open(report);
    if (weights) {
      report.state = PackedReport::State::kReused;
    } else {
      weights = Write(survey.tensors, report);
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
    if (options.into != ReadOptions::Into::kNothing) {
      options.done = source_bytes_;
    }
    return ReadSource(config_, source_, pool_, options);
  }

  // nullopt if there is no sound file; the report says why unless there is
  // none at all.
  std::optional<Weights> Open(PackedReport& report) {
    try {
      const PackedFile::Progress second_half = [&](size_t done, size_t) {
        progress_(std::min(source_bytes_ + done, 2 * source_bytes_),
                  2 * source_bytes_);
      };
      const auto file = std::make_shared<PackedFile>(
          path_, fingerprint_, pool_,
          progress_ ? second_half : PackedFile::Progress());
      Weights weights = ReadPackedFile(config_, *file);
      weights.file = file;
      weights.fingerprint = fingerprint_;
      if (progress_) progress_(2 * source_bytes_, 2 * source_bytes_);
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
      if (std::optional<Weights> weights = Open(report)) {
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
      std::optional<Weights> weights = Open(report);
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
  LoadProgress progress_;
  size_t source_bytes_ = 0;
  size_t done_ = 0;
  Hash128 fingerprint_;
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
