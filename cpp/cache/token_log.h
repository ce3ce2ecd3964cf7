#ifndef GEMMAKV_CACHE_TOKEN_LOG_H_
#define GEMMAKV_CACHE_TOKEN_LOG_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/hash.h"

namespace gkv {

// `count` token ids; full pages are sealed: never written again, and identified
// by a hash that chains over all pages before them, so that equal prefixes have
// equal hashes.
struct TokenPage {
  std::vector<int32_t> tokens;  // reserved to the page size
  Hash128 parent;               // hash of the page before; zero for the first
  Hash128 hash;                 // valid once sealed: over (parent, tokens)
  bool sealed = false;
};

// Transcript of one conversation in pages shared between forks: copying is
// O(pages) reference copies. Not thread-safe; copies are independent.
class TokenLog {
 public:
  // `page_tokens` is the cache's block size.
  explicit TokenLog(size_t page_tokens);

  size_t size() const { return size_; }
  // Copies a shared unsealed page before writing to it.
  void Append(std::span<const int32_t> tokens);
  // Requires: size <= size().
  void Truncate(size_t size);
  // Requires: begin + out.size() <= size().
  void Copy(size_t begin, std::span<int32_t> out) const;
  // Hash of the sealed pages that cover tokens [0, pages * page_tokens).
  // Requires: that many full pages exist. Zero for 0 pages.
  Hash128 PrefixHash(size_t pages) const;
  // Requires: as above for `page` + 1 pages. It is sealed.
  std::shared_ptr<const TokenPage> SealedPage(size_t page) const;

 private:
  size_t page_tokens_;
  size_t size_ = 0;
  std::vector<std::shared_ptr<TokenPage>> pages_;
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_TOKEN_LOG_H_
