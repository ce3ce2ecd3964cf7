// The layout of a file (GGUF specification, version 3):
//   magic "GGUF", u32 version, u64 number of tensors, u64 number of metadata
//   entries; the entries; the tensor descriptions; padding; tensor data.
// Invariant after construction: the bytes of every Entry, and of every tensor
// whose type is known, lie inside the file.

#include "io/gguf.h"

#include <bit>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/rounding.h"
#include "io/byte_io.h"
#include "io/gguf_value_type.h"

namespace gkv {
namespace {

constexpr uint32_t kMinVersion = 2;
constexpr uint32_t kMaxVersion = 3;
constexpr uint64_t kMaxNameBytes = 65535;
constexpr uint32_t kMaxDimensions = 4;
constexpr uint64_t kMaxAlignment = 1048576;
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kMaxParts = 1000;
// The least bytes that a string, an entry or a tensor description takes. Counts
// above what the file can hold are refused before anything is read.
constexpr uint64_t kMinStringBytes = 8;
constexpr uint64_t kMinEntryBytes = 8 + 4 + 1;
constexpr uint64_t kMinTensorBytes = 8 + 4 + 8 + 4 + 8;

// Reads the header with errors that name the file.
class HeaderReader {
 public:
  HeaderReader(const std::string& path, std::span<const uint8_t> bytes)
      : path_(path), reader_(bytes) {}

