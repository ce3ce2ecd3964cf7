// The layout of a file (GGUF specification, version 3):
//   magic "GGUF", u32 version, u64 number of tensors, u64 number of metadata
//   entries; the entries; the tensor descriptions; padding; tensor data.
// Invariant behind construction: every Entry's bytes and every tensor's bytes
// lie inside the file.

#include "io/gguf.h"

#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "base/error.h"
#include "io/byte_io.h"

namespace gkv {
namespace {

enum ValueType : uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};

// 0 for strings, arrays and unknown types.
size_t ScalarBytes(uint32_t type) {
  switch (type) {
    case kUint8:
    case kInt8:
    case kBool:
      return 1;
    case kUint16:
    case kInt16:
      return 2;
    case kUint32:
    case kInt32:
    case kFloat32:
      return 4;
    case kUint64:
    case kInt64:
    case kFloat64:
      return 8;
    default:
      return 0;
  }
}

constexpr uint32_t kMinVersion = 2;
constexpr uint32_t kMaxVersion = 3;
constexpr uint64_t kMaxNameBytes = 65535;
constexpr uint32_t kMaxDimensions = 4;
constexpr uint64_t kMaxAlignment = uint64_t{1} << 20;
constexpr uint64_t kDefaultAlignment = 32;
// Bytes that an entry or a tensor description takes at the least: counts above
// what the file can hold are refused before anything is read.
constexpr uint64_t kMinEntryBytes = 8 + 4 + 1;
constexpr uint64_t kMinTensorBytes = 8 + 4 + 8 + 4 + 8;

// Reads the header with errors that name the file.
class HeaderReader {
 public:
  explicit HeaderReader(const MappedFile& file)
      : file_(file), reader_(file.bytes()) {}

  [[noreturn]] void Fail(size_t offset, const std::string& what) const {
    throw CorruptFile(StrCat(file_.path(), ": offset ", offset, ": ", what));
  }

