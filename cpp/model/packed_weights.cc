#include "model/packed_weights.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "model/packed_file.h"
#include "model/quantization.h"
#include "model/source_reader.h"
#include "model/tensor_names.h"

namespace gkv {
namespace {

// Reads everything once: the fingerprint, and what a packed file will hold.
class Survey : public SourceReader {
 public:
  using SourceReader::SourceReader;
  std::vector<PackedTensor>& tensors() { return tensors_; }

 protected:
  void BeginMatrix(const TensorView& view, PackedMatrix& matrix) override {
    PackedTensor& tensor = tensors_.emplace_back();
    tensor.name = view.name;
    tensor.type = matrix.type;
    tensor.rows = matrix.rows;
    tensor.cols = matrix.cols;
    tensor.piece_bytes = PackedSlabBytes(matrix, 0);
  }
  void TakeFloats(const TensorView& view, const FloatVector& vector) override {
    PackedTensor& tensor = tensors_.emplace_back();
    tensor.name = view.name;
    tensor.is_vector = true;
    tensor.rows = 1;
    tensor.cols = vector.size();
    tensor.piece_bytes = vector.size() * sizeof(float);
  }

 private:
  std::vector<PackedTensor> tensors_;
};

// Packs into a file, a slab at a time.
class FilePacker : public SourceReader {
 public:
  FilePacker(const ModelConfig& config, TensorSource& source, ThreadPool& pool,
             const ReadOptions& options, PackedFileWriter& writer)
      : SourceReader(config, source, pool, options),
        writer_(writer),
        slabs_(pool.num_threads()) {}

 protected:
  void BeginMatrix(const TensorView& view, PackedMatrix& matrix) override {
    Begin(view.name, matrix.type);
    for (auto& slab : slabs_) slab.EnsureSize(PackedSlabBytes(matrix, 0));
  }
  void TakeSlab(const TensorView& view, size_t slab, size_t thread,
                PackedMatrix& matrix) override {
    if (writer_.failed()) return;
    uint8_t* const packed = slabs_[thread].data();
    PackSlab(view, slab, thread, matrix, packed);
    writer_.WritePiece(next_ - 1, slab,
                       {packed, PackedSlabBytes(matrix, slab)});
  }
  void TakeFloats(const TensorView& view, const FloatVector& vector) override {
    Begin(view.name, TensorType::kF32);
    writer_.WritePiece(next_ - 1, 0,
                       {reinterpret_cast<const uint8_t*>(vector.data()),
                        vector.size() * sizeof(float)});
  }

 private:
  // The same tensors come in the same order as in the survey, unless the
  // source has changed since.
  void Begin(const std::string& name, TensorType type) {
    writer_.ThrowIfFailed();
    if (next_ == writer_.tensors().size() ||
        writer_.tensors()[next_].name != name ||
        writer_.tensors()[next_].type != type) {
      throw IoError("packed weights: the source changed while it was read", 0,
                    "");
    }
    ++next_;
  }

  PackedFileWriter& writer_;
  std::vector<AlignedBuffer<uint8_t>> slabs_;  // [thread]
  size_t next_ = 0;
};

// Weights as views into a packed file; vectors, which are small, are copied.
class FileReader : public WeightVisitor {
 public:
  explicit FileReader(const PackedFile& file) : file_(file) {}

  bool Has(const std::string& name) override {
    return file_.Find(name) != nullptr;
  }
  PackedMatrix Matrix(const std::string& name, size_t rows,
                      size_t cols) override {
    const PackedTensor& tensor = Require(name, false, rows, cols);
    PackedMatrix matrix;
    matrix.type = tensor.type;
    matrix.rows = rows;
    matrix.cols = cols;
    matrix.data = file_.data(tensor);
    return matrix;
  }
  FloatVector Floats(const std::string& name, size_t rows,
                     size_t cols) override {
    const size_t size = rows * cols;
    const PackedTensor& tensor = Require(name, true, 1, size);
    FloatVector vector(size);
    std::memcpy(vector.data(), file_.data(tensor), size * sizeof(float));
    return vector;
  }

 private:
  const PackedTensor& Require(const std::string& name, bool is_vector,
                              size_t rows, size_t cols) const {
    const PackedTensor* tensor = file_.Find(name);
    if (tensor == nullptr || tensor->is_vector != is_vector ||
        tensor->rows != rows || tensor->cols != cols) {
      throw CorruptFile(StrCat(file_.path(), ": tensor ", name,
                               " is missing or has another shape than [", rows,
                               ", ", cols, "]"));
    }
    return *tensor;
  }

  const PackedFile& file_;
};

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
    Survey survey(config_, source_, pool_,
                  {options_.quantize, progress_, 0, 2 * source_bytes_});
    VisitWeights(config_, survey);
    fingerprint_ = survey.fingerprint();
    path_ = options_.folder + "/" + PackedFileName(fingerprint_);
    std::optional<Weights> weights = Open(report);
    if (weights) {
      report.state = PackedReport::State::kReused;
    } else {
      weights = Write(survey.tensors(), report);
    }
    if (weights) {
      report.path = path_;
    } else {
      report.state = PackedReport::State::kMemory;
      weights = Pack();
    }
    return std::move(*weights);
  }

 private:
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
      FileReader reader(*file);
      Weights weights = VisitWeights(config_, reader);
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
      FilePacker packer(
          config_, source_, pool_,
          {options_.quantize, progress_, source_bytes_, 2 * source_bytes_},
          writer);
      VisitWeights(config_, packer);
      if (packer.fingerprint() != fingerprint_) {
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

  Weights Pack() {
    const LoadProgress second_half = [&](size_t done, size_t) {
      progress_(source_bytes_ + done, 2 * source_bytes_);
    };
    return LoadWeights(config_, source_, pool_,
                       progress_ ? second_half : progress_, options_.quantize);
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