  [[noreturn]] void Fail(size_t offset, const std::string& what) const {
    throw CorruptFile(StrCat(path_, ": offset ", offset, ": ", what));
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
  // Names end up in error messages, which are one line of text, so anything but
  // printable ASCII is refused here.
  std::string ReadName(const char* what) {
    const size_t offset = this->offset();
    const std::string_view name = ReadString(what);
    if (name.empty() || name.size() > kMaxNameBytes) {
      Fail(offset, StrCat("found a ", what, " of ", name.size(),
                          " bytes, expected 1..", kMaxNameBytes));
    }
    for (const char c : name) {
      if (c < 0x20 || c > 0x7E) {
        Fail(offset, StrCat("found the byte ", int{static_cast<uint8_t>(c)},
                            " in a ", what, ", expected printable ASCII"));
      }
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

  const std::string& path_;
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
  if (type == kGgufString) {
    (void)reader.ReadString("string");
    return;
  }
  const size_t bytes = GgufScalarBytes(type);
  if (bytes == 0) {
    reader.Fail(reader.offset() - sizeof(type),
                StrCat("found metadata type ", type, ", expected 0..12"));
  }
  reader.Skip(bytes, "metadata value");
}

void CheckArrayType(HeaderReader& reader, uint32_t type) {
  const size_t offset = reader.offset() - sizeof(type);
  if (type == kGgufArray) {
    reader.Fail(offset,
                "found an array of arrays, expected scalars or strings");
  }
  if (type != kGgufString && GgufScalarBytes(type) == 0) {
    reader.Fail(offset, StrCat("found array type ", type, ", expected 0..12"));
  }
}

// Requires: a checked type, and a count that ReadCount has checked.
void SkipArray(HeaderReader& reader, uint32_t type, uint64_t count) {
  if (type == kGgufString) {
    for (uint64_t i = 0; i < count; ++i) (void)reader.ReadString("string");
  } else {
    reader.Skip(count * GgufScalarBytes(type), "array");
  }
}

// Returns the ending of the name of a part; the first part is 0.
std::string PartEnding(uint64_t part, uint64_t count) {
  char ending[64];
  std::snprintf(ending, sizeof(ending), "-%05u-of-%05u.gguf",
                static_cast<unsigned>(part + 1), static_cast<unsigned>(count));
  return ending;
}

// The names, without kWeight, of stacks whose matrices models read one by one.
constexpr std::string_view kStacks[] = {"altup_proj", "altup_unembd_proj"};
constexpr std::string_view kWeight = ".weight";
constexpr uint64_t kMaxStack = 10;  // one digit

// The tensors after the last layer of a model of embeddings: their names in
// Ollama's files and in the format. A norm alone could be of any model.
constexpr std::string_view kFirstOfOllama = "dense.0.weight";
constexpr std::pair<std::string_view, std::string_view> kOtherNames[] = {
    {kFirstOfOllama, "dense_2.weight"},
    {"dense.1.weight", "dense_3.weight"},
    {"norm.weight", "output_norm.weight"},
};

// The scales of a layer's experts: their name in some of Ollama's files and in
// the format, after "blk.N.".
constexpr std::string_view kScaleOfOllama = "ffn_gate_inp.per_expert_scale";
constexpr std::string_view kScale = "ffn_down_exps.scale";

// Returns the length of the name without kWeight; 0 if the tensor is no stack.
size_t StackStem(const GgufFile::TensorInfo& tensor) {
  if (tensor.shape.size() != 3) return 0;
  for (const std::string_view stem : kStacks) {
    if (tensor.name == StrCat(stem, kWeight)) return stem.size();
  }
  return 0;
}

}  // namespace

GgufFile::GgufFile(const std::string& path)
    : path_(path),
      file_(std::make_shared<const MappedFile>(path)),
      bytes_(file_->bytes()) {
  ReadHeader();
  ReadParts();
}

GgufFile::GgufFile(const std::string& path, uint64_t number, uint64_t count)
    : path_(path),
      file_(std::make_shared<const MappedFile>(path)),
      bytes_(file_->bytes()) {
  ReadHeader();
  if (GetUint("split.no") == number && GetUint("split.count") == count) return;
  throw CorruptFile(StrCat(path, ": expected split.no ", number,
                           " and split.count ", count, ", found others"));
}

GgufFile::GgufFile(std::span<const uint8_t> bytes, std::string path)
    : path_(std::move(path)), bytes_(bytes) {
  ReadHeader();
}

void GgufFile::ReadHeader() {
  HeaderReader reader(path_, bytes_);
  CheckPreamble(reader, &version_);
  const uint64_t num_tensors =
      ReadCount(reader, "number of tensors", kMinTensorBytes);
  const uint64_t num_entries =
      ReadCount(reader, "number of metadata entries", kMinEntryBytes);
  ReadMetadata(reader.offset(), num_entries);
  ReadTensors(num_tensors);
  UniteNames();
}

void GgufFile::UniteNames() {
  const auto rename = [&](std::string_view other, const std::string& name) {
    const auto it = tensor_index_.find(other);
    if (it == tensor_index_.end() || tensor_index_.contains(name)) return;
    const size_t index = it->second;
    tensors_[index].name = name;
    tensor_index_.erase(it);
    tensor_index_.emplace(name, index);
  };
  if (tensor_index_.contains(kFirstOfOllama)) {
    for (const auto& [other, name] : kOtherNames) {
      rename(other, std::string(name));
    }
  }
  for (const TensorInfo& tensor : tensors_) {
    if (!tensor.name.ends_with(kScaleOfOllama)) continue;
    const std::string other = tensor.name;
    rename(other, StrCat(other.substr(0, other.size() - kScaleOfOllama.size()),
                         kScale));
  }
}

void GgufFile::ReadParts() {
  const uint64_t count = GetUint("split.count").value_or(1);
  if (count <= 1) return;
  const uint64_t number = GetUint("split.no").value_or(0);
  const std::string first = PartEnding(0, count);
  if (number != 0 || count > kMaxParts || !path_.ends_with(first)) {
    throw CorruptFile(StrCat(path_, ": found split.no ", number, " of ", count,
                             ", expected the first of at most ", kMaxParts,
                             " parts, with a name that ends with ", first));
  }
  const std::string stem = path_.substr(0, path_.size() - first.size());
  std::string missing;
  for (uint64_t part = 1; part < count; ++part) {
    const std::string path = stem + PartEnding(part, count);
    std::error_code ignored;
    if (std::filesystem::exists(path, ignored)) continue;
    missing += StrCat(missing.empty() ? "" : ", ", path);
  }
  if (!missing.empty()) throw IoError(missing, ENOENT);
  for (uint64_t part = 1; part < count; ++part) {
    AddPart(std::unique_ptr<GgufFile>(
        new GgufFile(stem + PartEnding(part, count), part, count)));
  }
  const uint64_t expected =
      GetUint("split.tensors.count").value_or(tensors_.size());
  if (tensors_.size() != expected) {
    throw CorruptFile(StrCat(path_, ": found ", tensors_.size(),
                             " tensors in all parts, expected ", expected));
  }
}

void GgufFile::AddPart(std::unique_ptr<GgufFile> part) {
  parts_.push_back(std::move(part));
  for (TensorInfo tensor : parts_.back()->tensors_) {
    tensor.part = parts_.size();
    if (!tensor_index_.emplace(tensor.name, tensors_.size()).second) {
      throw CorruptFile(StrCat(parts_.back()->path(), ": found tensor ",
                               tensor.name,
                               " again, expected each name once"));
    }
    tensors_.push_back(std::move(tensor));
  }
}

std::optional<Hash128> GgufFile::Identity() const {
  if (!file_) return std::nullopt;
  if (parts_.empty()) return file_->identity();
  Hasher hasher;
  hasher.UpdateValue(file_->identity());
  for (const auto& part : parts_) hasher.UpdateValue(part->file_->identity());
  return hasher.Finish();
}

bool GgufFile::Settle() const {
  bool settled = file_ && file_->Settle();
  for (const auto& part : parts_) settled = part->Settle() && settled;
  return settled;
}

void GgufFile::ReadMetadata(size_t offset, uint64_t count) {
  HeaderReader reader(path_, bytes_);
  reader.Skip(offset, "header");
  for (uint64_t i = 0; i < count; ++i) {
    const size_t at = reader.offset();
    std::string key = reader.ReadName("metadata key");
    Entry entry{reader.Read<uint32_t>("metadata type"), 0, 0, 0};
    if (entry.type == kGgufArray) {
      entry.array_type = reader.Read<uint32_t>("array type");
      CheckArrayType(reader, entry.array_type);
      const size_t bytes = GgufScalarBytes(entry.array_type);
      entry.count = ReadCount(reader, "length of an array",
                              bytes != 0 ? bytes : kMinStringBytes);
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
  HeaderReader reader(path_, bytes_);
  reader.Skip(tensors_offset_, "metadata");
  const uint64_t alignment =
      GetUint("general.alignment").value_or(kDefaultAlignment);
  if (!std::has_single_bit(alignment) || alignment > kMaxAlignment) {
    WrongValue("general.alignment", *FindEntry("general.alignment"),
               StrCat(alignment), "a power of two up to 1048576");
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
  const uint64_t data = RoundUp(reader.offset(), alignment);
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
  if (data > file_size || tensor.offset >= file_size - data) {
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
  if (type == nullptr) return {};  // Find() refuses the tensor
  if (tensor.shape[0] % type->values != 0) {
    return StrCat("found rows of ", tensor.shape[0],
                  " values, expected a multiple of ", type->values,
                  " for type ", type->name);
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

std::vector<std::string> GgufFile::Names() const {
  std::vector<std::string> names;
  for (const TensorInfo& tensor : tensors_) {
    const size_t stem = StackStem(tensor);
    if (stem == 0) {
      names.push_back(tensor.name);
      continue;
    }
    // Lists no more than a model could have, whatever the file states.
    for (uint64_t i = 0; i < std::min(tensor.shape[2], kMaxStack); ++i) {
      names.push_back(StrCat(tensor.name.substr(0, stem), ".", i, kWeight));
    }
  }
  return names;
}

std::optional<GgufFile::Place> GgufFile::FindPlace(
    std::string_view name) const {
  if (const auto it = tensor_index_.find(name); it != tensor_index_.end()) {
    return Place{&tensors_[it->second], 0};
  }
  for (const std::string_view stem : kStacks) {
    if (!name.starts_with(stem) || !name.ends_with(kWeight) ||
        name.size() != stem.size() + 2 + kWeight.size() ||
        name[stem.size()] != '.') {
      continue;
    }
    const auto it = tensor_index_.find(StrCat(stem, kWeight));
    const char digit = name[stem.size() + 1];
    if (it == tensor_index_.end() || digit < '0' || digit > '9') continue;
    const TensorInfo& tensor = tensors_[it->second];
    const uint64_t matrix = static_cast<uint64_t>(digit - '0');
    if (StackStem(tensor) == 0 || matrix >= tensor.shape[2]) continue;
    return Place{&tensor, tensor.size_bytes / tensor.shape[2] * matrix};
  }
  return std::nullopt;
}

std::optional<TensorView> GgufFile::Find(std::string_view name) {
  const std::optional<Place> place = FindPlace(name);
  if (!place) return std::nullopt;
  const TensorInfo& tensor = *place->tensor;
  const GgufFile& part = PartOf(tensor);
  const TensorTypeInfo* type = FindTensorType(tensor.type_id);
  if (type == nullptr) {
    std::string known;
    for (const TensorTypeInfo& info : kTensorTypes) {
      known += StrCat(known.empty() ? "" : ", ", info.name);
    }
    throw CorruptFile(StrCat(part.path(), ": offset ", tensor.offset,
                             ": tensor ", name, ": found type id ",
                             tensor.type_id, ", expected one of ", known));
  }
  const bool of_stack = tensor.name != name;
  const bool experts = HoldsExperts(name);
  const size_t dimensions = tensor.shape.size();
  if (dimensions > (experts ? 3 : 2) && !of_stack) {
    std::string shape;
    for (const uint64_t size : tensor.shape) {
      shape += StrCat(shape.empty() ? "" : " x ", size);
    }
    throw CorruptFile(StrCat(part.path(), ": offset ", tensor.offset,
                             ": tensor ", name, ": found the shape ", shape,
                             experts ? ", expected 2 or 3 dimensions"
                                     : ", expected 1 or 2 dimensions"));
  }
  TensorView view;
  view.name = std::string(name);
  view.type = type->type;
  view.parts = dimensions == 3 && !of_stack ? tensor.shape[2] : 1;
  view.rows = dimensions == 1 ? 1 : tensor.shape[1] * view.parts;
  view.cols = tensor.shape[0];
  view.data = part.bytes_.data() + tensor.offset + place->begin;
  return view;
}

std::shared_ptr<const void> GgufFile::Hold(const TensorView& view) const {
  return PartOf(*FindPlace(view.name)->tensor).file_;
}

void GgufFile::Release(const TensorView& view, size_t begin, size_t end) {
  if (!file_) return;
  const Place place = *FindPlace(view.name);
  PartOf(*place.tensor)
      .file_->DropPages(place.tensor->offset + place.begin + begin,
                        end - begin);
}

}  // namespace gkv
