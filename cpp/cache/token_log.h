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
  std::atomic<size_t> claimed = 0;  // slots [0, claimed) are taken
  const Hash128 parent;  // hash of the page before; zero for the first
  Hash128 hash;                     // of a sealed page: over (parent, tokens)
};

// The transcript of one conversation, in pages that forks share: copying is
// O(pages) reference copies. Not thread-safe. Copies are independent: of
// several that share a page with room left, the first to append takes the room.
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
  // Returns the hash of the sealed pages that cover tokens [0, pages *
  // page_tokens); zero for 0 pages. Requires: that many full pages exist.
  Hash128 PrefixHash(size_t pages) const;
  // Returns a page, which is sealed. Requires: `page` + 1 full pages exist.
  std::shared_ptr<const TokenPage> SealedPage(size_t page) const;

 private:
  // Requires: the tokens fit into the page that holds the end.
  void AppendToPage(std::span<const int32_t> tokens);

  size_t page_tokens_;
  size_t size_ = 0;
  std::vector<std::shared_ptr<TokenPage>> pages_;
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_TOKEN_LOG_H_
