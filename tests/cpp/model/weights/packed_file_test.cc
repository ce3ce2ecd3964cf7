#include "model/weights/packed_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/says.h"
#include "gtest/gtest.h"
#include "io/temp_folder.h"
#include "ops/matmul.h"

namespace gkv {
namespace {

constexpr Hash128 kFingerprint = {0x1122334455667788u, 0x99AABBCCDDEEFF00u};

std::vector<PackedTensor> Tensors() {
  std::vector<PackedTensor> tensors(3);
  tensors[0].name = "matrix";
  tensors[0].type = TensorType::kQ8_0;
  tensors[0].rows = 100;  // 7 groups
  tensors[0].cols = 64;
  tensors[0].piece_bytes = 3 * GroupBytes(TensorType::kQ8_0, 64);
  tensors[1].name = "norm";
  tensors[1].is_vector = true;
  tensors[1].rows = 1;
  tensors[1].cols = 7;
  tensors[1].piece_bytes = 7 * sizeof(float);
  tensors[2].name = "other";
  tensors[2].type = TensorType::kF16;
  tensors[2].rows = 16;
  tensors[2].cols = 3;
  tensors[2].piece_bytes = 1000;
  return tensors;
}

// Random bytes for each tensor.
std::vector<std::vector<uint8_t>> Contents() {
  std::mt19937 rng(1);
  std::vector<std::vector<uint8_t>> contents;
  for (const PackedTensor& tensor : Tensors()) {
    std::vector<uint8_t> bytes(tensor.size_bytes());
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng());
    contents.push_back(std::move(bytes));
  }
  return contents;
}

void Write(const std::string& path) {
  const auto contents = Contents();
  std::optional<PartFile> part =
      PartFile::Create(path, std::chrono::milliseconds(0));
  PackedFileWriter writer(*part, kFingerprint, Tensors());
  // In any order.
  for (size_t t = contents.size(); t-- > 0;) {
    const size_t size = writer.tensors()[t].piece_bytes;
    for (size_t piece = writer.tensors()[t].num_pieces(); piece-- > 0;) {
      const std::span<const uint8_t> rest =
          std::span(contents[t]).subspan(piece * size);
      writer.WritePiece(t, piece, rest.first(std::min(size, rest.size())));
    }
  }
  EXPECT_FALSE(writer.failed());
  writer.Finish();
  part->Publish();
}

PackedFile Open(const std::string& path,
                const Hash128& fingerprint = kFingerprint) {
  ThreadPool pool(1);
  PackedFile file(path, fingerprint);
  file.CheckAll(pool);
  return file;
}

// What opening and checking a file of these bytes says; empty if it opens.
std::string ErrorOf(const TempFolder& folder, const std::string& bytes) {
  WriteWhole(folder / "changed", bytes);
  try {
    Open(folder / "changed");
  } catch (const CorruptFile& error) {
    EXPECT_EQ(std::string(error.what()).find(folder / "changed: "), 0u)
        << error.what();
    return error.what();
  }
  return "";
}

TEST(PackedFileTest, GivesBackWhatWasWritten) {
  TempFolder folder;
  Write(folder / "file");
  const PackedFile file = Open(folder / "file");
  EXPECT_EQ(file.size_bytes(), std::filesystem::file_size(folder / "file"));
  const auto contents = Contents();
  const auto expected = Tensors();
  for (size_t i = 0; i < expected.size(); ++i) {
    const PackedTensor* tensor = file.Find(expected[i].name);
    ASSERT_NE(tensor, nullptr);
    EXPECT_EQ(tensor->type, expected[i].type);
    EXPECT_EQ(tensor->is_vector, expected[i].is_vector);
    EXPECT_EQ(tensor->rows, expected[i].rows);
    EXPECT_EQ(tensor->cols, expected[i].cols);
    ASSERT_EQ(tensor->size_bytes(), contents[i].size());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(file.data(*tensor)) % 64, 0u);
    EXPECT_EQ(
        std::memcmp(file.data(*tensor), contents[i].data(), contents[i].size()),
        0);
  }
  EXPECT_EQ(file.Find("no such"), nullptr);
}