  template <typename T>
  T Read(const char* what) {
    Need(sizeof(T), what);
    return reader_.Read<T>(what);
  }
  std::string_view ReadString(const char* what) {
    const uint64_t size = Read<uint64_t>(what);
    Need(size, what);
    const auto bytes = reader_.ReadBytes(size, what);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  std::string ReadName(const char* what) {
    const size_t offset = this->offset();
    const std::string_view name = ReadString(what);
    if (name.empty() || name.size() > kMaxNameBytes) {
      Fail(offset, StrCat("found a ", what, " of ", name.size(),
                          " bytes, expected 1..", kMaxNameBytes));
    }
    return std::string(name);
  }
  void Skip(uint64_t bytes, const char* what) {
    Need(bytes, what);
    (void)reader_.ReadBytes(bytes, what);
  }
  size_t offset() const { return reader_.offset(); }
  size_t remaining() const { return reader_.remaining(); }

 private:
  void Need(uint64_t bytes, const char* what) const {
    if (bytes > reader_.remaining()) {
      Fail(reader_.offset(),
           StrCat("found ", reader_.remaining(),
                  " bytes before the end of the file, expected ", bytes, " of ",
                  what));
    }
  }

  const MappedFile& file_;
  ByteReader reader_;
};

void CheckPreamble(HeaderReader& reader, uint32_t* version) {
  const uint32_t magic = reader.Read<uint32_t>("magic");
  if (magic != 0x46554747u) {
    reader.Fail(
        0, StrCat("found the number ", magic, ", expected the magic 'GGUF'"));
  }
  *version = reader.Read<uint32_t>("version");
  if (*version >= kMinVersion && *version <= kMaxVersion) return;
  const uint32_t swapped = __builtin_bswap32(*version);
  if (swapped >= 1 && swapped <= 16) {
    reader.Fail(4, StrCat("found version ", swapped,
                          " in big-endian byte order, expected little-endian"));
  }
  reader.Fail(4, StrCat("found version ", *version, ", expected ", kMinVersion,
                        "..", kMaxVersion));
}

uint64_t ReadCount(HeaderReader& reader, const char* what, uint64_t min_bytes) {
  const size_t offset = reader.offset();
  const uint64_t count = reader.Read<uint64_t>(what);
  if (count > reader.remaining() / min_bytes) {
    reader.Fail(
        offset,
        StrCat("found ", count, " as ", what, ", expected at most ",
               reader.remaining() / min_bytes, " in what is left of the file"));
  }
  return count;
}

// Moves past one value of a scalar or string type.
void SkipValue(HeaderReader& reader, uint32_t type) {
  if (type == kString) {
    (void)reader.ReadString("string");
    return;
  }
  const size_t bytes = ScalarBytes(type);
  if (bytes == 0) {
    reader.Fail(reader.offset(),
                StrCat("found metadata type ", type, ", expected 0..12"));
  }
  reader.Skip(bytes, "metadata value");
}

void SkipArray(HeaderReader& reader, uint32_t type, uint64_t count) {
  if (type == kArray) {
    reader.Fail(reader.offset(),
                "found an array of arrays, expected scalars or strings");
  }
  if (type == kString) {
    for (uint64_t i = 0; i < count; ++i) (void)reader.ReadString("string");
    return;
  }
  const size_t bytes = ScalarBytes(type);
  if (bytes == 0) {
    reader.Fail(reader.offset(),
                StrCat("found array type ", type, ", expected 0..12"));
  }
  reader.Skip(count * bytes, "array");  // count was checked: no overflow
}

template <typename T>
T LoadAs(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

// One scalar, widened. Requires: a scalar type.
GgufValue DecodeScalar(uint32_t type, const uint8_t* at) {
  switch (type) {
    case kUint8:
      return uint64_t{*at};
    case kInt8:
      return int64_t{LoadAs<int8_t>(at)};
    case kUint16:
      return uint64_t{LoadAs<uint16_t>(at)};
    case kInt16:
      return int64_t{LoadAs<int16_t>(at)};
    case kUint32:
      return uint64_t{LoadAs<uint32_t>(at)};
    case kInt32:
      return int64_t{LoadAs<int32_t>(at)};
    case kFloat32:
      return double{LoadAs<float>(at)};
    case kBool:
      return *at != 0;
    case kUint64:
      return LoadAs<uint64_t>(at);
    case kInt64:
      return LoadAs<int64_t>(at);
    default:
      return LoadAs<double>(at);
  }
}

}  // namespace

GgufFile::GgufFile(const std::string& path) : file_(path) {
  HeaderReader reader(file_);
  CheckPreamble(reader, &version_);
  const uint64_t num_tensors =
      ReadCount(reader, "number of tensors", kMinTensorBytes);
  const uint64_t num_entries =
      ReadCount(reader, "number of metadata entries", kMinEntryBytes);
  ReadMetadata(reader.offset(), num_entries);
  ReadTensors(num_tensors);
}

void GgufFile::ReadMetadata(size_t offset, uint64_t count) {
  HeaderReader reader(file_);
  reader.Skip(offset, "header");
  for (uint64_t i = 0; i < count; ++i) {
    const size_t at = reader.offset();
    std::string key = reader.ReadName("metadata key");
    Entry entry{reader.Read<uint32_t>("metadata type"), 0, 0, 0};
    if (entry.type == kArray) {
      entry.array_type = reader.Read<uint32_t>("array type");
      const size_t element = ScalarBytes(entry.array_type);
      entry.count =
          ReadCount(reader, "length of an array", element ? element : 8);
      entry.offset = reader.offset();
      SkipArray(reader, entry.array_type, entry.count);
    } else {
      entry.offset = reader.offset();
      SkipValue(reader, entry.type);
    }
    if (!metadata_.emplace(key, entry).second) {
      reader.Fail(
          at, StrCat("found metadata ", key, " again, expected each key once"));
    }
    key_order_.push_back(std::move(key));
  }
  tensors_offset_ = reader.offset();
}

void GgufFile::ReadTensors(uint64_t count) {
  HeaderReader reader(file_);
  reader.Skip(tensors_offset_, "metadata");
  const uint64_t alignment =
      GetUint("general.alignment").value_or(kDefaultAlignment);
  if (!std::has_single_bit(alignment) || alignment > kMaxAlignment) {
    throw CorruptFile(StrCat(path(), ": metadata general.alignment is ",
                             alignment, ", expected a power of two up to ",
                             kMaxAlignment));
  }
  std::vector<size_t> positions;  // of each description, for error messages
  for (uint64_t i = 0; i < count; ++i) {
    positions.push_back(reader.offset());
    TensorInfo tensor;
    tensor.name = reader.ReadName("tensor name");
    const uint32_t dimensions = reader.Read<uint32_t>("tensor dimensions");
    if (dimensions < 1 || dimensions > kMaxDimensions) {
      reader.Fail(positions.back(),
                  StrCat("tensor ", tensor.name, ": found ", dimensions,
                         " dimensions, expected 1..", kMaxDimensions));
    }
    for (uint32_t d = 0; d < dimensions; ++d) {
      tensor.shape.push_back(reader.Read<uint64_t>("tensor shape"));
    }
    tensor.type_id = reader.Read<uint32_t>("tensor type");
    tensor.offset = reader.Read<uint64_t>("tensor offset");
    if (!tensor_index_.emplace(tensor.name, tensors_.size()).second) {
      reader.Fail(positions.back(), StrCat("found tensor ", tensor.name,
                                           " again, expected each name once"));
    }
    tensors_.push_back(std::move(tensor));
  }
  // A file of metadata alone may end without padding.
  const uint64_t data =
      (reader.offset() + alignment - 1) / alignment * alignment;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const std::string error = PlaceTensor(tensors_[i], data, alignment);
    if (!error.empty()) {
      reader.Fail(positions[i],
                  StrCat("tensor ", tensors_[i].name, ": ", error));
    }
  }
}

// Turns the offset within the data into one within the file and finds the
// size. Returns what is wrong, or nothing.
std::string GgufFile::PlaceTensor(TensorInfo& tensor, uint64_t data,
                                  uint64_t alignment) const {
  const uint64_t file_size = file_bytes();
  if (tensor.offset % alignment != 0) {
    return StrCat("found offset ", tensor.offset, ", expected a multiple of ",
                  alignment);
  }
  if (data > file_size || tensor.offset > file_size - data) {
    return StrCat("found its data ", tensor.offset, " bytes behind offset ",
                  data, ", expected it inside the file of ", file_size,
                  " bytes");
  }
  tensor.offset += data;
  uint64_t values = 1;
  for (const uint64_t size : tensor.shape) {
    if (size == 0 ||
        values > std::numeric_limits<uint64_t>::max() / 16 / size) {
      return StrCat("found a dimension of ", size,
                    ", expected a size from 1 to what fits the file");
    }
    values *= size;
  }
  tensor.size_bytes = 0;
  const TensorTypeInfo* type = FindTensorType(tensor.type_id);
  if (type == nullptr) return {};  // known to `Find`, which refuses it
  if (tensor.shape[0] % type->values != 0) {
    return StrCat("found rows of ", tensor.shape[0],
                  " values, expected a "
                  "multiple of ",
                  type->values, " for type ", type->name);
  }
  const uint64_t blocks = values / type->values;
  if (blocks > (file_size - tensor.offset) / type->bytes) {
    return StrCat("found ", file_size - tensor.offset,
                  " bytes before the end of the file, expected ", blocks,
                  " blocks of ", type->bytes, " bytes");
  }
  tensor.size_bytes = blocks * type->bytes;
  return {};
}

const GgufFile::Entry* GgufFile::FindEntry(std::string_view key) const {
  const auto it = metadata_.find(key);
  return it == metadata_.end() ? nullptr : &it->second;
}

bool GgufFile::Has(std::string_view key) const {
  return FindEntry(key) != nullptr;
}

std::vector<std::string> GgufFile::Keys() const { return key_order_; }

GgufValue GgufFile::Decode(const Entry& entry) const {
  const uint8_t* at = file_.bytes().data() + entry.offset;
  const auto next_string = [&] {
    const uint64_t size = LoadAs<uint64_t>(at);
    const std::string_view text(reinterpret_cast<const char*>(at) + 8, size);
    at += 8 + size;
    return text;
  };
  if (entry.type == kString) return next_string();
  if (entry.type != kArray) return DecodeScalar(entry.type, at);
  GgufArray array;
  if (entry.array_type == kString) {
    std::vector<std::string_view> strings;
    strings.reserve(entry.count);
    for (uint64_t i = 0; i < entry.count; ++i) {
      strings.push_back(next_string());
    }
    array.values = std::move(strings);
    return array;
  }
  const size_t bytes = ScalarBytes(entry.array_type);
  if (entry.array_type == kFloat32 || entry.array_type == kFloat64) {
    std::vector<double> values(entry.count);
    for (uint64_t i = 0; i < entry.count; ++i) {
      values[i] =
          std::get<double>(DecodeScalar(entry.array_type, at + i * bytes));
    }
    array.values = std::move(values);
    return array;
  }
  std::vector<int64_t> values(entry.count);
  for (uint64_t i = 0; i < entry.count; ++i) {
    const GgufValue value = DecodeScalar(entry.array_type, at + i * bytes);
    if (const auto* u = std::get_if<uint64_t>(&value)) {
      values[i] = static_cast<int64_t>(*u);
    } else if (const auto* s = std::get_if<int64_t>(&value)) {
      values[i] = *s;
    } else {
      values[i] = std::get<bool>(value) ? 1 : 0;
    }
  }
  array.values = std::move(values);
  return array;
}

void GgufFile::WrongType(std::string_view key, const char* expected) const {
  throw CorruptFile(StrCat(path(), ": metadata ", key,
                           " has another type, expected ", expected));
}

std::optional<GgufValue> GgufFile::Get(std::string_view key) const {
  const Entry* entry = FindEntry(key);
  if (entry == nullptr) return std::nullopt;
  return Decode(*entry);
}

std::optional<uint64_t> GgufFile::GetUint(std::string_view key) const {
  const std::optional<GgufValue> value = Get(key);
  if (!value) return std::nullopt;
  if (const auto* u = std::get_if<uint64_t>(&*value)) return *u;
  if (const auto* s = std::get_if<int64_t>(&*value); s && *s >= 0) {
    return static_cast<uint64_t>(*s);
  }
  WrongType(key, "a non-negative integer");
}

std::optional<double> GgufFile::GetFloat(std::string_view key) const {
  const std::optional<GgufValue> value = Get(key);
  if (!value) return std::nullopt;
  if (const auto* f = std::get_if<double>(&*value)) return *f;
  if (const auto* u = std::get_if<uint64_t>(&*value)) {
    return static_cast<double>(*u);
  }
  if (const auto* s = std::get_if<int64_t>(&*value)) {
    return static_cast<double>(*s);
  }
  WrongType(key, "a number");
}

std::optional<bool> GgufFile::GetBool(std::string_view key) const {
  const std::optional<GgufValue> value = Get(key);
  if (!value) return std::nullopt;
  if (const auto* b = std::get_if<bool>(&*value)) return *b;
  WrongType(key, "a bool");
}

std::optional<std::string_view> GgufFile::GetString(
    std::string_view key) const {
  const std::optional<GgufValue> value = Get(key);
  if (!value) return std::nullopt;
  if (const auto* s = std::get_if<std::string_view>(&*value)) return *s;
  WrongType(key, "a string");
}

template <typename T>
std::optional<std::vector<T>> GgufFile::GetArray(std::string_view key,
                                                 const char* expected) const {
  std::optional<GgufValue> value = Get(key);
  if (!value) return std::nullopt;
  if (auto* array = std::get_if<GgufArray>(&*value)) {
    if (auto* values = std::get_if<std::vector<T>>(&array->values)) {
      return std::move(*values);
    }
  }
  WrongType(key, expected);
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

std::vector<std::string> GgufFile::Names() const {
  std::vector<std::string> names;
  for (const TensorInfo& tensor : tensors_) names.push_back(tensor.name);
  return names;
}

std::optional<TensorView> GgufFile::Find(std::string_view name) {
  const auto it = tensor_index_.find(name);
  if (it == tensor_index_.end()) return std::nullopt;
  const TensorInfo& tensor = tensors_[it->second];
  const TensorTypeInfo* type = FindTensorType(tensor.type_id);
  if (type == nullptr) {
    std::string known;
    for (const TensorTypeInfo& info : kTensorTypes) {
      known += StrCat(known.empty() ? "" : ", ", info.name);
    }
    throw CorruptFile(StrCat(path(), ": tensor ", name, " has type id ",
                             tensor.type_id, ", expected one of ", known));
  }
  if (tensor.shape.size() > 2) {
    throw CorruptFile(StrCat(path(), ": tensor ", name, " has ",
                             tensor.shape.size(),
                             " dimensions, expected 1 or 2"));
  }
  TensorView view;
  view.name = std::string(name);
  view.type = type->type;
  view.rows = tensor.shape.size() == 2 ? tensor.shape[1] : 1;
  view.cols = tensor.shape[0];
  view.data = file_.bytes().data() + tensor.offset;
  return view;
}

void GgufFile::Release(const TensorView& view, size_t begin, size_t end) {
  const size_t offset =
      static_cast<size_t>(view.data - file_.bytes().data()) + begin;
  file_.DropPages(offset, end - begin);
}

}  // namespace gkv
