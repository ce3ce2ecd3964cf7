#include "io/gguf.h"

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"
#include "io/gguf_builder.h"
#include "io/gguf_exercise.h"
#include "io/temp_folder.h"

namespace gkv {
namespace {

constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();

std::vector<uint8_t> Count(size_t size) {
  std::vector<uint8_t> bytes(size);
  std::iota(bytes.begin(), bytes.end(), uint8_t{0});
  return bytes;
}

// A bit of everything.
GgufBuilder Sound() {
  GgufBuilder builder;
  builder.Set("general.architecture", "gemma3")
      .Set("gemma3.block_count", uint32_t{2})
      .Set("gemma3.rope.freq_base", 10000.0f)
      .Set("tokenizer.ggml.add_bos_token", true)
      .Set("tokenizer.ggml.tokens", std::vector<std::string>{"<pad>", "", "ab"})
      .Set("tokenizer.ggml.scores", std::vector<float>{0, -1, 2})
      .Set("tokenizer.ggml.token_type", std::vector<int32_t>{3, 1, -1})
      .AddF32("norm.weight", 1, 5, {1, 2, 3, 4, 5})
      .AddTensor("embd.weight", TensorType::kQ8_0, 3, 64, Count(3 * 68))
      .AddRaw("future.weight", 39, {32, 4}, Count(77))
      .AddRaw("conv.weight", 0, {2, 3, 1, 2}, Count(48));
  return builder;
}

TEST(GgufTest, TensorsAsTheFileStatesThem) {
  const std::vector<uint8_t> bytes = Sound().Build();
  const GgufFile file(bytes, "x.gguf");
  EXPECT_EQ(file.version(), 3u);
  EXPECT_EQ(file.path(), "x.gguf");
  EXPECT_EQ(file.Description(), "x.gguf");
  EXPECT_EQ(file.file_bytes(), bytes.size());
  const std::vector<std::string> names = {"norm.weight", "embd.weight",
                                          "future.weight", "conv.weight"};
  EXPECT_EQ(file.Names(), names);
  ASSERT_EQ(file.tensors().size(), 4u);
  const GgufFile::TensorInfo& embd = file.tensors()[1];
  EXPECT_EQ(embd.name, "embd.weight");
  EXPECT_EQ(embd.type_id, 8u);
  EXPECT_EQ(embd.shape, (std::vector<uint64_t>{64, 3}));
  EXPECT_EQ(embd.size_bytes, 3u * 68);
  EXPECT_EQ(embd.offset % 32, 0u);
  EXPECT_EQ(file.tensors()[2].type_id, 39u);
  EXPECT_EQ(file.tensors()[2].size_bytes, 0u);
  EXPECT_EQ(file.tensors()[3].size_bytes, 48u);
}

TEST(GgufTest, FindsVectorsAndMatrices) {
  const std::vector<uint8_t> bytes = Sound().Build();
  GgufFile file(bytes, "x.gguf");
  const std::optional<TensorView> norm = file.Find("norm.weight");
  ASSERT_TRUE(norm);
  EXPECT_EQ(norm->name, "norm.weight");
  EXPECT_EQ(norm->type, TensorType::kF32);
  EXPECT_EQ(norm->rows, 1u);
  EXPECT_EQ(norm->cols, 5u);
  float values[5];
  std::memcpy(values, norm->data, sizeof(values));
  for (int i = 0; i < 5; ++i) EXPECT_EQ(values[i], static_cast<float>(i + 1));
  const std::optional<TensorView> embd = file.Find("embd.weight");
  ASSERT_TRUE(embd);
  EXPECT_EQ(embd->rows, 3u);
  EXPECT_EQ(embd->cols, 64u);
  ASSERT_EQ(embd->size_bytes(), 3u * 68);
  EXPECT_EQ(std::vector<uint8_t>(embd->data, embd->data + 3 * 68),
            Count(3 * 68));
  EXPECT_FALSE(file.Find("embd"));
  EXPECT_FALSE(file.Find(""));
}

TEST(GgufTest, OnDiskReadsAsInMemory) {
  const std::vector<uint8_t> bytes = Sound().Build();
  const TempFile on_disk(bytes);
  GgufFile file(on_disk.path());
  EXPECT_EQ(file.path(), on_disk.path());
  EXPECT_EQ(file.GetString("general.architecture"), "gemma3");
  const TensorView view = file.Find("embd.weight").value();
  // Dropped pages come back with the same content.
  file.Release(view, 0, view.size_bytes());
  EXPECT_EQ(std::vector<uint8_t>(view.data, view.data + view.size_bytes()),
            Count(3 * 68));
}

TEST(GgufTest, AMissingFileIsAnIoError) {
  try {
    GgufFile file("/nonexistent/x.gguf");
    FAIL();
  } catch (const IoError& error) {
    EXPECT_EQ(error.error_number(), ENOENT);
    EXPECT_EQ(error.path(), "/nonexistent/x.gguf");
  }
}

TEST(GgufTest, AFileOfMetadataAlone) {
  GgufBuilder builder;
  builder.Set("a", 1);
  const std::vector<uint8_t> bytes = builder.Build();
  const GgufFile file(bytes, "x.gguf");
  EXPECT_TRUE(file.Has("a"));
  EXPECT_TRUE(file.tensors().empty());
}

TEST(GgufTest, Version2AndOtherAlignments) {
  for (const uint32_t alignment : {1u, 8u, 64u, 4096u}) {
    GgufBuilder builder = Sound();
    builder.Version(2).Alignment(alignment);
    const std::vector<uint8_t> bytes = builder.Build();
    GgufFile file(bytes, "x.gguf");
    EXPECT_EQ(file.version(), 2u);
    const TensorView view = file.Find("embd.weight").value();
    EXPECT_EQ(file.tensors()[1].offset % alignment, 0u);
    EXPECT_EQ(view.data[0], 0);
    EXPECT_EQ(view.data[203], 203);
  }
}

// The message of the CorruptFile that `use` throws.
std::string Corruption(const std::function<void()>& use) {
  try {
    use();
  } catch (const CorruptFile& error) {
    return error.what();
  }
  return "no CorruptFile";
}

std::string OpenCorrupt(const std::vector<uint8_t>& bytes) {
  return Corruption([&] { GgufFile file(bytes, "x.gguf"); });
}

TEST(GgufTest, UnsupportedTypesAndShapesAreRefusedByFind) {
  const std::vector<uint8_t> bytes = Sound().Build();
  GgufFile file(bytes, "x.gguf");
  EXPECT_EQ(Corruption([&] { file.Find("future.weight"); }),
            StrCat("x.gguf: offset ", file.tensors()[2].offset,
                   ": tensor future.weight: found type id 39, expected one of "
                   "F32, F16, Q4_0, Q5_0, Q8_0, Q4_K, Q5_K, Q6_K, BF16"));
  EXPECT_EQ(
      Corruption([&] { file.Find("conv.weight"); }),
      StrCat("x.gguf: offset ", file.tensors()[3].offset,
             ": tensor conv.weight: found the shape 2 x 3 x 1 x 2, expected "
             "1 or 2 dimensions"));
}

// A matrix for each expert: all are one below the other.
TEST(GgufTest, TensorsOfExpertsHaveThreeDimensions) {
  const std::vector<uint8_t> values(2 * 3 * 4 * sizeof(float));
  GgufBuilder builder;
  builder.AddRaw("blk.0.ffn_up_exps.weight", 0, {2, 3, 4}, values)
      .AddRaw("blk.1.ffn_up_exps.weight", 0, {2, 12}, values)
      .AddRaw("blk.0.ffn_up.weight", 0, {2, 3, 4}, values)
      .AddRaw("blk.2.ffn_up_exps.weight", 0, {2, 3, 2, 2}, values);
  const std::vector<uint8_t> bytes = builder.Build();
  GgufFile file(bytes, "x.gguf");
  const TensorView all = *file.Find("blk.0.ffn_up_exps.weight");
  EXPECT_EQ(all.cols, 2u);
  EXPECT_EQ(all.rows, 12u);
  EXPECT_EQ(all.parts, 4u);
  EXPECT_EQ(all.size_bytes(), values.size());
  EXPECT_EQ(file.Find("blk.1.ffn_up_exps.weight")->parts, 1u);
  EXPECT_NE(Corruption([&] { file.Find("blk.0.ffn_up.weight"); })
                .find("found the shape 2 x 3 x 4, expected 1 or 2 dimensions"),
            std::string::npos);
  EXPECT_NE(Corruption([&] { file.Find("blk.2.ffn_up_exps.weight"); })
                .find("found the shape 2 x 3 x 2 x 2, expected 2 or 3 "
                      "dimensions"),
            std::string::npos);
}

// Models read the matrices of some stacks one by one.
TEST(GgufTest, StacksOfStreamsAreReadMatrixByMatrix) {
  const std::vector<uint8_t> values = Count(4 * 2 * 3 * 4);
  const std::vector<uint8_t> bytes =
      GgufBuilder()
          .AddRaw("altup_proj.weight", 0, {2, 3, 4}, values)
          .AddRaw("altup_unembd_proj.weight", 0, {2, 3}, Count(24))
          .AddRaw("other.weight", 0, {2, 3, 4}, values)
          .Build();
  GgufFile file(bytes, "x.gguf");
  EXPECT_EQ(file.Names(),
            (std::vector<std::string>{
                "altup_proj.0.weight", "altup_proj.1.weight",
                "altup_proj.2.weight", "altup_proj.3.weight",
                "altup_unembd_proj.weight", "other.weight"}));
  for (size_t i = 0; i < 4; ++i) {
    const auto view = file.Find(StrCat("altup_proj.", i, ".weight"));
    ASSERT_TRUE(view);
    EXPECT_EQ(view->name, StrCat("altup_proj.", i, ".weight"));
    EXPECT_EQ(view->rows, 3u);
    EXPECT_EQ(view->cols, 2u);
    EXPECT_TRUE(std::equal(view->data, view->data + 24, &values[24 * i]));
    file.Release(*view, 0, view->size_bytes());
    EXPECT_EQ(file.Hold(*view), nullptr) << "not from a mapping";
  }
  for (const char* name :
       {"altup_proj.4.weight", "altup_proj.x.weight", "altup_proj..weight",
        "altup_proj.00.weight", "altup_proj.0.bias", "other.0.weight",
        "altup_unembd_proj.0.weight"}) {
    EXPECT_FALSE(file.Find(name)) << name;
  }
  EXPECT_NE(Corruption([&] { file.Find("altup_proj.weight"); })
                .find("found the shape 2 x 3 x 4"),
            std::string::npos);
}

// One change that breaks the sound file, and what the message must say.
struct Damage {
  const char* name;
  std::function<std::vector<uint8_t>()> make;
  const char* message;  // after "x.gguf: offset N: "
};

std::vector<uint8_t> Patched(std::string_view after, size_t skip,
                             auto... values) {
  std::vector<uint8_t> bytes = Sound().Build();
  size_t at = (after.empty() ? 0 : OffsetAfter(bytes, after)) + skip;
  ((Patch(bytes, at, values), at += sizeof(values)), ...);
  return bytes;
}

std::vector<uint8_t> WithAlignment(auto value) {
  return Sound().Set("general.alignment", value).Build();
}

std::vector<uint8_t> WithTensor(uint32_t type,
                                const std::vector<uint64_t>& shape,
                                size_t size_bytes) {
  return GgufBuilder().AddRaw("t", type, shape, Count(size_bytes)).Build();
}

const Damage kPreambleDamages[] = {
    {"Empty", [] { return std::vector<uint8_t>(); },
     "found 0 bytes before the end of the file, expected 4 of magic"},
    {"Magic", [] { return Patched("", 0, uint32_t{0x46554748}); },
     "expected the magic 'GGUF'"},
    {"Version0", [] { return Patched("", 4, 0u); },
     "found version 0, expected 2..3"},
    {"Version1", [] { return Patched("", 4, 1u); },
     "found version 1, expected 2..3"},
    {"Version4", [] { return Patched("", 4, 4u); },
     "found version 4, expected 2..3"},
    {"BigEndian", [] { return Patched("", 4, 0x03000000u); },
     "found version 3 in big-endian byte order, expected little-endian"},
    {"ManyTensors", [] { return Patched("", 8, kHuge); },
     "found 18446744073709551615 as number of tensors, expected at most"},
    {"ManyEntries", [] { return Patched("", 16, uint64_t{1} << 61); },
     "found 2305843009213693952 as number of metadata entries, expected at "
     "most"},
    {"MoreEntriesThanThereAre", [] { return Patched("", 16, uint64_t{8}); },
     "found a tensor name of 0 bytes"},
};

const Damage kMetadataDamages[] = {
    {"LongKey",
     [] { return Patched("general.architecture", size_t(-28), kHuge); },
     "expected 18446744073709551615 of metadata key"},
    {"EmptyKey", [] { return GgufBuilder().Set("", 1).Build(); },
     "found a metadata key of 0 bytes, expected 1..65535"},
    {"KeyOneByteTooLong",
     [] { return GgufBuilder().Set(std::string(65536, 'a'), 1).Build(); },
     "found a metadata key of 65536 bytes, expected 1..65535"},
    {"KeyWithNewline", [] { return GgufBuilder().Set("a\nb", 1).Build(); },
     "found the byte 10 in a metadata key, expected printable ASCII"},
    {"KeyBeyondAscii", [] { return GgufBuilder().Set("a\xFF", 1).Build(); },
     "found the byte 255 in a metadata key, expected printable ASCII"},
    {"DuplicateKey",
     [] { return Sound().Set("gemma3.block_count", 3).Build(); },
     "found metadata gemma3.block_count again, expected each key once"},
    {"Type13", [] { return Patched("gemma3.block_count", 0, 13u); },
     "found metadata type 13, expected 0..12"},
    {"LongString", [] { return Patched("general.architecture", 4, kHuge - 7); },
     "expected 18446744073709551608 of string"},
    {"LongArray",
     [] { return Patched("tokenizer.ggml.scores", 8, uint64_t{1} << 62); },
     "found 4611686018427387904 as length of an array, expected at most"},
    {"LongArrayOfStrings",
     [] { return Patched("tokenizer.ggml.tokens", 8, kHuge / 8); },
     "found 2305843009213693951 as length of an array, expected at most"},
    {"LongStringInArray",
     [] { return Patched("tokenizer.ggml.tokens", 16, kHuge); },
     "expected 18446744073709551615 of string"},
    {"NestedArray", [] { return Patched("tokenizer.ggml.scores", 4, 9u); },
     "found an array of arrays, expected scalars or strings"},
    {"ArrayType13", [] { return Patched("tokenizer.ggml.scores", 4, 13u); },
     "found array type 13, expected 0..12"},
    {"Alignment0", [] { return WithAlignment(0u); },
     "metadata general.alignment: found 0, expected a power of two up to "
     "1048576"},
    {"Alignment24", [] { return WithAlignment(24u); }, "found 24, expected"},
    {"AlignmentHuge", [] { return WithAlignment(0x80000000u); },
     "found 2147483648, expected"},
    {"AlignmentHuge64", [] { return WithAlignment(uint64_t{1} << 63); },
     "found 9223372036854775808, expected"},
    {"AlignmentNegative", [] { return WithAlignment(-32); },
     "found -32, expected a non-negative integer"},
    {"AlignmentText", [] { return WithAlignment(std::string_view("32")); },
     "found type string, expected a non-negative integer"},
};

const Damage kTensorDamages[] = {
    {"LongName", [] { return Patched("norm.weight", size_t(-19), kHuge); },
     "expected 18446744073709551615 of tensor name"},
    {"EmptyName",
     [] { return GgufBuilder().AddRaw("", 0, {1}, Count(4)).Build(); },
     "found a tensor name of 0 bytes, expected 1..65535"},
    {"NameWithNul",
     [] {
       return GgufBuilder()
           .AddRaw(std::string_view("a\0b", 3), 0, {1}, Count(4))
           .Build();
     },
     "found the byte 0 in a tensor name, expected printable ASCII"},
    {"DuplicateName",
     [] { return Sound().AddF32("norm.weight", 1, 1, {1}).Build(); },
     "found tensor norm.weight again, expected each name once"},
    {"NoDimensions", [] { return WithTensor(0, {}, 4); },
     "tensor t: found 0 dimensions, expected 1..4"},
    {"FiveDimensions",
     [] {
       return WithTensor(0, {1, 1, 1, 1, 1}, 4);
     },
     "tensor t: found 5 dimensions, expected 1..4"},
    {"ManyDimensions", [] { return Patched("norm.weight", 0, 0xFFFFFFFFu); },
     "tensor norm.weight: found 4294967295 dimensions, expected 1..4"},
    {"ZeroSize",
     [] {
       return WithTensor(0, {4, 0}, 16);
     },
     "tensor t: found a dimension of 0, expected"},
    {"SizesThatOverflow",
     [] {
       return WithTensor(0, {uint64_t{1} << 33, uint64_t{1} << 33}, 16);
     },
     "tensor t: found a dimension of 8589934592, expected"},
    {"SizesThatWrapToSmall",
     [] {
       return WithTensor(0, {uint64_t{1} << 32, uint64_t{1} << 32, 1, 1}, 16);
     },
     "tensor t: found a dimension of 4294967296, expected"},
    {"BytesThatOverflow", [] { return WithTensor(0, {uint64_t{1} << 62}, 16); },
     "tensor t: found a dimension of 4611686018427387904, expected"},
    {"OverflowOfAnUnknownType",
     [] {
       return WithTensor(99, {kHuge, 2}, 16);
     },
     "tensor t: found a dimension of"},
    {"PartialBlock", [] { return WithTensor(8, {33}, 68); },
     "tensor t: found rows of 33 values, expected a multiple of 32 for type "
     "Q8_0"},
    {"RowsOfPartialBlocks",
     [] {
       return WithTensor(12, {128, 2}, 144);
     },
     "tensor t: found rows of 128 values, expected a multiple of 256 for type "
     "Q4_K"},
    {"OneByteShort",
     [] {
       return WithTensor(8, {32, 2}, 67);
     },
     "tensor t: found 67 bytes before the end of the file, expected 2 blocks "
     "of 34 bytes"},
    {"NoData", [] { return WithTensor(0, {1}, 0); }, "tensor t: found"},
    {"OffsetPastTheEnd",
     [] { return Patched("embd.weight", 24, uint64_t{1} << 20); },
     "tensor embd.weight: found its data 1048576 bytes behind offset"},
    {"OffsetThatOverflows",
     [] { return Patched("embd.weight", 24, kHuge - 31); },
     "tensor embd.weight: found its data 18446744073709551584 bytes behind"},
    {"OffsetOfAnUnknownType",
     [] { return Patched("future.weight", 24, uint64_t{1} << 40); },
     "tensor future.weight: found its data 1099511627776 bytes behind"},
    {"UnknownTypeAtTheEnd", [] { return WithTensor(99, {7}, 0); },
     "tensor t: found its data 0 bytes behind offset"},
    {"OffsetNotAligned",
     [] { return Patched("embd.weight", 24, uint64_t{33}); },
     "tensor embd.weight: found offset 33, expected a multiple of 32"},
};

class GgufDamageTest : public ::testing::TestWithParam<Damage> {};

std::string DamageName(const ::testing::TestParamInfo<Damage>& info) {
  return info.param.name;
}
INSTANTIATE_TEST_SUITE_P(Preamble, GgufDamageTest,
                         ::testing::ValuesIn(kPreambleDamages), DamageName);
INSTANTIATE_TEST_SUITE_P(Metadata, GgufDamageTest,
                         ::testing::ValuesIn(kMetadataDamages), DamageName);
INSTANTIATE_TEST_SUITE_P(Tensors, GgufDamageTest,
                         ::testing::ValuesIn(kTensorDamages), DamageName);

TEST_P(GgufDamageTest, IsOneClearLine) {
  const std::vector<uint8_t> bytes = GetParam().make();
  const std::string message = OpenCorrupt(bytes);
  EXPECT_TRUE(message.starts_with("x.gguf: offset ")) << message;
  EXPECT_NE(message.find(GetParam().message), std::string::npos) << message;
  const GgufOutcome outcome = ExerciseGguf(bytes);
  EXPECT_FALSE(outcome.accepted);
  EXPECT_EQ(outcome.violation, "");
}

// Every type's block size and the last byte, not only two types'.
TEST(GgufTest, EveryTypeNeedsWholeBlocksAndAllBytes) {
  for (const TensorTypeInfo& type : kTensorTypes) {
    SCOPED_TRACE(type.name);
    const uint32_t id = static_cast<uint32_t>(type.type);
    EXPECT_TRUE(ExerciseGguf(WithTensor(id, {type.values, 3}, 3 * type.bytes))
                    .accepted);
    EXPECT_NE(OpenCorrupt(WithTensor(id, {type.values, 3}, 3 * type.bytes - 1))
                  .find(StrCat("found ", 3 * type.bytes - 1, " bytes before")),
              std::string::npos);
    if (type.values == 1) continue;
    // As many values as two blocks, in rows that are not whole blocks.
    EXPECT_NE(OpenCorrupt(WithTensor(id, {type.values / 2, 4}, 2 * type.bytes))
                  .find(StrCat("found rows of ", type.values / 2, " values")),
              std::string::npos);
  }
}

TEST(GgufTest, TheOffsetIsThatOfTheFault) {
  std::vector<uint8_t> bytes = Sound().Build();
  const size_t at = OffsetAfter(bytes, "gemma3.block_count");
  Patch(bytes, at, 77u);
  EXPECT_EQ(OpenCorrupt(bytes), StrCat("x.gguf: offset ", at,
                                       ": found metadata type 77, expected "
                                       "0..12"));
}

// Every byte of the sound file is needed.
TEST(GgufTest, TruncatedAnywhere) {
  const std::vector<uint8_t> bytes = Sound().Build();
  ASSERT_TRUE(ExerciseGguf(bytes).accepted);
  EXPECT_EQ(ExerciseGguf(bytes).violation, "");
  for (size_t size = 0; size < bytes.size(); ++size) {
    // An allocation of its own, so that the sanitizer sees reads past its end.
    const std::vector<uint8_t> cut(bytes.begin(), bytes.begin() + size);
    const GgufOutcome outcome = ExerciseGguf(cut);
    ASSERT_FALSE(outcome.accepted) << size;
    ASSERT_EQ(outcome.violation, "") << size;
  }
}

TEST(GgufTest, AnyBitFlipped) {
  std::vector<uint8_t> bytes = Sound().Build();
  const size_t header = OffsetAfter(bytes, "conv.weight") + 48;
  for (size_t bit = 0; bit < 8 * header; ++bit) {
    const auto mask = static_cast<uint8_t>(1 << bit % 8);
    bytes[bit / 8] ^= mask;
    ASSERT_EQ(ExerciseGguf(bytes).violation, "") << bit;
    bytes[bit / 8] ^= mask;
  }
}

// The shape of a real file: nearly all of its header is the vocabulary.
GgufBuilder BigVocabulary() {
  std::vector<std::string> tokens;
  for (int i = 0; i < 20000; ++i) {
    tokens.push_back(StrCat("token", std::string(i % 17, 'x'), i));
  }
  GgufBuilder builder;
  builder.Set("general.architecture", "gemma3")
      .Set("tokenizer.ggml.tokens", tokens)
      .Set("tokenizer.ggml.scores", std::vector<float>(tokens.size(), -1))
      .Set("tokenizer.ggml.token_type", std::vector<int32_t>(tokens.size(), 1));
  for (int i = 0; i < 40; ++i) {
    builder.AddTensor(StrCat("blk.", i, ".attn_q.weight"), TensorType::kQ4_K, 2,
                      256, Count(288));
  }
  return builder;
}

TEST(GgufTest, ABigHeaderTruncatedAtEvery4KiB) {
  const std::vector<uint8_t> bytes = BigVocabulary().Build();
  ASSERT_GT(bytes.size(), size_t{600} << 10);
  const GgufFile whole(bytes, "x.gguf");
  ASSERT_EQ(whole.GetStrings("tokenizer.ggml.tokens")->size(), 20000u);
  for (size_t size = 0; size < bytes.size(); size += 4096) {
    const std::vector<uint8_t> cut(bytes.begin(), bytes.begin() + size);
    const GgufOutcome outcome = ExerciseGguf(cut);
    ASSERT_FALSE(outcome.accepted) << size;
    ASSERT_EQ(outcome.violation, "") << size;
  }
}

// On disk, too: the end of a mapping is the end of the process.
TEST(GgufTest, AFileTruncatedAtPageBoundaries) {
  const std::vector<uint8_t> bytes = BigVocabulary().Build();
  for (size_t size = 4096; size < bytes.size(); size += 16 * 4096) {
    const TempFile cut(std::span<const uint8_t>(bytes).first(size));
    EXPECT_THROW(GgufFile{cut.path()}, CorruptFile) << size;
  }
}

TEST(GgufTest, ABigHeaderWithRandomDamage) {
  const std::vector<uint8_t> bytes = BigVocabulary().Build();
  std::mt19937 rng(1);
  for (int trial = 0; trial < 100; ++trial) {
    std::vector<uint8_t> damaged = bytes;
    for (int i = 0; i < 3; ++i) {
      damaged[rng() % damaged.size()] = static_cast<uint8_t>(rng());
    }
    ASSERT_EQ(ExerciseGguf(damaged).violation, "") << trial;
  }
}

// Parts as splitting programs make them: metadata in the first one, which may
// hold no tensor.
class SplitGgufTest : public testing::Test {
 protected:
  void Write(uint16_t number, GgufBuilder builder, uint16_t count = 3) {
    builder.Set("split.no", number).Set("split.count", count);
    builder.Set("split.tensors.count", int32_t{2});
    const std::vector<uint8_t> bytes = builder.Build();
    WriteWhole(Path(number), {bytes.begin(), bytes.end()});
  }
  void WriteAll() {
    Write(0, GgufBuilder().Set("general.architecture", "gemma3"));
    Write(1, GgufBuilder().AddF32("a", 1, 2, {1, 2}));
    Write(2, GgufBuilder().AddF32("b", 1, 3, {3, 4, 5}));
  }
  std::string Path(int number) const {
    return folder_ / StrCat("x-0000", number + 1, "-of-00003.gguf");
  }
  std::string ErrorOf(const std::string& path) const {
    try {
      GgufFile{path};
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  TempFolder folder_;
};

TEST(GgufTest, TensorsBehindAModelOfEmbeddingsHaveOneName) {
  GgufBuilder builder;
  builder.AddF32("norm.weight", 1, 2, {1, 2});
  {
    // Of any other model, the name is its own.
    const std::vector<uint8_t> bytes = builder.Build();
    GgufFile file(bytes, "test");
    EXPECT_EQ(file.Names(), std::vector<std::string>{"norm.weight"});
    EXPECT_FALSE(file.Find("output_norm.weight"));
  }
  builder.AddF32("dense.1.weight", 1, 2, {3, 4})
      .AddF32("dense.0.weight", 1, 2, {5, 6});
  const std::vector<uint8_t> bytes = builder.Build();
  GgufFile file(bytes, "test");
  EXPECT_EQ(file.Names(),
            (std::vector<std::string>{"output_norm.weight", "dense_3.weight",
                                      "dense_2.weight"}));
  for (const auto& [name, first] :
       {std::pair{"output_norm.weight", 1.0f},
        std::pair{"dense_3.weight", 3.0f}, std::pair{"dense_2.weight", 5.0f}}) {
    const std::optional<TensorView> view = file.Find(name);
    ASSERT_TRUE(view) << name;
    EXPECT_EQ(view->name, name);
    float value;
    std::memcpy(&value, view->data, sizeof(value));
    EXPECT_EQ(value, first) << name;
  }
  EXPECT_FALSE(file.Find("dense.0.weight"));
}

TEST(GgufTest, ScalesOfExpertsHaveOneName) {
  GgufBuilder builder;
  builder.AddF32("blk.0.ffn_gate_inp.per_expert_scale", 1, 2, {1, 2})
      .AddF32("blk.11.ffn_gate_inp.per_expert_scale", 1, 2, {3, 4})
      .AddF32("blk.12.ffn_down_exps.scale", 1, 2, {5, 6})
      .AddF32("blk.12.ffn_gate_inp.per_expert_scale", 1, 2, {7, 8});
  const std::vector<uint8_t> bytes = builder.Build();
  GgufFile file(bytes, "test");
  // The last layer has both.
  EXPECT_EQ(file.Names(),
            (std::vector<std::string>{"blk.0.ffn_down_exps.scale",
                                      "blk.11.ffn_down_exps.scale",
                                      "blk.12.ffn_down_exps.scale",
                                      "blk.12.ffn_gate_inp.per_expert_scale"}));
  for (const auto& [name, first] :
       {std::pair{"blk.0.ffn_down_exps.scale", 1.0f},
        std::pair{"blk.11.ffn_down_exps.scale", 3.0f},
        std::pair{"blk.12.ffn_down_exps.scale", 5.0f}}) {
    const std::optional<TensorView> view = file.Find(name);
    ASSERT_TRUE(view) << name;
    float value;
    std::memcpy(&value, view->data, sizeof(value));
    EXPECT_EQ(value, first) << name;
  }
}

TEST_F(SplitGgufTest, ReadAsOne) {
  WriteAll();
  GgufFile file(Path(0));
  EXPECT_EQ(file.Names(), (std::vector<std::string>{"a", "b"}));
  const TensorView b = *file.Find("b");
  float values[3];
  std::memcpy(values, b.data, sizeof(values));
  EXPECT_EQ(values[0], 3.0f);
  EXPECT_EQ(values[2], 5.0f);
  file.Release(b, 0, b.size_bytes());
  EXPECT_EQ(std::memcmp(values, b.data, sizeof(values)), 0);
}

TEST_F(SplitGgufTest, WhatIsHeldOutlivesTheReader) {
  WriteAll();
  std::shared_ptr<const void> held;
  TensorView b;
  {
    GgufFile file(Path(0));
    b = *file.Find("b");
    held = file.Hold(b);
    file.Release(b, 0, b.size_bytes());
  }
  ASSERT_NE(held, nullptr);
  ExpectScatteredReads(b.data, b.size_bytes());
  PrefetchPages(b.data, b.size_bytes());
  float values[3];
  std::memcpy(values, b.data, sizeof(values));
  EXPECT_EQ(values[2], 5.0f);
  // Bytes in memory are the caller's.
  const std::vector<uint8_t> bytes = Sound().Build();
  GgufFile in_memory(bytes, "here");
  EXPECT_EQ(in_memory.Hold(*in_memory.Find("embd.weight")), nullptr);
}

TEST_F(SplitGgufTest, IdentityCoversEveryPart) {
  WriteAll();
  const Hash128 before = *GgufFile(Path(0)).Identity();
  EXPECT_EQ(*GgufFile(Path(0)).Identity(), before);
  Write(2, GgufBuilder().AddF32("b", 1, 3, {3, 4, 6}));
  EXPECT_NE(*GgufFile(Path(0)).Identity(), before);
}

TEST_F(SplitGgufTest, AllMissingPartsInOneError) {
  WriteAll();
  std::filesystem::remove(Path(1));
  std::filesystem::remove(Path(2));
  const std::string error = ErrorOf(Path(0));
  EXPECT_NE(error.find(Path(1)), std::string::npos) << error;
  EXPECT_NE(error.find(Path(2)), std::string::npos) << error;
}

TEST_F(SplitGgufTest, WhatDoesNotBelongTogether) {
  WriteAll();
  EXPECT_NE(ErrorOf(Path(1)).find("x-00002-of-00003.gguf: found split.no 1"),
            std::string::npos);
  Write(2, GgufBuilder().AddF32("a", 1, 2, {1, 2}));
  EXPECT_NE(ErrorOf(Path(0)).find("tensor a again"), std::string::npos);
  Write(2, GgufBuilder());
  EXPECT_NE(ErrorOf(Path(0)).find("found 1 tensors"), std::string::npos);
  Write(2, GgufBuilder().AddF32("b", 1, 2, {1, 2}), 4);
  EXPECT_NE(ErrorOf(Path(0)).find("split.count 3"), std::string::npos);
  std::filesystem::rename(Path(0), folder_ / "y.gguf");
  EXPECT_NE(ErrorOf(folder_ / "y.gguf").find("-00001-of-00003.gguf"),
            std::string::npos);
}

}  // namespace
}  // namespace gkv