TEST(PackedFileTest, ProgressReachesAllTensors) {
  TempFolder folder;
  Write(folder / "file");
  ThreadPool pool(2);
  size_t last = 0, sum = 0;
  PackedFile(folder / "file", kFingerprint)
      .CheckAll(pool, [&](size_t done, size_t total) {
        EXPECT_GT(done, last);
        EXPECT_LE(done, total);
        last = done;
      });
  for (const auto& bytes : Contents()) sum += bytes.size();
  EXPECT_EQ(last, sum);
}

TEST(PackedFileTest, StaysWhenTheFileIsUnlinkedOrReplaced) {
  TempFolder folder;
  Write(folder / "file");
  const PackedFile file = Open(folder / "file");
  const PackedTensor& tensor = *file.Find("matrix");
  std::filesystem::remove(folder / "file");
  WriteWhole(folder / "file", "x");
  EXPECT_EQ(
      std::memcmp(file.data(tensor), Contents()[0].data(), tensor.size_bytes()),
      0);
}

TEST(PackedFileTest, EveryChangedByteIsNoticed) {
  TempFolder folder;
  Write(folder / "file");
  const std::string sound = ReadWhole(folder / "file");
  EXPECT_EQ(ErrorOf(folder, sound), "");
  const PackedFile file = Open(folder / "file");
  // Bytes between the tensors mean nothing.
  std::vector<bool> counts(sound.size(), false);
  size_t first = sound.size();
  for (const PackedTensor& plain : Tensors()) {
    const PackedTensor& tensor = *file.Find(plain.name);
    for (size_t i = 0; i < tensor.size_bytes(); ++i) {
      counts[tensor.offset + i] = true;
    }
    first = std::min<size_t>(first, tensor.offset);
  }
  uint64_t header_bytes;
  std::memcpy(&header_bytes, &sound[24], sizeof(header_bytes));
  ASSERT_LE(header_bytes, first);
  for (size_t i = 0; i < header_bytes; ++i) counts[i] = true;
  for (size_t i = 0; i < sound.size(); ++i) {
    std::string changed = sound;
    changed[i] = static_cast<char>(changed[i] ^ (1 << i % 8));
    ASSERT_EQ(ErrorOf(folder, changed).empty(), !counts[i]) << "byte " << i;
  }
}

TEST(PackedFileTest, EachTensorIsCheckedByItself) {
  TempFolder folder;
  ThreadPool pool(2);
  for (const PackedTensor& damaged : Tensors()) {
    Write(folder / "file");
    std::string bytes = ReadWhole(folder / "file");
    const PackedFile sound(folder / "file", kFingerprint);
    bytes[sound.Find(damaged.name)->offset] ^= 1;
    WriteWhole(folder / "file", bytes);
    const PackedFile file(folder / "file", kFingerprint);
    for (const PackedTensor& tensor : Tensors()) {
      const PackedFile::Tensor& found = *file.Find(tensor.name);
      EXPECT_FALSE(found.is_sound);
      EXPECT_EQ(file.Check(found, pool), tensor.name != damaged.name);
      EXPECT_EQ(found.is_sound, tensor.name != damaged.name);
    }
  }
}

