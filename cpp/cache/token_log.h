#ifndef GEMMAKV_CACHE_TOKEN_LOG_H_
#define GEMMAKV_CACHE_TOKEN_LOG_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/hash.h"

namespace gkv {

// Token ids of consecutive positions, shared by every log whose transcript has
// them. Slots are written once: by the log that claimed them, before any other
// log can hold them. A full page is sealed: it is identified by a hash that
// chains over all pages before it, so that equal prefixes have equal hashes.
struct TokenPage {
  TokenPage(size_t page_tokens, const Hash128& parent_hash)
      : tokens(page_tokens), parent(parent_hash) {}

  std::vector<int32_t> tokens;
  std::atomic<size_t> claimed = 0;  // slots [0, claimed) belong to somebody
  const Hash128 parent;             // of the page before; zero for the first
  Hash128 hash;                     // of a sealed page: over (parent, tokens)
};

// Transcript of one conversation in pages shared between forks: copying is
// O(pages) reference copies. Not thread-safe; copies are independent: of those
// that share a page with room left, the first to append takes it.
class TokenLog {
 public:
  // `page_tokens` is the cache's block size.
  explicit TokenLog(size_t page_tokens);

  size_t size() const { return size_; }
  // Throws std::bad_alloc, changing nothing.
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
  // Requires: they fit into the page that holds the end.
  void AppendToPage(std::span<const int32_t> tokens);

  size_t page_tokens_;
  size_t size_ = 0;
  std::vector<std::shared_ptr<TokenPage>> pages_;
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_TOKEN_LOG_H_
