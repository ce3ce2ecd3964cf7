#include "cache/token_log.h"

#include <algorithm>

namespace gkv {

TokenLog::TokenLog(size_t page_tokens) : page_tokens_(page_tokens) {}

void TokenLog::Append(std::span<const int32_t> tokens) {
  while (!tokens.empty()) {
    const size_t used = size_ % page_tokens_;
    if (used == 0) {
      auto page = std::make_shared<TokenPage>();
      page->tokens.reserve(page_tokens_);
      if (!pages_.empty()) page->parent = pages_.back()->hash;
      pages_.push_back(std::move(page));
    } else if (pages_.back().use_count() > 1 || pages_.back()->sealed ||
               pages_.back()->tokens.size() != used) {
      // The tail is shared, or was cut: its first `used` tokens are ours.
      const TokenPage& old = *pages_.back();
      auto page = std::make_shared<TokenPage>();
      page->tokens.reserve(page_tokens_);
      page->tokens.assign(old.tokens.begin(),
                          old.tokens.begin() + static_cast<ptrdiff_t>(used));
      page->parent = old.parent;
      pages_.back() = std::move(page);
    }
    TokenPage& page = *pages_.back();
    const size_t take = std::min(tokens.size(), page_tokens_ - used);
    page.tokens.insert(page.tokens.end(), tokens.begin(),
                       tokens.begin() + static_cast<ptrdiff_t>(take));
    if (page.tokens.size() == page_tokens_) {
      Hasher hasher;
      hasher.UpdateValue(page.parent.low);
      hasher.UpdateValue(page.parent.high);
      hasher.Update({reinterpret_cast<const uint8_t*>(page.tokens.data()),
                     page.tokens.size() * sizeof(int32_t)});
      page.hash = hasher.Finish();
      page.sealed = true;
    }
    size_ += take;
    tokens = tokens.subspan(take);
  }
}

void TokenLog::Truncate(size_t size) {
  size_ = size;
  pages_.resize((size + page_tokens_ - 1) / page_tokens_);
}

void TokenLog::Copy(size_t begin, std::span<int32_t> out) const {
  for (size_t done = 0; done < out.size();) {
    const size_t at = begin + done;
    const size_t in_page = at % page_tokens_;
    const size_t take = std::min(out.size() - done, page_tokens_ - in_page);
    const int32_t* from = pages_[at / page_tokens_]->tokens.data() + in_page;
    std::copy(from, from + take, out.begin() + static_cast<ptrdiff_t>(done));
    done += take;
  }
}

Hash128 TokenLog::PrefixHash(size_t pages) const {
  return pages == 0 ? Hash128{} : pages_[pages - 1]->hash;
}

std::shared_ptr<const TokenPage> TokenLog::SealedPage(size_t page) const {
  return pages_[page];
}

}  // namespace gkv
