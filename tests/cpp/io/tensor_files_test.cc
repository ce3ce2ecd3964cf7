#include "io/tensor_files.h"

#include <cstring>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/float16.h"
#include "gtest/gtest.h"
#include "io/temp_folder.h"

namespace gkv {
namespace {

class TensorFilesTest : public ::testing::Test {
 protected:
  // A file of float32 values behind `gap` other bytes.
  std::string Write(const std::string& name, const std::vector<float>& values,
                    size_t gap = 0) {
    const std::string path = folder_.path() + "/" + name;
    std::ofstream out(path, std::ios::binary);
    out << std::string(gap, 'x');
    out.write(reinterpret_cast<const char*>(values.data()),
              static_cast<std::streamsize>(values.size() * sizeof(float)));
    return path;
  }
  static std::vector<float> Floats(const TensorView& view) {
    std::vector<float> values(view.rows * view.cols);
    std::memcpy(values.data(), view.data, view.size_bytes());
    return values;
  }
  static std::string Refusal(const std::vector<std::string>& paths,
                             const std::vector<TensorPlace>& places) {
    try {
      TensorFiles files("here", paths, places);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  }

  TempFolder folder_;
};

TEST_F(TensorFilesTest, FindsTensorsOfSeveralFilesInPlace) {
  const std::string a = Write("a", {1, 2, 3, 4, 5, 6}, 3);
  const std::string b = Write("b", {7, 8});
  TensorFiles files(
      "here", {a, b},
      {{.name = "m", .file = 0, .offset = 3, .rows = 2, .cols = 2},
       {.name = "v", .file = 1, .offset = 0, .rows = 1, .cols = 2},
       {.name = "w", .file = 0, .offset = 19, .rows = 1, .cols = 2}});
  EXPECT_EQ(files.Description(), "here");
  EXPECT_EQ(files.Names(), (std::vector<std::string>{"m", "v", "w"}));
  const auto m = files.Find("m");
  ASSERT_TRUE(m);
  EXPECT_EQ(m->name, "m");
  EXPECT_EQ(m->type, TensorType::kF32);
  EXPECT_EQ(m->rows, 2u);
  EXPECT_EQ(m->cols, 2u);
  EXPECT_EQ(Floats(*m), (std::vector<float>{1, 2, 3, 4}));
  files.Release(*m, 0, m->size_bytes());
  EXPECT_EQ(Floats(*files.Find("m")), (std::vector<float>{1, 2, 3, 4}));
  EXPECT_EQ(Floats(*files.Find("v")), (std::vector<float>{7, 8}));
  EXPECT_EQ(Floats(*files.Find("w")), (std::vector<float>{5, 6}));
  EXPECT_FALSE(files.Find("x"));
}

TEST_F(TensorFilesTest, WhatIsHeldOutlivesTheReader) {
  const std::string a = Write("a", {1, 2, 3, 4});
  std::shared_ptr<const void> held;
  TensorView m;
  {
    TensorFiles files("here", {a},
                      {{.name = "m", .offset = 0, .rows = 1, .cols = 2},
                       {.name = "made",
                        .offset = 8,
                        .rows = 1,
                        .cols = 2,
                        .form = TensorForm::kPlusOne}});
    EXPECT_EQ(files.Hold(*files.Find("made")), nullptr);
    m = *files.Find("m");
    held = files.Hold(m);
    files.Release(m, 0, m.size_bytes());
  }
  ASSERT_NE(held, nullptr);
  EXPECT_EQ(Floats(m), (std::vector<float>{1, 2}));
}

TEST_F(TensorFilesTest, FilesAndPlacesAreTheIdentity) {
  const std::string a = Write("a", {1, 2, 3, 4, 5, 6});
  const std::string b = Write("b", {1, 2, 3, 4, 5, 6});
  const auto identity = [](const std::string& path, TensorPlace place) {
    return *TensorFiles("here", {path}, {place}).Identity();
  };
  const TensorPlace place{.name = "m", .rows = 2, .cols = 2};
  std::set<Hash128> all = {identity(a, place), identity(b, place)};
  EXPECT_EQ(identity(a, place), identity(a, place));
  std::vector<TensorPlace> others(6, place);
  others[0].name = "n";
  others[1].offset = 4;
  others[2].type = TensorType::kF16;
  others[3].rows = 1;
  others[4].cols = 3;
  others[5].form = TensorForm::kBlocksTransposed;
  for (const TensorPlace& other : others) all.insert(identity(a, other));
  EXPECT_EQ(all.size(), 8u);
}

TEST_F(TensorFilesTest, PlusOneIsF32WhateverIsStored) {
  const std::string path = Write("a", {0.5f, -1, 0});
  const std::string half = folder_.path() + "/half";
  std::ofstream(half, std::ios::binary)
      .write("\x80\x3F\x00\xBF", 4)   // bfloat16 1, -0.5
      .write("\x00\x3C\x00\xC0", 4);  // float16 1, -2
  const auto place = [](const char* name, size_t file, uint64_t offset,
                        TensorType type, size_t cols) {
    return TensorPlace{.name = name,
                       .file = file,
                       .offset = offset,
                       .type = type,
                       .rows = 1,
                       .cols = cols,
                       .form = TensorForm::kPlusOne};
  };
  TensorFiles files("here", {path, half},
                    {place("f32", 0, 0, TensorType::kF32, 3),
                     place("bf16", 1, 0, TensorType::kBF16, 2),
                     place("f16", 1, 4, TensorType::kF16, 2)});
  for (int time = 0; time < 2; ++time) {
    const auto f32 = files.Find("f32");
    EXPECT_EQ(f32->type, TensorType::kF32);
    EXPECT_EQ(Floats(*f32), (std::vector<float>{1.5f, 0, 1}));
    EXPECT_EQ(Floats(*files.Find("bf16")), (std::vector<float>{2, 0.5f}));
    EXPECT_EQ(files.Find("bf16")->type, TensorType::kF32);
    EXPECT_EQ(Floats(*files.Find("f16")), (std::vector<float>{2, -1}));
    EXPECT_EQ(files.Find("f32")->data, f32->data) << "kept until released";
    files.Release(*f32, 0, f32->size_bytes());
  }
}

TEST_F(TensorFilesTest, BlocksAreTransposedOneByOne) {
  // Two blocks, [in = 3, out = 2] each.
  const std::string path =
      Write("a", {1, 2, 3, 4, 5, 6, 10, 20, 30, 40, 50, 60});
  TensorFiles files("here", {path},
                    {{.name = "g",
                      .rows = 4,
                      .cols = 3,
                      .form = TensorForm::kBlocksTransposed,
                      .blocks = 2}});
  EXPECT_EQ(Floats(*files.Find("g")),
            (std::vector<float>{1, 3, 5, 2, 4, 6, 10, 30, 50, 20, 40, 60}));
}

TEST_F(TensorFilesTest, BlocksThatAreStoredAsTheyAreNeededAreParts) {
  const std::string a = Write("a", {1, 2, 3, 4, 5, 6, 7, 8});
  TensorFiles files(
      "here", {a},
      {{.name = "m", .offset = 0, .rows = 4, .cols = 2, .blocks = 2},
       {.name = "t", .offset = 0, .rows = 4, .cols = 2,
        .form = TensorForm::kBlocksTransposed, .blocks = 2}});
  EXPECT_EQ(files.Find("m")->parts, 2u);
  EXPECT_EQ(files.Find("m")->rows, 4u);
  EXPECT_EQ(Floats(*files.Find("m")),
            (std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(files.Find("t")->parts, 1u);
}

TEST_F(TensorFilesTest, PlacesOutsideTheirFileAreCorrupt) {
  const std::string path = Write("a", {1, 2, 3, 4});
  const auto at = [&](uint64_t offset, size_t rows, size_t cols) {
    return Refusal(
        {path}, {{.name = "t", .offset = offset, .rows = rows, .cols = cols}});
  };
  EXPECT_EQ(at(0, 2, 2), "accepted");
  for (const std::string& message :
       {at(1, 2, 2), at(0, 5, 1), at(17, 1, 1), at(UINT64_MAX, 1, 1),
        at(0, size_t{1} << 30, size_t{1} << 30)}) {
    EXPECT_NE(message.find("tensor t takes "), std::string::npos) << message;
    EXPECT_NE(message.find("the file's 16"), std::string::npos) << message;
  }
}

TEST_F(TensorFilesTest, ImpossiblePlacesAreRefused) {
  const std::string path = Write("a", std::vector<float>(64));
  const auto refusal = [&](const TensorPlace& place) {
    return Refusal({path}, {place});
  };
  const auto expect = [](const std::string& message, const char* part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  expect(refusal({.name = "t", .file = 1, .rows = 1, .cols = 1}),
         "file 1, expected one");
  expect(
      refusal({.name = "t", .type = TensorType::kQ8_0, .rows = 1, .cols = 32}),
      "type Q8_0, expected F32");
  expect(refusal({.name = "t", .rows = 0, .cols = 1}), "shape [0, 1]");
  expect(refusal({.name = "t", .rows = 1, .cols = SIZE_MAX}), "shape [1, ");
  expect(refusal(
             {.name = "t", .rows = 2, .cols = 1, .form = TensorForm::kPlusOne}),
         "2 rows, expected a vector");
  expect(refusal({.name = "t",
                  .rows = 3,
                  .cols = 1,
                  .form = TensorForm::kBlocksTransposed,
                  .blocks = 2}),
         "multiple of 2 blocks");
  expect(refusal({.name = "t",
                  .rows = 3,
                  .cols = 1,
                  .form = TensorForm::kBlocksTransposed,
                  .blocks = 0}),
         "multiple of 0 blocks");
  expect(Refusal({path}, {{.name = "t", .rows = 1, .cols = 1},
                          {.name = "t", .rows = 1, .cols = 1}}),
         "tensor t is listed twice");
  EXPECT_THROW(TensorFiles("here", {folder_.path() + "/none"}, {}), IoError);
}

}  // namespace
}  // namespace gkv
