#ifndef GEMMAKV_MODEL_WEIGHTS_PACKED_WEIGHTS_H_
#define GEMMAKV_MODEL_WEIGHTS_PACKED_WEIGHTS_H_

#include <chrono>
#include <optional>
#include <string>

#include "model/weights/weights.h"

namespace gkv {

// Where the weights of a loaded model are.
struct PackedReport {
  enum class State {
    kOff,      // in this process's memory: no packed file was asked for
    kReused,   // in a packed file that was there
    kWritten,  // in a packed file that this load wrote
    kMemory,   // in this process's memory: the packed file could not be used
  };
  State state = State::kOff;
  std::string path;    // of the packed file; empty with kOff and kMemory
  std::string reason;  // one line; what was wrong with the file that was
                       // replaced (kWritten), or why there is none (kMemory)
};

const char* NameOf(PackedReport::State state);

struct PackedOptions {
  std::string folder;
  // How long to wait for another process that writes the same file: packing a
  // large model takes seconds; one that was stopped must not stop this one.
  std::chrono::milliseconds patience{30000};
  std::optional<TensorType> quantize{};  // as for LoadWeights
};

// LoadWeights by way of a packed file in a folder, which is made if need be.
// The fingerprint of the weights finds the file, so that a file of other
// weights is never used: the source is read and hashed, unless that was done
// before and its identity (TensorSource::Identity) is noted beside the packed
// file. With `quantize`, nothing is quantized before a file is missed.
// A file whose header, vectors or gates are wrong is replaced. Its matrices are
// checked when they are first used, see PackedMatrix::is_checked; here if the
// file was just written, or could not be deleted for being damaged.
// Whatever makes the packed file impossible (no permission, full disk, another
// process that does not finish it) is told by `report` alone: the weights are
// then packed into memory.
// Throws what LoadWeights throws. `progress` counts source and packed bytes.
Weights LoadPackedWeights(const ModelConfig& config, TensorSource& source,
                          ThreadPool& pool, const LoadProgress& progress,
                          const PackedOptions& options, PackedReport& report);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_WEIGHTS_PACKED_WEIGHTS_H_
