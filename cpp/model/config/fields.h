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

// The one list of the fields of a configuration. A row says where a field is
// kept, which layers read it, what range it has, what leaving it out means,
// what its family says, and by which keys files state it. Validate, Hash,
// CompareWithNamed, ApplyFamily, ConfigFromGguf, CheckGgufKeys and the bindings
// of Python walk the list, so a new field is a member of the struct and a row
// here. The order of the rows is that of the hash, so rows keep their order.
// How fields have to fit each other is checked in config.cc.

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

// A field as numbers, whatever its type. Flags are 0 or 1, no shared layer is
// -1, and no cutoff is -infinity.
struct Field {
  enum class Type { kSize, kReal, kFlag };
  struct Access {
    Type type;
    bool by_layer;  // a member of LayerConfig
    double (*get)(const ModelConfig& config, size_t layer);
    void (*set)(ModelConfig& config, size_t layer, double value);
  };
  // How a field enters the hash: with a mark, or as one of these says. Marked
  // fields are younger than the hash and enter only where they are not the
  // default.
  static constexpr uint32_t kAlways = 0, kNever = ~uint32_t{0};

  const char* name;  // in errors, and in Python
  Access at;
  LayerSet layers = kAllLayers;  // those that read it; 0 in models without them
  double low = 0;
  double high = std::numeric_limits<double>::infinity();
  // The value that leaving it out means: a number, or what follows from fields
  // before it. With neither it must be stated.
  std::optional<double> fallback = std::nullopt;
  std::vector<double> (*derived)(const ModelConfig&) = nullptr;
  // The value that its family says; null if the family alone does not say it.
  double (*family)(const Family& family) = nullptr;
  const char* gguf = nullptr;  // metadata key after the architecture
  // Layers that slide may have a key of their own, which ends in "_swa".
  bool gguf_swa = false;
  // Other keys of the field. If a file has no `gguf`, the first of these that
  // it has is read. All that it has must agree with what was read.
  std::array<const char*, 2> gguf_also = {};
  const char* json = nullptr;  // key of config.json, if all families mean it so
  uint32_t mark = kAlways;

  bool IsReadIn(const LayerConfig& layer) const;
  // Returns one number, or one for each layer if those that read the field
  // differ.
  std::vector<double> Get(const ModelConfig& config) const;
  // Returns the number of the first layer that reads it; nullopt if none does.
  std::optional<double> First(const ModelConfig& config) const;
  // Takes one number, or one for each layer. The number of layers and their
  // kinds must be set before fields in which layers differ. Requires: Check
  // passes.
  void Set(ModelConfig& config, std::span<const double> values) const;
  // Throws InvalidArgument, which calls the field `name`, unless the values are
  // as many as Set takes, in range and, for sizes and flags, whole numbers.
  void Check(const ModelConfig& config, std::span<const double> values,
             const std::string& name) const;
  // Returns what leaving it out means; nothing if it must be stated.
  std::vector<double> Default(const ModelConfig& config) const;
};

// Returns the number of a layer, from one number or one for each layer.
inline double NumberAt(std::span<const double> values, size_t layer) {
  return values[values.size() == 1 ? 0 : layer];
}

// Returns the list, in an order in which fields can be set.
std::span<const Field> Fields();
// Returns the field of this name. Requires: there is one.
const Field& FieldNamed(std::string_view name);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_CONFIG_FIELDS_H_
