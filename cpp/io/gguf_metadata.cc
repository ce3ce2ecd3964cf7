// The metadata of a GgufFile, decoded on request. Construction has checked
// that every Entry is of a known type and that its bytes, those of each string
// of an array included, lie inside the file: nothing here checks bounds.

#include <cstring>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/bytes.h"
#include "io/gguf.h"
#include "io/gguf_value_type.h"

namespace gkv {
namespace {

// One scalar, widened. Requires: a scalar type.
GgufValue DecodeScalar(uint32_t type, const uint8_t* at) {
  switch (type) {
    case kGgufUint8:
      return uint64_t{*at};
    case kGgufInt8:
      return int64_t{LoadUnaligned<int8_t>(at)};
    case kGgufUint16:
      return uint64_t{LoadUnaligned<uint16_t>(at)};
    case kGgufInt16:
      return int64_t{LoadUnaligned<int16_t>(at)};
    case kGgufUint32:
      return uint64_t{LoadUnaligned<uint32_t>(at)};
    case kGgufInt32:
      return int64_t{LoadUnaligned<int32_t>(at)};
    case kGgufFloat32:
      return double{LoadUnaligned<float>(at)};
    case kGgufBool:
      return *at != 0;
    case kGgufUint64:
      return LoadUnaligned<uint64_t>(at);
    case kGgufInt64:
      return LoadUnaligned<int64_t>(at);
    default:
      return LoadUnaligned<double>(at);
  }
}

// Moves `at` past the string.
std::string_view NextString(const uint8_t*& at) {
  const uint64_t size = LoadUnaligned<uint64_t>(at);
  const std::string_view text(reinterpret_cast<const char*>(at) + 8, size);
  at += 8 + size;
  return text;
}

bool IsFloat(uint32_t type) {
  return type == kGgufFloat32 || type == kGgufFloat64;
}

}  // namespace

const GgufFile::Entry* GgufFile::FindEntry(std::string_view key) const {
  const auto it = metadata_.find(key);
  return it == metadata_.end() ? nullptr : &it->second;
}

bool GgufFile::Has(std::string_view key) const {
  return FindEntry(key) != nullptr;
}

std::vector<std::string> GgufFile::Keys() const { return key_order_; }

void GgufFile::WrongValue(std::string_view key, const Entry& entry,
                          const std::string& found,
                          const char* expected) const {
  throw CorruptFile(StrCat(path(), ": offset ", entry.offset, ": metadata ",
                           key, ": found ", found, ", expected ", expected));
}

void GgufFile::WrongType(std::string_view key, const Entry& entry,
                         const char* expected) const {
  const std::string found =
      entry.type == kGgufArray
          ? StrCat("an array of type ", GgufTypeName(entry.array_type))
          : StrCat("type ", GgufTypeName(entry.type));
  WrongValue(key, entry, found, expected);
}

std::vector<std::string_view> GgufFile::DecodeStrings(
    const Entry& entry) const {
  const uint8_t* at = bytes_.data() + entry.offset;
  std::vector<std::string_view> strings;
  strings.reserve(entry.count);
  for (uint64_t i = 0; i < entry.count; ++i) {
    strings.push_back(NextString(at));
  }
  return strings;
}

std::vector<double> GgufFile::DecodeFloats(const Entry& entry) const {
  const uint8_t* at = bytes_.data() + entry.offset;
  const size_t bytes = GgufScalarBytes(entry.array_type);
  std::vector<double> values(entry.count);
  for (uint64_t i = 0; i < entry.count; ++i, at += bytes) {
    values[i] = std::get<double>(DecodeScalar(entry.array_type, at));
  }
  return values;
}

std::vector<int64_t> GgufFile::DecodeInts(std::string_view key,
                                          const Entry& entry) const {
  const uint8_t* at = bytes_.data() + entry.offset;
  const size_t bytes = GgufScalarBytes(entry.array_type);
  std::vector<int64_t> values(entry.count);
  for (uint64_t i = 0; i < entry.count; ++i, at += bytes) {
    const GgufValue value = DecodeScalar(entry.array_type, at);
    if (const auto* u = std::get_if<uint64_t>(&value)) {
      if (*u > uint64_t{std::numeric_limits<int64_t>::max()}) {
        WrongValue(key, entry, StrCat("the element ", *u),
                   "integers that fit 63 bits");
      }
      values[i] = static_cast<int64_t>(*u);
    } else if (const auto* s = std::get_if<int64_t>(&value)) {
      values[i] = *s;
    } else {
      values[i] = std::get<bool>(value) ? 1 : 0;
    }
  }
  return values;
}

std::optional<GgufValue> GgufFile::Get(std::string_view key) const {
  const Entry* entry = FindEntry(key);
  if (entry == nullptr) return std::nullopt;
  const uint8_t* at = bytes_.data() + entry->offset;
  if (entry->type == kGgufString) return NextString(at);
  if (entry->type != kGgufArray) return DecodeScalar(entry->type, at);
  GgufArray array;
  if (entry->array_type == kGgufString) {
    array.values = DecodeStrings(*entry);
  } else if (IsFloat(entry->array_type)) {
    array.values = DecodeFloats(*entry);
  } else {
    array.values = DecodeInts(key, *entry);
  }
  return array;
}

std::optional<GgufValue> GgufFile::GetScalar(std::string_view key,
                                             const char* expected) const {
  const Entry* entry = FindEntry(key);
  if (entry == nullptr) return std::nullopt;
  if (GgufScalarBytes(entry->type) == 0) WrongType(key, *entry, expected);
  return DecodeScalar(entry->type, bytes_.data() + entry->offset);
}

std::optional<uint64_t> GgufFile::GetUint(std::string_view key) const {
  constexpr const char* kExpected = "a non-negative integer";
  const std::optional<GgufValue> value = GetScalar(key, kExpected);
  if (!value) return std::nullopt;
  if (const auto* u = std::get_if<uint64_t>(&*value)) return *u;
  const Entry& entry = *FindEntry(key);
  if (const auto* s = std::get_if<int64_t>(&*value)) {
    if (*s < 0) WrongValue(key, entry, StrCat(*s), kExpected);
    return static_cast<uint64_t>(*s);
  }
  WrongType(key, entry, kExpected);
}

std::optional<double> GgufFile::GetFloat(std::string_view key) const {
  constexpr const char* kExpected = "a number";
  const std::optional<GgufValue> value = GetScalar(key, kExpected);
  if (!value) return std::nullopt;
  if (const auto* f = std::get_if<double>(&*value)) return *f;
  if (const auto* u = std::get_if<uint64_t>(&*value)) {
    return static_cast<double>(*u);
  }
  if (const auto* s = std::get_if<int64_t>(&*value)) {
    return static_cast<double>(*s);
  }
  WrongType(key, *FindEntry(key), kExpected);
}

std::optional<bool> GgufFile::GetBool(std::string_view key) const {
  constexpr const char* kExpected = "a bool";
  const std::optional<GgufValue> value = GetScalar(key, kExpected);
  if (!value) return std::nullopt;
  if (const auto* b = std::get_if<bool>(&*value)) return *b;
  WrongType(key, *FindEntry(key), kExpected);
}

std::optional<std::string_view> GgufFile::GetString(
    std::string_view key) const {
  const Entry* entry = FindEntry(key);
  if (entry == nullptr) return std::nullopt;
  if (entry->type != kGgufString) WrongType(key, *entry, "a string");
  const uint8_t* at = bytes_.data() + entry->offset;
  return NextString(at);
}

std::optional<std::vector<std::string_view>> GgufFile::GetStrings(
    std::string_view key) const {
  const Entry* entry = FindEntry(key);
  if (entry == nullptr) return std::nullopt;
  if (entry->type != kGgufArray || entry->array_type != kGgufString) {
    WrongType(key, *entry, "an array of strings");
  }
  return DecodeStrings(*entry);
}

std::optional<std::vector<double>> GgufFile::GetFloats(
    std::string_view key) const {
  const Entry* entry = FindEntry(key);
  if (entry == nullptr) return std::nullopt;
  if (entry->type != kGgufArray || !IsFloat(entry->array_type)) {
    WrongType(key, *entry, "an array of floats");
  }
  return DecodeFloats(*entry);
}

std::optional<std::vector<int64_t>> GgufFile::GetInts(
    std::string_view key) const {
  const Entry* entry = FindEntry(key);
  if (entry == nullptr) return std::nullopt;
  if (entry->type != kGgufArray || entry->array_type == kGgufString ||
      IsFloat(entry->array_type)) {
    WrongType(key, *entry, "an array of integers");
  }
  return DecodeInts(key, *entry);
}

}  // namespace gkv
