#include "model/weights/packed_file.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/hex.h"
#include "base/process.h"
#include "io/byte_io.h"
#include "ops/matmul.h"

namespace gkv {
namespace {

constexpr char kMagic[8] = {'G', 'K', 'V', 'P', 'A', 'C', 'K', 'D'};
// The alignment of tensors in the file, and so in memory.
constexpr uint64_t kTensorAlignment = 64;
// The most bytes of a header, enough for thousands of tensors.
constexpr uint64_t kMaxHeaderBytes = uint64_t{1} << 24;
constexpr uint32_t kMaxNameBytes = 256;

// Encodes all of the header but the hash at its end, which `header_bytes`
// includes.
std::vector<uint8_t> EncodeHeader(const Hash128& fingerprint,
                                  std::span<const PackedTensor> tensors,
                                  uint64_t header_bytes, uint64_t file_bytes) {
  ByteWriter out;
  for (const char c : kMagic) out.Write(c);
  out.Write(kPackedFileVersion);
  out.Write(kPackedLayoutVersion);
  out.Write(file_bytes);
  out.Write(header_bytes);
  out.Write(fingerprint);
  out.Write(uint64_t{tensors.size()});
  for (const PackedTensor& tensor : tensors) {
    out.Write(static_cast<uint32_t>(tensor.name.size()));
    out.WriteBytes(AsBytes(tensor.name));
    out.Write(static_cast<uint32_t>(tensor.type));
    out.Write(static_cast<uint32_t>(tensor.is_vector));
    out.Write(tensor.rows);
    out.Write(tensor.cols);
    out.Write(tensor.piece_bytes);
    out.Write(tensor.offset);
    out.Write(tensor.sum);
  }
  return std::move(out.bytes());
}

PackedTensor DecodeTensor(ByteReader& in) {
  PackedTensor tensor;
  const auto name_bytes = in.Read<uint32_t>("length of a name");
  if (name_bytes > kMaxNameBytes) {
    throw CorruptFile(StrCat("found a name of ", name_bytes,
                             " bytes, expected at most ", kMaxNameBytes));
  }
  const auto name = in.ReadBytes(name_bytes, "name");
  tensor.name.assign(name.begin(), name.end());
  const auto type = in.Read<uint32_t>("type");
  if (FindTensorType(type) == nullptr) {
    throw CorruptFile(StrCat("tensor ", tensor.name, ": unknown type ", type));
  }
  tensor.type = static_cast<TensorType>(type);
  tensor.is_vector = in.Read<uint32_t>("kind") != 0;
  tensor.rows = in.Read<uint64_t>("rows");
  tensor.cols = in.Read<uint64_t>("columns");
  tensor.piece_bytes = in.Read<uint64_t>("piece size");
  tensor.offset = in.Read<uint64_t>("offset");
  tensor.sum = in.Read<Hash128>("sum");
  return tensor;
}

// Whether shape and place of a tensor are sound, in a file of `file_bytes`.
bool IsSound(const PackedTensor& tensor, uint64_t header_bytes,
             uint64_t file_bytes) {
  constexpr uint64_t kMaxDimension = uint64_t{1} << 30;
  if (tensor.rows == 0 || tensor.cols == 0 || tensor.rows > kMaxDimension ||
      tensor.cols > kMaxDimension || tensor.piece_bytes == 0 ||
      tensor.piece_bytes > file_bytes ||
      tensor.cols % Info(tensor.type).values != 0) {
    return false;
  }
  if (tensor.is_vector &&
      (tensor.rows != 1 || tensor.type != TensorType::kF32)) {
    return false;
  }
  // The division comes first, so no product below can overflow.
  const uint64_t row_bytes = RowBytes(tensor.type, tensor.cols);
  return tensor.rows <= file_bytes / row_bytes &&
         tensor.size_bytes() <= file_bytes &&
         tensor.offset % kTensorAlignment == 0 &&
         tensor.offset >= header_bytes &&
         tensor.offset <= file_bytes - tensor.size_bytes();
}

std::string DamageOf(const PackedTensor& tensor) {
  return StrCat("tensor ", tensor.name, " does not match its sum");
}

}  // namespace

uint64_t PackedTensor::size_bytes() const {
  if (is_vector) return cols * sizeof(float);
  return NumGroups(rows) * GroupBytes(type, cols);
}

std::string PackedFileName(const Hash128& fingerprint) {
  return StrCat(fingerprint.Hex(), ".v", kPackedFileVersion, "-",
                kPackedLayoutVersion, ".gkvpack");
}

std::optional<Hash128> FingerprintOf(std::string_view file_name) {
  Hash128 hash;
  if (!ParseHex(file_name.substr(0, 16), hash.high) ||
      !ParseHex(file_name.substr(16, 16), hash.low)) {
    return std::nullopt;
  }
  return PackedFileName(hash) == file_name ? std::optional(hash)
                                           : std::nullopt;
}

PackedFileWriter::PackedFileWriter(PartFile& file, const Hash128& fingerprint,
                                   std::vector<PackedTensor> tensors)
    : file_(file), fingerprint_(fingerprint), tensors_(std::move(tensors)) {
  const size_t fields = EncodeHeader(fingerprint_, tensors_, 0, 0).size();
  header_bytes_ = fields + sizeof(Hash128);
  uint64_t end = header_bytes_;
  for (PackedTensor& tensor : tensors_) {
    tensor.offset = RoundUp(end, kTensorAlignment);
    end = tensor.offset + tensor.size_bytes();
    pieces_.emplace_back(tensor.num_pieces());
  }
  file_bytes_ = end;
  file_.Reserve(file_bytes_);
  if (file_bytes_ >= kLargePage) {
    zeros_.resize(kLargePage);
    begun_ = std::vector<std::once_flag>(CeilDiv(file_bytes_, kLargePage));
  }
}

int PackedFileWriter::BeginPages(uint64_t offset, uint64_t size) noexcept {
  int error = 0;
  for (uint64_t page = offset / kLargePage;
       page < begun_.size() && page * kLargePage < offset + size; ++page) {
    std::call_once(begun_[page], [&] {
      const uint64_t begin = page * kLargePage;
      error = file_.WriteAt(
          begin, std::span(zeros_).first(
                     std::min(kLargePage, file_bytes_ - begin)));
    });
    if (error != 0) break;
  }
  return error;
}

void PackedFileWriter::WritePiece(size_t tensor, size_t piece,
                                  std::span<const uint8_t> bytes) noexcept {
  if (failed()) return;
  const PackedTensor& to = tensors_[tensor];
  pieces_[tensor][piece] = HashBytes(bytes);
  const uint64_t offset = to.offset + piece * to.piece_bytes;
  int error = BeginPages(offset, bytes.size());
  if (error == 0) error = file_.WriteAt(offset, bytes);
  int none = 0;
  if (error != 0) error_.compare_exchange_strong(none, error);
}

void PackedFileWriter::ThrowIfFailed() const {
  if (const int error = error_.load(); error != 0) {
    throw IoError(StrCat("packed weights: ", std::strerror(error)), error, "");
  }
}

void PackedFileWriter::Finish() {
  ThrowIfFailed();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    tensors_[i].sum = HashBytes(AsBytes(pieces_[i]));
  }
  ByteWriter out;
  out.WriteBytes(
      EncodeHeader(fingerprint_, tensors_, header_bytes_, file_bytes_));
  out.Write(HashBytes(out.bytes()));
  error_ = file_.WriteAt(0, out.bytes());
  ThrowIfFailed();
}

