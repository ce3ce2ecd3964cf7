#ifndef GEMMAKV_MODEL_CONFIG_FIELDS_H_
#define GEMMAKV_MODEL_CONFIG_FIELDS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gemmakv/config.h"

// The one list of the fields of a configuration. A row says of a field where it
// is kept, what range it has, what leaving it out means, what its family says,
// and by which keys files state it. Validate, Hash, CompareWithNamed,
// ApplyFamily, ConfigFromGguf, CheckGgufKeys and the bindings of Python walk
// the list: a new field is a member of the struct and a row here. What fields
// have to be to each other is checked in config.cc.

namespace gkv {

struct Family;

// Kinds of layers, as a set.
enum LayerSet : uint32_t {
  kFullLayers = 1 << static_cast<uint32_t>(LayerKind::kFull),
  kSlidingLayers = 1 << static_cast<uint32_t>(LayerKind::kSliding),
  kRecurrentLayers = 1 << static_cast<uint32_t>(LayerKind::kRecurrent),
  kAttentionLayers = kFullLayers | kSlidingLayers,
  kAllLayers = kAttentionLayers | kRecurrentLayers,
};

// A field as numbers, whatever its type: flags are 0 or 1, no shared layer -1,
// no cutoff -infinity.
struct Field {
  enum class Type { kSize, kReal, kFlag };
  struct Access {
    Type type;
    bool by_layer;  // a member of LayerConfig
    double (*get)(const ModelConfig& config, size_t layer);
    void (*set)(ModelConfig& config, size_t layer, double value);
  };
  // Of the hash: a mark, or one of these. Marked fields are younger than the
  // hash; they enter where they are not the default.
  static constexpr uint32_t kAlways = 0, kNever = ~uint32_t{0};

  const char* name;  // in errors, and in Python
  Access at;
  LayerSet layers = kAllLayers;  // that read it; 0 in models without such
  double low = 0;
  double high = std::numeric_limits<double>::infinity();
  // What leaving it out means: a number, or what follows from fields before
  // it. Neither: it must be stated.
  std::optional<double> fallback = std::nullopt;
  std::vector<double> (*derived)(const ModelConfig&) = nullptr;
  // What its family says of it; null if the family alone does not say it.
  double (*family)(const Family& family) = nullptr;
  const char* gguf = nullptr;  // metadata key after the architecture
  // Layers that slide may have a key of their own, which ends in "_swa".
  bool gguf_swa = false;
  // Other keys of it. The first that a file has is read where it has not
  // `gguf`; all must agree with what was read.
  std::array<const char*, 2> gguf_also = {};
  const char* json = nullptr;  // key of config.json, if all families mean it so
  uint32_t mark = kAlways;

  bool IsReadIn(const LayerConfig& layer) const;
  // One number, or one for each layer if those that read the field differ.
  std::vector<double> Get(const ModelConfig& config) const;
  // Of the first layer that reads it; nullopt if none does.
  std::optional<double> First(const ModelConfig& config) const;
  // Takes one number or one for each layer. The number of layers and their
  // kinds are to be set before what layers differ in. Requires: Check passes.
  void Set(ModelConfig& config, std::span<const double> values) const;
  // Throws InvalidArgument, calling the field `name`, unless these are whole
  // numbers if it is a size, in its range, and as many as Set takes.
  void Check(const ModelConfig& config, std::span<const double> values,
             const std::string& name) const;
  // What leaving it out means; empty if it must be stated.
  std::vector<double> Default(const ModelConfig& config) const;
};

// Of one number or one for each layer: that of a layer.
inline double NumberAt(std::span<const double> values, size_t layer) {
  return values[values.size() == 1 ? 0 : layer];
}

// In an order in which they can be set.
std::span<const Field> Fields();
// Requires: there is one.
const Field& FieldNamed(std::string_view name);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_CONFIG_FIELDS_H_
