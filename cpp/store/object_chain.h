#ifndef GEMMAKV_STORE_OBJECT_CHAIN_H_
#define GEMMAKV_STORE_OBJECT_CHAIN_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cache/kv_layout.h"
#include "store/address.h"
#include "store/block_store.h"
#include "store/object.h"

namespace gkv {

// Identifies keys and values: by model and by tenant.
struct PrefixId {
  Hash128 fingerprint;
  Address salt;  // digest
  bool operator==(const PrefixId&) const = default;

  Address Root(const KvLayout& layout) const {
    return RootAddress(fingerprint, layout.hash(), salt);
  }
};

// The keys and heads of the objects of some tokens. It refers to the tokens.
// The constructor hashes whole pages only.
class ObjectChain {
 public:
  ObjectChain(const PrefixId& id, const KvLayout& layout,
              std::span<const int32_t> tokens);

  // Requires: the page is whole; position <= tokens.size().
  ObjectHead PageHead(size_t page) const;
  ObjectHead WindowHead(size_t page, size_t window) const;
  ObjectHead ResumeHead(size_t position) const;  // without sliding ranges

  ObjectKey PageKey(size_t page) const;
  ObjectKey WindowKey(size_t page, size_t window) const;
  ObjectKey ResumeKey(size_t position) const;

 private:
  // The address of the page before `page`, or of the root.
  const Address& Before(size_t page) const { return addresses_[page]; }
  const Address& Of(size_t page) const { return addresses_[page + 1]; }
  ObjectHead Head(ObjectKind kind, const Address& parent, size_t begin,
                  size_t end) const;

  const PrefixId id_;
  const Hash128 layout_;
  const bool stores_pages_;  // there are full layers
  const std::span<const int32_t> tokens_;
  std::vector<Address> addresses_;  // the root, then by page
};

}  // namespace gkv

#endif  // GEMMAKV_STORE_OBJECT_CHAIN_H_