// In whatever portions, and with what is left to Check. Damage is left to it.
TEST(PackedFileTest, CheckedAheadIsCheckedTheSame) {
  TempFolder folder;
  ThreadPool pool(2);
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto long_time = std::chrono::hours(1);
  Write(folder / "file");
  const PackedFile sound(folder / "file", kFingerprint);
  EXPECT_TRUE(sound.CheckAhead(now() - long_time));
  EXPECT_FALSE(sound.CheckAhead(now() + long_time));
  EXPECT_FALSE(sound.CheckAhead(now() - long_time));  // nothing is left
  for (const PackedTensor& tensor : Tensors()) {
    EXPECT_TRUE(sound.Find(tensor.name)->is_sound) << tensor.name;
    EXPECT_TRUE(sound.Check(*sound.Find(tensor.name), pool));
  }
  for (const PackedTensor& damaged : Tensors()) {
    const PackedFile intact(folder / "file", kFingerprint);
    std::string bytes = ReadWhole(folder / "file");
    const PackedTensor& at = *intact.Find(damaged.name);
    bytes[at.offset + at.size_bytes() - 1] ^= 1;
    WriteWhole(folder / "file", bytes);
    const PackedFile file(folder / "file", kFingerprint);
    // A piece, or a few, at a time; some go by without.
    for (int i = 0; i < 3; ++i) {
      (void)file.CheckAhead(now() + std::chrono::microseconds(i));
    }
    if (damaged.name != Tensors().front().name) {
      EXPECT_FALSE(file.CheckAhead(now() + long_time));
    }
    EXPECT_FALSE(file.Find(damaged.name)->is_sound);
    for (const PackedTensor& tensor : Tensors()) {
      const PackedFile::Tensor& found = *file.Find(tensor.name);
      EXPECT_EQ(file.Check(found, pool), tensor.name != damaged.name);
      EXPECT_EQ(found.is_sound, tensor.name != damaged.name);
    }
    bytes[at.offset + at.size_bytes() - 1] ^= 1;
    WriteWhole(folder / "file", bytes);
  }
}

// A file that another process has put in its place meanwhile stays.
TEST(PackedFileTest, OnlyTheDamagedFileIsDeleted) {
  TempFolder folder;
  Write(folder / "file");
  const PackedFile file(folder / "file", kFingerprint);
  const PackedFile::Tensor& tensor = *file.Find("matrix");
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(std::filesystem::exists(folder / "file"), i != 1);
    if (i == 2) WriteWhole(folder / "file", "another");
    try {
      file.DeleteDamaged(tensor);
    } catch (const CorruptFile& error) {
      EXPECT_TRUE(Says(error.what(), {folder / "file", "tensor matrix", "sum"}));
    }
    if (i == 1) WriteWhole(folder / "file", "another");
  }
  EXPECT_EQ(ReadWhole(folder / "file"), "another");
}

// Instead of the signal that touching its bytes would be.
TEST(PackedFileTest, AFileThatIsTruncatedWhileItIsOpenIsDamaged) {
  TempFolder folder;
  ThreadPool pool(1);
  Write(folder / "file");
  const PackedFile file(folder / "file", kFingerprint);
  chmod((folder / "file").c_str(), 0600);
  std::filesystem::resize_file(folder / "file", 0);
  EXPECT_FALSE(file.Check(*file.Find("matrix"), pool));
}

TEST(PackedFileTest, EveryOtherLengthIsNoticed) {
  TempFolder folder;
  Write(folder / "file");
  const std::string sound = ReadWhole(folder / "file");
  for (size_t size = 0; size < sound.size(); size += 1 + size / 50) {
    ASSERT_NE(ErrorOf(folder, sound.substr(0, size)), "") << size;
  }
  EXPECT_NE(ErrorOf(folder, sound.substr(0, sound.size() - 1)), "");
  EXPECT_NE(ErrorOf(folder, sound + '\0'), "");
}

