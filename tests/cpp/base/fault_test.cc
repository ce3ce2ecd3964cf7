#include "base/fault.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>

#include "base/error.h"

namespace gkv {
namespace {

class FaultTest : public testing::Test {
 protected:
  ~FaultTest() override {
    unsetenv("GEMMAKV_FAULT");
    ReadFault();
  }
  static void Set(const char* text) {
    setenv("GEMMAKV_FAULT", text, 1);
    ReadFault();
  }
};

TEST_F(FaultTest, NothingHappensWithoutIt) {
  unsetenv("GEMMAKV_FAULT");
  ReadFault();
  EXPECT_EQ(FaultAt("write"), 0);
}

TEST_F(FaultTest, FailsFromAPassOn) {
  Set("write:errno=28:3");
  EXPECT_EQ(FaultAt("write"), 0);
  EXPECT_EQ(FaultAt("link"), 0);
  EXPECT_EQ(FaultAt("write"), 0);
  EXPECT_EQ(FaultAt("write"), ENOSPC);
  EXPECT_EQ(FaultAt("write"), ENOSPC);
  EXPECT_EQ(FaultAt("link"), 0);
  Set("*:errno=5");
  EXPECT_EQ(FaultAt("link"), EIO);
  Set("write:errno=5,link:errno=28:2");
  EXPECT_EQ(FaultAt("write"), EIO);
  EXPECT_EQ(FaultAt("link"), 0);
  EXPECT_EQ(FaultAt("link"), ENOSPC);
}

TEST_F(FaultTest, Delays) {
  Set("write:delay=30");
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(FaultAt("write"), 0);
  EXPECT_GE(std::chrono::steady_clock::now() - begin,
            std::chrono::milliseconds(30));
}

TEST_F(FaultTest, Kills) {
  EXPECT_EXIT(
      {
        Set("write:kill:2");
        (void)FaultAt("write");
        (void)FaultAt("write");
      },
      testing::KilledBySignal(SIGKILL), "");
}

TEST_F(FaultTest, WhatItCannotMeanIsAnError) {
  for (const char* text :
       {"", "write", "write:", ":kill", "write:die", "write:kill:0",
        "write:kill:x", "write:delay=", "write:errno=0", "write:errno=-1",
        "write:kill:1:2", "write:kill,", ",write:kill"}) {
    setenv("GEMMAKV_FAULT", text, 1);
    EXPECT_THROW(ReadFault(), InvalidArgument) << text;
  }
}

}  // namespace
}  // namespace gkv
