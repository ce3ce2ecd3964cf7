#include "bindings/bindings.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The compiled core of gemmakv.";
  gkv::RegisterErrors(module);
  gkv::RegisterConfig(module);
  gkv::RegisterCache(module);
  gkv::RegisterPaddedCache(module);
  gkv::RegisterOptions(module);
  gkv::RegisterGemma(module);
  gkv::RegisterPrefix(module);
  gkv::RegisterInfo(module);
}