// A header that lies about places, with a hash that fits.
TEST(PackedFileTest, SoundHashesDoNotMakeASoundTable) {
  TempFolder folder;
  Write(folder / "file");
  const std::string sound = ReadWhole(folder / "file");
  uint64_t header_bytes;
  std::memcpy(&header_bytes, &sound[24], sizeof(header_bytes));
  std::mt19937_64 rng(3);
  size_t refused = 0;
  constexpr uint64_t kValues[] = {
      0, 1, 64, 1 << 20, ~uint64_t{0}, uint64_t{1} << 63, uint64_t{1} << 32};
  for (size_t at = 16; at + 8 <= header_bytes - 16; ++at) {
    for (const uint64_t value : kValues) {
      std::string changed = sound;
      std::memcpy(&changed[at], &value, sizeof(value));
      const size_t fields = header_bytes - 16;
      const Hash128 hash =
          HashBytes({reinterpret_cast<const uint8_t*>(changed.data()), fields});
      std::memcpy(&changed[fields], &hash.low, 8);
      std::memcpy(&changed[fields + 8], &hash.high, 8);
      refused += !ErrorOf(folder, changed).empty();
    }
  }
  EXPECT_GT(refused, 1000u);  // some only rename a tensor
}

// Large pages begin as zeros; no thread's zeros overtake another's piece.
TEST(PackedFileTest, PiecesOfManyThreadsShareLargePages) {
  std::vector<PackedTensor> tensors(1);
  tensors[0].name = "matrix";
  tensors[0].type = TensorType::kQ8_0;
  tensors[0].rows = 7000;
  tensors[0].cols = 1024;
  tensors[0].piece_bytes = 5 * GroupBytes(TensorType::kQ8_0, 1024);
  std::vector<uint8_t> bytes(tensors[0].size_bytes());
  ASSERT_GT(bytes.size(), size_t{6} << 20);
  std::mt19937 rng(2);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng() | 1);
  TempFolder folder;
  ThreadPool pool(4);
  for (int round = 0; round < 3; ++round) {
    std::optional<PartFile> part =
        PartFile::Create(folder / "file", std::chrono::milliseconds(0));
    PackedFileWriter writer(*part, kFingerprint, tensors);
    const size_t size = tensors[0].piece_bytes;
    pool.Run(writer.tensors()[0].num_pieces(), [&](size_t piece, size_t) {
      const std::span<const uint8_t> rest =
          std::span(bytes).subspan(piece * size);
      writer.WritePiece(0, piece, rest.first(std::min(size, rest.size())));
    });
    writer.Finish();
    part->Publish();
    PackedFile file(folder / "file", kFingerprint);
    file.CheckAll(pool);
    const PackedTensor* tensor = file.Find("matrix");
    const std::string whole = ReadWhole(folder / "file");
    ASSERT_EQ(whole.size(), tensor->offset + bytes.size());
    EXPECT_EQ(std::memcmp(whole.data() + tensor->offset, bytes.data(),
                          bytes.size()),
              0);
  }
}

TEST(PackedFileTest, OtherVersionsAndFingerprintsAreRefused) {
  TempFolder folder;
  Write(folder / "file");
  const std::string sound = ReadWhole(folder / "file");
  for (const size_t field : {8, 12}) {
    std::string changed = sound;
    ++changed[field];
    EXPECT_NE(ErrorOf(folder, changed).find("expected 1 and 2"),
              std::string::npos);
  }
  EXPECT_NE(ErrorOf(folder, "not packed weights at all").find("not a file of"),
            std::string::npos);
  EXPECT_THROW(Open(folder / "file", {1, 2}), CorruptFile);
  EXPECT_NE(PackedFileName({1, 2}), PackedFileName({2, 1}));
}

TEST(PackedFileTest, FilesOfOtherUsersAreRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to give a file away";
  TempFolder folder;
  Write(folder / "file");
  ASSERT_EQ(chown((folder / "file").c_str(), 12345, 0), 0);
  try {
    Open(folder / "file");
    ADD_FAILURE() << "was opened";
  } catch (const CorruptFile& error) {
    EXPECT_NE(std::string(error.what()).find("owned by user 12345"),
              std::string::npos);
  }
}

TEST(PackedFileTest, MissingIsAnIoError) {
  TempFolder folder;
  try {
    Open(folder / "file");
    ADD_FAILURE() << "was opened";
  } catch (const IoError& error) {
    EXPECT_EQ(error.error_number(), ENOENT);
  }
}

}  // namespace
}  // namespace gkv