PackedFile::PackedFile(const std::string& path, const Hash128& fingerprint)
    : file_(path) {
  PreferLargePages(file_.bytes().data(), file_.bytes().size());
  CheckOwner();
  try {
    ReadHeader(fingerprint);
  } catch (const CorruptFile& error) {
    ThrowDamaged(error.what());
  }
}

void PackedFile::ThrowDamaged(const std::string& what) const {
  throw CorruptFile(StrCat(path(), ": ", what));
}

// The hashes are sums, not signatures: a user who may write the file could put
// other weights there.
void PackedFile::CheckOwner() const {
  if (file_.owner() == UserId() || file_.owner() == 0) return;
  ThrowDamaged(StrCat("owned by user ", file_.owner(), ", expected ", UserId(),
                      " or root"));
}

void PackedFile::ReadHeader(const Hash128& fingerprint) {
  const std::span<const uint8_t> bytes = file_.bytes();
  ByteReader in(bytes);
  if (std::memcmp(in.ReadBytes(sizeof(kMagic), "magic").data(), kMagic,
                  sizeof(kMagic)) != 0) {
    throw CorruptFile("not a file of packed weights");
  }
  const auto version = in.Read<uint32_t>("version");
  const auto layout = in.Read<uint32_t>("layout version");
  if (version != kPackedFileVersion || layout != kPackedLayoutVersion) {
    throw CorruptFile(StrCat("found version ", version, " and layout ", layout,
                             ", expected ", kPackedFileVersion, " and ",
                             kPackedLayoutVersion));
  }
  const auto file_bytes = in.Read<uint64_t>("file size");
  if (file_bytes != bytes.size()) {
    throw CorruptFile(
        StrCat("found ", bytes.size(), " bytes, expected ", file_bytes));
  }
  const auto header_bytes = in.Read<uint64_t>("header size");
  if (header_bytes < sizeof(Hash128) || header_bytes > kMaxHeaderBytes ||
      header_bytes > file_bytes) {
    throw CorruptFile(StrCat("found a header of ", header_bytes, " bytes"));
  }
  const size_t fields = header_bytes - sizeof(Hash128);
  ByteReader end(bytes, fields);
  if (end.Read<Hash128>("header hash") != HashBytes(bytes.first(fields))) {
    throw CorruptFile("the header does not match its hash");
  }
  if (in.Read<Hash128>("fingerprint") != fingerprint) {
    throw CorruptFile(
        StrCat("weights of another fingerprint, expected ", fingerprint.Hex()));
  }
  const auto count = in.Read<uint64_t>("number of tensors");
  for (uint64_t i = 0; i < count; ++i) {
    PackedTensor tensor = DecodeTensor(in);
    if (!IsSound(tensor, header_bytes, file_bytes)) {
      throw CorruptFile(StrCat("tensor ", tensor.name,
                               ": shape and place do not fit the file"));
    }
    const std::string name = tensor.name;
    if (!tensors_.try_emplace(name, std::move(tensor)).second) {
      throw CorruptFile(StrCat("tensor ", name, " is there twice"));
    }
  }
}

