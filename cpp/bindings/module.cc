#include "bindings/bindings.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The compiled core of gemmakv.";
  // This imports NumPy now. Later pybind11 would release the interpreter's lock
  // for that, on a thread that may not get it back.
  (void)gkv::py::dtype::of<float>();
  gkv::RegisterErrors(module);
  gkv::RegisterConfig(module);
  gkv::RegisterCache(module);
  gkv::RegisterPaddedCache(module);
  gkv::RegisterOptions(module);
  gkv::RegisterGemma(module);
  gkv::RegisterPrefix(module);
  gkv::RegisterRemoteStore(module);
  gkv::RegisterInfo(module);
}
