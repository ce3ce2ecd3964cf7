#include "base/heap_trim.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <vector>

namespace gkv {
namespace {

size_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  size_t total_pages = 0, resident_pages = 0;
  file >> total_pages >> resident_pages;
  return resident_pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// Pieces with a survivor above them, which are freed: what the C library keeps by
// itself. What `trim` does afterwards, or `give_back` with each before it is
// freed, must give most of it back.
void ExpectGivenBack(size_t piece_bytes, const std::function<void()>& trim,
                     const std::function<void(void*)>& give_back) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || \
    !defined(__GLIBC__)
  GTEST_SKIP() << "another allocator, which keeps what is freed";
#endif
  constexpr size_t kBytes = size_t{20} << 20;
  std::vector<std::unique_ptr<char[]>> pieces(kBytes / piece_bytes);
  for (auto& piece : pieces) {
    piece = std::make_unique<char[]>(piece_bytes);
    std::memset(piece.get(), 1, piece_bytes);
  }
  const auto survivor = std::make_unique<char[]>(piece_bytes);
  const size_t before = ResidentBytes();
  for (auto& piece : pieces) {
    if (give_back) give_back(piece.get());
    piece.reset();
  }
  if (trim) trim();
  EXPECT_LT(ResidentBytes() + kBytes / 2, before);
}

TEST(HeapTrim, FreedPiecesLeaveTheResidentMemory) {
  ExpectGivenBack(1000, &TrimHeap, {});
}

TEST(HeapTrim, APieceLeavesTheResidentMemoryByItself) {
  constexpr size_t kPieceBytes = 50'000;
  ExpectGivenBack(kPieceBytes, {},
                  [](void* piece) { GiveBack(piece, kPieceBytes); });
}

TEST(HeapTrim, WhatLiesAroundAPieceStays) {
  std::vector<char> bytes(100'000, 1);
  GiveBack(bytes.data() + 30'001, 40'000);
  for (size_t i = 0; i < bytes.size(); ++i) {
    const bool around = i < 30'001 || i >= 70'001;
    ASSERT_TRUE(!around || bytes[i] == 1) << i;
  }
}

}  // namespace
}  // namespace gkv
