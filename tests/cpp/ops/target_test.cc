#include "ops/target.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"
#include "ops/byte_dot.h"

namespace gkv {
namespace {

class TargetTest : public ::testing::Test {
 protected:
  void TearDown() override { ForceTarget(""); }
};

TEST_F(TargetTest, TheBestRunsByDefault) {
  const std::vector<std::string> targets = AttainableTargets();
  ASSERT_FALSE(targets.empty());
  EXPECT_EQ(CurrentTarget(), targets.front());
}

TEST_F(TargetTest, WhatIsAttainableIsCompiledInTheSameOrder) {
  const std::vector<std::string> compiled = CompiledTargets();
  auto at = compiled.begin();
  for (const std::string& name : AttainableTargets()) {
    at = std::find(at, compiled.end(), name);
    ASSERT_NE(at, compiled.end()) << name;
  }
  const std::set<std::string> names(compiled.begin(), compiled.end());
  EXPECT_EQ(names.size(), compiled.size());
}

// What runs on this processor runs on others, and there is something to compare
// it with.
TEST_F(TargetTest, TheBestIsNeverAlone) {
  const std::vector<std::string> targets = AttainableTargets();
  if (!targets.front().starts_with("AVX")) GTEST_SKIP() << "not of x86";
  EXPECT_EQ(targets.back(), "SSE2");
  EXPECT_EQ(std::count(targets.begin(), targets.end(), "AVX2"), 1);
}

TEST_F(TargetTest, EveryAttainableTargetCanBeForced) {
  const std::vector<std::string> targets = AttainableTargets();
  for (const std::string& name : targets) {
    ForceTarget(name);
    EXPECT_EQ(CurrentTarget(), name);
    EXPECT_EQ(AttainableTargets(), targets);
  }
  ForceTarget("");
  EXPECT_EQ(CurrentTarget(), targets.front());
}

TEST_F(TargetTest, UnknownTargetIsRefusedAndChangesNothing) {
  const std::string last = AttainableTargets().back();
  ForceTarget(last);
  for (const char* name : {"AVX9", "avx2", "Unknown", " "}) {
    EXPECT_THROW(ForceTarget(name), InvalidArgument) << name;
    EXPECT_EQ(CurrentTarget(), last);
  }
  try {
    ForceTarget("AVX9");
    FAIL();
  } catch (const InvalidArgument& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("AVX9"), std::string::npos) << message;
    EXPECT_NE(message.find(last), std::string::npos) << message;
  }
}

// Processors that have the instruction test what runs without it, too.
TEST_F(TargetTest, BothFormsOfAvx2AreThere) {
  const std::vector<std::string> targets = AttainableTargets();
  const auto with = std::find(targets.begin(), targets.end(), "AVX2_VNNI");
  if (with == targets.end()) GTEST_SKIP() << "not built, or no VNNI here";
  ASSERT_NE(with + 1, targets.end());
  EXPECT_EQ(*(with + 1), "AVX2");
  ForceTarget("AVX2");
  EXPECT_EQ(CurrentByteDot(), ByteDot::kOfTarget);
  ForceTarget("AVX2_VNNI");
  EXPECT_NE(CurrentByteDot(), ByteDot::kOfTarget);
}

// The id follows the forced target, so dispatch does too.
TEST_F(TargetTest, NumericsIdTellsFusedFromUnfused) {
  for (const std::string& name : AttainableTargets()) {
    ForceTarget(name);
    const bool fused = name.starts_with("AVX");
    const bool x86 = fused || name.starts_with("SSE");
    const auto architecture = x86 ? Architecture::kX86 : Architecture::kArm;
    EXPECT_EQ(NumericsId(), NumericsIdOf(architecture, fused || !x86)) << name;
  }
}

// No other architecture passes for one whose bits are known, and what was
// written under version 1 keeps its ids.
TEST_F(TargetTest, NumericsIdTellsArchitecturesApart) {
  std::set<uint32_t> ids;
  for (const auto architecture :
       {Architecture::kX86, Architecture::kArm, Architecture::kOther}) {
    ids.insert(NumericsIdOf(architecture, true));
    ids.insert(NumericsIdOf(architecture, false));
  }
  EXPECT_EQ(ids.size(), 6u);
  static_assert(kNumericsVersion != 1 ||
                (NumericsIdOf(Architecture::kX86, true) == 1 &&
                 NumericsIdOf(Architecture::kX86, false) == 2));
}

}  // namespace
}  // namespace gkv
