#include "cache/token_log.h"

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/rounding.h"

namespace gkv {

TokenLog::TokenLog(size_t page_tokens) : page_tokens_(page_tokens) {}

void TokenLog::Append(std::span<const int32_t> tokens) {
  const size_t before = size_;
  try {
    while (!tokens.empty()) {
      const size_t take =
          std::min(tokens.size(), page_tokens_ - size_ % page_tokens_);
      AppendToPage(tokens.first(take));
      tokens = tokens.subspan(take);
    }
  } catch (...) {
    Truncate(before);
    throw;
  }
}

void TokenLog::AppendToPage(std::span<const int32_t> tokens) {
  const size_t used = size_ % page_tokens_;
  const size_t end = used + tokens.size();
  size_t expected = used;
  if (used == 0) {
    pages_.push_back(std::make_shared<TokenPage>(
        page_tokens_, PrefixHash(size_ / page_tokens_)));
    pages_.back()->claimed = end;
  } else if (!pages_.back()->claimed.compare_exchange_strong(expected, end)) {
    // Another log has continued from here, or this log was cut.
    const TokenPage& old = *pages_.back();
    auto page = std::make_shared<TokenPage>(page_tokens_, old.parent);
    std::copy_n(old.tokens.begin(), used, page->tokens.begin());
    page->claimed = end;
    pages_.back() = std::move(page);
  }
  TokenPage& page = *pages_.back();
  std::copy(tokens.begin(), tokens.end(),
            page.tokens.begin() + static_cast<ptrdiff_t>(used));
  if (end == page_tokens_) {
    Hasher hasher;
    hasher.UpdateValue(page.parent);
    hasher.Update(AsBytes(page.tokens));
    page.hash = hasher.Finish();
  }
  size_ += tokens.size();
}

void TokenLog::Truncate(size_t size) {
  size_ = size;
  pages_.resize(CeilDiv(size, page_tokens_));
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
