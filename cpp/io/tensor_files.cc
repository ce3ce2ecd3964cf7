#include "io/tensor_files.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/float16.h"

namespace gkv {
namespace {

// Far above any model that exists, far below where size products overflow.
constexpr size_t kMaxSize = size_t{1} << 30;

size_t StoredBytes(const TensorPlace& place) {
  if (place.form == TensorForm::kIntegers) {
    return place.rows * place.cols * sizeof(int64_t);
  }
  return place.rows * RowBytes(place.type, place.cols);
}

TensorType DeliveredType(const TensorPlace& place) {
  return place.form == TensorForm::kPlusOne ? TensorType::kF32 : place.type;
}

void AddOne(const TensorPlace& place, const uint8_t* in, uint8_t* out) {
  for (size_t i = 0; i < place.rows * place.cols; ++i) {
    const float value = 1.0f + FloatAt(place.type, in, i);
    std::memcpy(out + i * sizeof(value), &value, sizeof(value));
  }
}

void ConvertIntegers(const TensorPlace& place, const uint8_t* in,
                     uint8_t* out) {
  for (size_t i = 0; i < place.rows * place.cols; ++i) {
    int64_t stored;
    std::memcpy(&stored, in + i * sizeof(stored), sizeof(stored));
    const auto value = static_cast<float>(stored);
    std::memcpy(out + i * sizeof(value), &value, sizeof(value));
  }
}

void TransposeBlocks(const TensorPlace& place, const uint8_t* in,
                     uint8_t* out) {
  const size_t bytes = Info(place.type).bytes;
  const size_t block_rows = place.rows / place.blocks;
  for (size_t row = 0; row < place.rows; ++row) {
    const size_t block = row / block_rows;
    const uint8_t* column =
        in + (block * place.cols * block_rows + row % block_rows) * bytes;
    for (size_t col = 0; col < place.cols; ++col, out += bytes) {
      std::memcpy(out, column + col * block_rows * bytes, bytes);
    }
  }
}

}  // namespace

TensorFiles::TensorFiles(std::string description,
                         const std::vector<std::string>& paths,
                         const std::vector<TensorPlace>& places)
    : description_(std::move(description)), places_(places) {
  for (const std::string& path : paths) {
    files_.push_back(std::make_shared<const MappedFile>(path));
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    Check(places_[i]);
    if (!index_.emplace(places_[i].name, i).second) {
      throw InvalidArgument(StrCat(description_, ": tensor ", places_[i].name,
                                   " is listed twice"));
    }
  }
}

void TensorFiles::Check(const TensorPlace& place) const {
  const auto refuse = [&](const std::string& why) {
    throw InvalidArgument(
        StrCat(description_, ": tensor ", place.name, ": ", why));
  };
  if (place.file >= files_.size()) {
    refuse(StrCat("file ", place.file, ", expected one of ", files_.size()));
  }
  if (!IsFloat(place.type)) {
    refuse(
        StrCat("type ", Info(place.type).name, ", expected F32, F16 or BF16"));
  }
  if (place.form == TensorForm::kIntegers && place.type != TensorType::kF32) {
    refuse(
        StrCat("type ", Info(place.type).name, ", expected F32 of integers"));
  }
  if (place.rows == 0 || place.cols == 0 || place.rows > kMaxSize ||
      place.cols > kMaxSize) {
    refuse(StrCat("shape [", place.rows, ", ", place.cols, "], expected 1..",
                  kMaxSize, " rows and columns"));
  }
  if (place.form == TensorForm::kPlusOne && place.rows != 1) {
    refuse(StrCat(place.rows, " rows, expected a vector"));
  }
  if (place.blocks == 0 || place.rows % place.blocks != 0) {
    refuse(StrCat(place.rows, " rows, expected a multiple of ", place.blocks,
                  " blocks"));
  }
  const MappedFile& file = *files_[place.file];
  const size_t size = file.bytes().size();
  if (place.offset > size || StoredBytes(place) > size - place.offset) {
    throw CorruptFile(StrCat(file.path(), ": tensor ", place.name, " takes ",
                             StoredBytes(place), " bytes at ", place.offset,
                             ", expected them within the file's ", size));
  }
}

std::vector<std::string> TensorFiles::Names() const {
  std::vector<std::string> names;
  for (const TensorPlace& place : places_) names.push_back(place.name);
  return names;
}

const uint8_t* TensorFiles::DataOf(const TensorPlace& place) const {
  return files_[place.file]->bytes().data() + place.offset;
}

const uint8_t* TensorFiles::Convert(const TensorPlace& place) {
  const auto held = converted_.find(place.name);
  if (held != converted_.end()) return held->second.data();
  AlignedBuffer<uint8_t> bytes(place.rows *
                               RowBytes(DeliveredType(place), place.cols));
  if (place.form == TensorForm::kPlusOne) {
    AddOne(place, DataOf(place), bytes.data());
  } else if (place.form == TensorForm::kIntegers) {
    ConvertIntegers(place, DataOf(place), bytes.data());
  } else {
    TransposeBlocks(place, DataOf(place), bytes.data());
  }
  files_[place.file]->DropPages(place.offset, StoredBytes(place));
  return converted_.emplace(place.name, std::move(bytes)).first->second.data();
}

std::optional<TensorView> TensorFiles::Find(std::string_view name) {
  const auto found = index_.find(name);
  if (found == index_.end()) return std::nullopt;
  const TensorPlace& place = places_[found->second];
  TensorView view;
  view.name = place.name;
  view.type = DeliveredType(place);
  view.rows = place.rows;
  view.cols = place.cols;
  if (place.form == TensorForm::kAsStored) view.parts = place.blocks;
  view.data =
      place.form == TensorForm::kAsStored ? DataOf(place) : Convert(place);
  return view;
}

std::shared_ptr<const void> TensorFiles::Hold(const TensorView& view) const {
  const TensorPlace& place = places_[index_.find(view.name)->second];
  if (place.form != TensorForm::kAsStored) return nullptr;
  return files_[place.file];
}

void TensorFiles::Release(const TensorView& view, size_t begin, size_t end) {
  const TensorPlace& place = places_[index_.find(view.name)->second];
  if (place.form == TensorForm::kAsStored) {
    files_[place.file]->DropPages(place.offset + begin, end - begin);
  } else if (end == view.size_bytes()) {
    converted_.erase(view.name);
  }
}

// The places count, too: which bytes are which tensor is up to the caller.
std::optional<Hash128> TensorFiles::Identity() const {
  Hasher hasher;
  for (const auto& file : files_) hasher.UpdateValue(file->identity());
  for (const TensorPlace& place : places_) {
    for (const uint64_t value :
         {uint64_t{place.name.size()}, uint64_t{place.file}, place.offset,
          static_cast<uint64_t>(place.type), uint64_t{place.rows},
          uint64_t{place.cols}, static_cast<uint64_t>(place.form),
          uint64_t{place.blocks}}) {
      hasher.UpdateValue(value);
    }
    hasher.Update(AsBytes(place.name));
  }
  return hasher.Finish();
}

bool TensorFiles::Settle() const {
  return std::all_of(files_.begin(), files_.end(),
                     [](const auto& file) { return file->Settle(); });
}

}  // namespace gkv