// Returns zero if the bytes cannot be read: touching them would end the
// process.
Hash128 PackedFile::HashOf(const Tensor& tensor, size_t piece) const {
  const uint64_t begin = piece * tensor.piece_bytes;
  const uint64_t size =
      std::min(tensor.piece_bytes, tensor.size_bytes() - begin);
  if (!file_.Populate(tensor.offset + begin, size)) return {};
  return HashBytes({data(tensor) + begin, size});
}

bool PackedFile::Check(const Tensor& tensor, ThreadPool& pool) const {
  std::vector<Hash128> hashes;
  {
    const MutexLock lock(tensor.mutex);
    hashes = tensor.ahead;
  }
  const size_t known = hashes.size();
  hashes.resize(tensor.num_pieces());
  pool.Run(hashes.size() - known, [&](size_t i, size_t) {
    hashes[known + i] = HashOf(tensor, known + i);
  });
  if (HashBytes(AsBytes(hashes)) != tensor.sum) return false;
  tensor.is_sound.store(true, std::memory_order_release);
  return true;
}

bool PackedFile::CheckAhead(
    std::chrono::steady_clock::time_point deadline) const {
  for (const auto& [name, tensor] : tensors_) {
    if (tensor.is_sound.load(std::memory_order_acquire)) continue;
    MutexLock lock(tensor.mutex);
    while (tensor.ahead.size() < tensor.num_pieces()) {
      if (std::chrono::steady_clock::now() >= deadline) return true;
      // The lock is held for moments only, since a fork() waits for it. Another
      // thread may be quicker meanwhile.
      const size_t piece = tensor.ahead.size();
      lock.Unlock();
      const Hash128 hash = HashOf(tensor, piece);
      lock.Lock();
      if (tensor.ahead.size() == piece) tensor.ahead.push_back(hash);
    }
    if (HashBytes(AsBytes(tensor.ahead)) != tensor.sum) continue;
    tensor.is_sound.store(true, std::memory_order_release);
  }
  return false;
}

void PackedFile::CheckAll(ThreadPool& pool, const Progress& progress) const {
  size_t done = 0;
  for (const auto& [name, tensor] : tensors_) {
    if (!Check(tensor, pool)) ThrowDamaged(DamageOf(tensor));
    done += tensor.size_bytes();
    if (progress) progress(done, size_bytes());
  }
}

void PackedFile::DeleteDamaged(const Tensor& tensor) const {
  const bool gone =
      !file_.IsInPlace() || Directory::Working().Remove(path()) == 0;
  ThrowDamaged(StrCat(DamageOf(tensor),
                      gone ? "; the file was deleted, load the model again"
                           : "; delete the file and load the model again"));
}

bool PackedFile::CanDelete() const {
  const std::string folder =
      std::filesystem::path(path()).parent_path().string();
  return file_.owner() == UserId() && MayChangeFolder(folder);
}

const PackedFile::Tensor* PackedFile::Find(std::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

}  // namespace gkv
