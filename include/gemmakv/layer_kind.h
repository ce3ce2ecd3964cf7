#ifndef GEMMAKV_LAYER_KIND_H_
#define GEMMAKV_LAYER_KIND_H_

#include <cstdint>

namespace gkv {

enum class LayerKind : uint32_t {
  kFull = 0,       // every position stays visible
  kSliding = 1,    // a position sees itself and the `window` - 1 before it
  kRecurrent = 2,  // a position sees the state that the one before it left
};

}  // namespace gkv

#endif  // GEMMAKV_LAYER_KIND_H_
