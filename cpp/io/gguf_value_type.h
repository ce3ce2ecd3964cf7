#ifndef GEMMAKV_IO_GGUF_VALUE_TYPE_H_
#define GEMMAKV_IO_GGUF_VALUE_TYPE_H_

#include <cstddef>
#include <cstdint>

namespace gkv {

// Types of metadata values; the numbers are those of the GGUF file format.
enum GgufValueType : uint32_t {
  kGgufUint8 = 0,
  kGgufInt8 = 1,
  kGgufUint16 = 2,
  kGgufInt16 = 3,
  kGgufUint32 = 4,
  kGgufInt32 = 5,
  kGgufFloat32 = 6,
  kGgufBool = 7,
  kGgufString = 8,
  kGgufArray = 9,
  kGgufUint64 = 10,
  kGgufInt64 = 11,
  kGgufFloat64 = 12,
};

// 0 for strings, arrays and unknown types.
constexpr size_t GgufScalarBytes(uint32_t type) {
  switch (type) {
    case kGgufUint8:
    case kGgufInt8:
    case kGgufBool:
      return 1;
    case kGgufUint16:
    case kGgufInt16:
      return 2;
    case kGgufUint32:
    case kGgufInt32:
    case kGgufFloat32:
      return 4;
    case kGgufUint64:
    case kGgufInt64:
    case kGgufFloat64:
      return 8;
    default:
      return 0;
  }
}

// As error messages name it. Requires: a known type.
constexpr const char* GgufTypeName(uint32_t type) {
  constexpr const char* kNames[] = {
      "uint8", "int8",   "uint16", "int16",  "uint32", "int32",  "float32",
      "bool",  "string", "array",  "uint64", "int64",  "float64"};
  return kNames[type];
}

}  // namespace gkv

#endif  // GEMMAKV_IO_GGUF_VALUE_TYPE_H_
