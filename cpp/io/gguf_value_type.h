#ifndef GEMMAKV_IO_GGUF_VALUE_TYPE_H_
#define GEMMAKV_IO_GGUF_VALUE_TYPE_H_

#include <cstddef>
#include <cstdint>
#include <iterator>

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

struct GgufTypeInfo {
  const char* name;  // as error messages have it
  size_t bytes;      // of a scalar; 0: a string or an array
};
inline constexpr GgufTypeInfo kGgufTypes[] = {
    {"uint8", 1},   {"int8", 1},   {"uint16", 2}, {"int16", 2},  {"uint32", 4},
    {"int32", 4},   {"float32", 4}, {"bool", 1},  {"string", 0}, {"array", 0},
    {"uint64", 8},  {"int64", 8},  {"float64", 8}};

// 0 for strings, arrays and unknown types.
constexpr size_t GgufScalarBytes(uint32_t type) {
  return type < std::size(kGgufTypes) ? kGgufTypes[type].bytes : 0;
}

}  // namespace gkv

#endif  // GEMMAKV_IO_GGUF_VALUE_TYPE_H_
