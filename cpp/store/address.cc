#include "store/address.h"

#include <algorithm>
#include <cassert>
#include <string_view>

#include "base/blake2b.h"
#include "base/hex.h"

namespace gkv {
namespace {

class AddressHash {
 public:
  explicit AddressHash(std::string_view what) { hash_.Update(AsBytes(what)); }
  template <typename T>
  AddressHash& Add(const T& value) {
    hash_.UpdateValue(value);
    return *this;
  }
  AddressHash& Add(const Address& address) {
    hash_.Update(address.bytes);
    return *this;
  }
  AddressHash& Add(const Hash128& hash) {
    return Add(hash.low).Add(hash.high);
  }
  AddressHash& AddBytes(std::span<const uint8_t> bytes) {
    hash_.Update(bytes);
    return *this;
  }
  Address Finish() {
    Address address;
    hash_.Finish(address.bytes);
    return address;
  }

 private:
  Blake2b hash_{32};
};

constexpr uint32_t kNoMedia = 0;

}  // namespace

std::string ObjectName::Hex() const { return ToHex(bytes); }

Address SaltDigest(std::span<const uint8_t> salt) {
  if (salt.empty()) return {};
  return AddressHash("gkv salt").AddBytes(salt).Finish();
}

Address RootAddress(const Hash128& fingerprint, const Hash128& layout,
                    const Address& salt_digest) {
  return AddressHash("gkv root")
      .Add(kBlockStoreVersion)
      .Add(fingerprint)
      .Add(layout)
      .Add(salt_digest)
      .Finish();
}

Address PageAddress(const Address& parent, std::span<const int32_t> tokens) {
  assert(tokens.size() == kPageTokens);
  return AddressHash("gkv page")
      .Add(parent)
      .AddBytes(AsBytes(tokens))
      .Add(kNoMedia)
      .Finish();
}

Address WindowAddress(const Address& page, size_t window) {
  return AddressHash("gkv wind").Add(page).Add(uint64_t{window}).Finish();
}

Address ResumeAddress(const Address& parent, size_t position,
                      std::span<const int32_t> tail) {
  assert(tail.size() == position % kPageTokens);
  return AddressHash("gkv resu")
      .Add(parent)
      .Add(uint64_t{position})
      .AddBytes(AsBytes(tail))
      .Add(kNoMedia)
      .Finish();
}

ObjectName NameOf(const Address& address, std::span<const uint8_t, 32> key) {
  ObjectName name;
  Blake2b hash(name.bytes.size(), key);
  hash.Update(address.bytes);
  hash.Finish(name.bytes);
  return name;
}

std::vector<size_t> ResumeCandidates(std::span<const int32_t> tokens,
                                     std::span<const int32_t> turn_ends,
                                     std::span<const size_t> boundaries,
                                     size_t limit, size_t count) {
  limit = std::min(limit, tokens.size());
  const auto ends_turn = [&](size_t i) {
    return i < tokens.size() && std::find(turn_ends.begin(), turn_ends.end(),
                                          tokens[i]) != turn_ends.end();
  };
  std::vector<size_t> candidates;
  for (size_t p = limit; p > 0 && candidates.size() < count; --p) {
    if (p % kPageTokens == 0 || ends_turn(p) || ends_turn(p + 1) ||
        std::find(boundaries.begin(), boundaries.end(), p) !=
            boundaries.end()) {
      candidates.push_back(p);
    }
  }
  return candidates;
}

}  // namespace gkv
