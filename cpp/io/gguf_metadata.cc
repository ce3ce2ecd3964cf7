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

// Returns one scalar, widened. Requires: a scalar type.
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

// Returns the string at `at`, and moves `at` past it.
std::string_view NextString(const uint8_t*& at) {
  const uint64_t size = LoadUnaligned<uint64_t>(at);
  const std::string_view text(reinterpret_cast<const char*>(at) + 8, size);
  at += 8 + size;
  return text;
}

// Widens an array without a look at each value's type: vocabularies have long
// ones.
template <typename From, typename To>
std::vector<To> Widen(const uint8_t* at, uint64_t count) {
  std::vector<To> values(count);
  for (uint64_t i = 0; i < count; ++i) {
    values[i] = static_cast<To>(LoadUnaligned<From>(at + i * sizeof(From)));
  }
  return values;
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
          ? StrCat("an array of type ", kGgufTypes[entry.array_type].name)
          : StrCat("type ", kGgufTypes[entry.type].name);
  WrongValue(key, entry, found, expected);
}

// Floats stay floats; all other scalars become integers.
GgufArray GgufFile::DecodeArray(std::string_view key,
                                const Entry& entry) const {
  const uint8_t* at = bytes_.data() + entry.offset;
  if (entry.array_type == kGgufString) {
    std::vector<std::string_view> strings(entry.count);
    for (std::string_view& string : strings) string = NextString(at);
    return {std::move(strings)};
  }
  const uint64_t count = entry.count;
  switch (entry.array_type) {
    case kGgufUint8:
      return {Widen<uint8_t, int64_t>(at, count)};
    case kGgufInt8:
      return {Widen<int8_t, int64_t>(at, count)};
    case kGgufUint16:
      return {Widen<uint16_t, int64_t>(at, count)};
    case kGgufInt16:
      return {Widen<int16_t, int64_t>(at, count)};
    case kGgufUint32:
      return {Widen<uint32_t, int64_t>(at, count)};
    case kGgufInt32:
      return {Widen<int32_t, int64_t>(at, count)};
    case kGgufInt64:
      return {Widen<int64_t, int64_t>(at, count)};
    case kGgufFloat32:
      return {Widen<float, double>(at, count)};
    case kGgufFloat64:
      return {Widen<double, double>(at, count)};
    default:
      break;
  }
  std::vector<int64_t> ints(count);
  for (uint64_t i = 0; i < count; ++i) {
    if (entry.array_type == kGgufBool) {
      ints[i] = at[i] != 0;
      continue;
    }
    const auto u = LoadUnaligned<uint64_t>(at + i * sizeof(uint64_t));
    if (u > uint64_t{std::numeric_limits<int64_t>::max()}) {
      WrongValue(key, entry, StrCat("the element ", u),
                 "integers that fit 63 bits");
    }
    ints[i] = static_cast<int64_t>(u);
  }
  return {std::move(ints)};
}

template <typename T>
std::optional<std::vector<T>> GgufFile::GetArray(std::string_view key,
                                                 const char* expected) const {
  const Entry* entry = FindEntry(key);
  if (entry == nullptr) return std::nullopt;
  if (entry->type == kGgufArray) {
    GgufArray array = DecodeArray(key, *entry);
    if (auto* values = std::get_if<std::vector<T>>(&array.values)) {
      return std::move(*values);
    }
  }
  WrongType(key, *entry, expected);
}

std::optional<GgufValue> GgufFile::Get(std::string_view key) const {
  const Entry* entry = FindEntry(key);
  if (entry == nullptr) return std::nullopt;
  const uint8_t* at = bytes_.data() + entry->offset;
  if (entry->type == kGgufString) return NextString(at);
  if (entry->type == kGgufArray) return DecodeArray(key, *entry);
  return DecodeScalar(entry->type, at);
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
  return GetArray<std::string_view>(key, "an array of strings");
}

std::optional<std::vector<double>> GgufFile::GetFloats(
    std::string_view key) const {
  return GetArray<double>(key, "an array of floats");
}

std::optional<std::vector<int64_t>> GgufFile::GetInts(
    std::string_view key) const {
  return GetArray<int64_t>(key, "an array of integers");
}

}  // namespace gkv
