#include "store/object_chain.h"

namespace gkv {

ObjectChain::ObjectChain(const PrefixId& id, const KvLayout& layout,
                         std::span<const int32_t> tokens)
    : id_(id),
      layout_(layout.hash()),
      stores_pages_(layout.bytes_per_token(LayerKind::kFull) > 0),
      tokens_(tokens) {
  const size_t pages = tokens.size() / kPageTokens;
  addresses_.reserve(pages + 1);
  addresses_.push_back(id.Root(layout));
  for (size_t page = 0; page < pages; ++page) {
    addresses_.push_back(PageAddress(
        addresses_.back(), tokens.subspan(page * kPageTokens, kPageTokens)));
  }
}

ObjectHead ObjectChain::Head(ObjectKind kind, const Address& parent,
                             size_t begin, size_t end) const {
  ObjectHead head;
  head.kind = kind;
  head.fingerprint = id_.fingerprint;
  head.layout = layout_;
  head.salt = id_.salt;
  head.parent = parent;
  head.begin = begin;
  head.end = end;
  const std::span tokens = tokens_.subspan(begin, end - begin);
  head.tokens.assign(tokens.begin(), tokens.end());
  return head;
}

ObjectHead ObjectChain::PageHead(size_t page) const {
  return Head(ObjectKind::kPage, Before(page), page * kPageTokens,
              (page + 1) * kPageTokens);
}

ObjectHead ObjectChain::WindowHead(size_t page, size_t window) const {
  ObjectHead head = Head(ObjectKind::kWindowPage, Of(page), page * kPageTokens,
                         (page + 1) * kPageTokens);
  head.window = window;
  return head;
}

ObjectHead ObjectChain::ResumeHead(size_t position) const {
  const size_t pages = position / kPageTokens;
  return Head(ObjectKind::kResume, Before(pages), pages * kPageTokens,
              position);
}

ObjectKey ObjectChain::PageKey(size_t page) const {
  return {ObjectKind::kPage, Of(page), Before(page), (page + 1) * kPageTokens,
          id_.salt};
}

ObjectKey ObjectChain::WindowKey(size_t page, size_t window) const {
  return {ObjectKind::kWindowPage, WindowAddress(Of(page), window),
          stores_pages_ ? Of(page) : Address{}, (page + 1) * kPageTokens,
          id_.salt};
}

ObjectKey ObjectChain::ResumeKey(size_t position) const {
  const size_t pages = position / kPageTokens;
  return {ObjectKind::kResume,
          ResumeAddress(
              Before(pages), position,
              tokens_.subspan(pages * kPageTokens, position % kPageTokens)),
          stores_pages_ ? Before(pages) : Address{}, position, id_.salt};
}

}  // namespace gkv
