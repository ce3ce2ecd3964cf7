#include "model/tensor_names.h"

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "model/source_reader.h"

namespace gkv {
namespace {

// Notes what is asked for, and gives weights without values.
class NameList : public WeightVisitor {
 public:
  bool Has(const std::string&) override { return true; }
  PackedMatrix Matrix(const std::string& name, size_t, size_t) override {
    names_.insert(name);
    return {};
  }
  FloatVector Floats(const std::string& name, size_t rows,
                     size_t cols) override {
    names_.insert(name);
    FloatVector zeros(rows * cols);
    std::fill_n(zeros.data(), rows * cols, 0.0f);
    return zeros;
  }

  bool Contains(const std::string& name) const {
    return names_.find(name) != names_.end();
  }

 private:
  std::unordered_set<std::string> names_;
};

// A model with the same names, as small as can be.
ModelConfig Smallest(ModelConfig config) {
  config.hidden_size = config.ffn_dim = config.vocab_size = 1;
  config.num_heads = config.kv_heads = 1;
  config.head_dim = config.rope_dim = 32;
  if (config.lru_width != 0) config.lru_width = 16;
  config.lru_blocks = config.conv_width = config.lru_width != 0 ? 1 : 0;
  return config;
}

}  // namespace

std::vector<std::string> TensorNames(const ModelConfig& config,
                                     const TensorSource& source) {
  NameList expected;
  VisitWeights(Smallest(config), expected);
  std::vector<std::string> names;
  for (std::string& name : source.Names()) {
    if (expected.Contains(name)) {
      names.push_back(std::move(name));
      continue;
    }
    if (!name.starts_with("blk.")) continue;
    throw CorruptFile(StrCat(source.Description(), ": found tensor ", name,
                             ", expected none of this name: the configuration "
                             "is of a ",
                             config.architecture, " model of ",
                             config.num_layers, " layers"));
  }
  return names;
}

}  // namespace gkv
