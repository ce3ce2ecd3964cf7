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
  // How long to wait for another process that writes the same file. Packing a
  // large model takes seconds, and a process that was stopped must not stop
  // this one.
  std::chrono::milliseconds patience{30000};
  std::optional<TensorType> quantize{};  // as for LoadWeights
};

// Loads weights as LoadWeights does, but by way of a packed file in a folder,
// which is made if need be.
//
// The file is found by the fingerprint of the weights, so a file of other
// weights is never used. For that the source is read and hashed, unless its
// fingerprint was noted before, beside the packed file, by the source's
// identity (TensorSource::Identity). With `quantize`, nothing is quantized
// unless the file is missing.
//
// A file whose header, vectors or gates are wrong is replaced. Its matrices are
// checked at their first use (PackedMatrix::RequireSound), or here if the file
// was just written or could not be deleted if it were damaged.
//
// If a packed file is impossible (no permission, full disk, another process
// that does not finish it), only `report` says so, and the weights are packed
// into memory. Throws what LoadWeights throws. `progress` counts source and
// packed bytes.
Weights LoadPackedWeights(const ModelConfig& config, TensorSource& source,
                          ThreadPool& pool, const LoadProgress& progress,
                          const PackedOptions& options, PackedReport& report);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_WEIGHTS_PACKED_WEIGHTS_H_
