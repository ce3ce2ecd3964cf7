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

// Small pieces with a survivor above them, which are freed: what the C library
// keeps by itself. What `trim` does must give most of it back.
void ExpectGivenBack(const std::function<void(size_t freed)>& trim) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || \
    !defined(__GLIBC__)
  GTEST_SKIP() << "another allocator, which keeps what is freed";
#endif
  constexpr size_t kPieces = 20000, kPieceBytes = 1000;
  std::vector<std::unique_ptr<char[]>> pieces(kPieces);
  for (auto& piece : pieces) {
    piece = std::make_unique<char[]>(kPieceBytes);
    std::memset(piece.get(), 1, kPieceBytes);
  }
  const auto survivor = std::make_unique<char[]>(kPieceBytes);
  pieces.clear();
  const size_t before = ResidentBytes();
  trim(kPieces * kPieceBytes);
  EXPECT_LT(ResidentBytes() + kPieces * kPieceBytes / 2, before);
}

TEST(HeapTrim, FreedPiecesLeaveTheResidentMemory) {
  ExpectGivenBack([](size_t) { TrimHeap(); });
}

TEST(HeapTrim, EnoughFreedBytesTrimTheHeap) {
  ExpectGivenBack([](size_t freed) {
    HeapTrimmer trimmer;
    trimmer.Freed(freed);
    trimmer.Freed(freed);
  });
}

}  // namespace
}  // namespace gkv
