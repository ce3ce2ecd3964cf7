#include "store/remote_store.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/blake2b.h"
#include "base/bytes.h"
#include "base/error.h"
#include "base/mutex.h"
#include "io/byte_io.h"

namespace gkv {
namespace {

constexpr std::string_view kMagic = "GKVVALUE";
constexpr uint32_t kVersion = 1;
constexpr uint32_t kSigned = 1;
constexpr size_t kPlainHeaderBytes = 24;
constexpr std::string_view kPrefix = "gkv1:";
// The most bytes of one call of the client, as far as sizes are known.
constexpr size_t kBatchBytes = 4 * kRemoteChunkBytes;
constexpr size_t kFirstBatch = 4;
constexpr size_t kMaxBatch = 16;
// Limits of the objects that are assembled at the same time.
constexpr size_t kPartialBytes = size_t{64} << 20;
constexpr size_t kChunksAsked = 16;
constexpr size_t kMaxRewrites = 1024;

using Digest = std::array<uint8_t, 32>;
using Call = RemoteCalls::Call;

Digest KeyOf(std::string_view label, std::span<const uint8_t> secret) {
  Digest digest{};
  Blake2b hash(digest.size());
  hash.Update(AsBytes(label));
  hash.Update(secret);
  hash.Finish(digest);
  return digest;
}

// Compares in constant time.
bool Equal(std::span<const uint8_t> a, std::span<const uint8_t> b) {
  assert(a.size() == b.size());
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference = difference | (a[i] ^ b[i]);
  return difference == 0;
}

size_t Chunks(uint64_t value_bytes) {
  return (value_bytes + kRemoteChunkBytes - 1) / kRemoteChunkBytes;
}

size_t ChunkBytes(uint64_t value_bytes, size_t chunk) {
  return std::min<uint64_t>(kRemoteChunkBytes,
                            value_bytes - uint64_t{chunk} * kRemoteChunkBytes);
}

std::string ChunkKey(const std::string& key, size_t chunk) {
  return chunk == 0 ? key : StrCat(key, ":", chunk);
}

// State that the threads of calls share.
struct Shared {
  std::shared_ptr<RemoteClient> client;
  bool is_signed = false;
  Digest name_key{};
  Digest sign_key{};
  uint64_t max_object_bytes = 0;

  Mutex mutex{AtFork::kWaits};
  // Objects that were found damaged or incomplete: they count as absent, and
  // the next Put writes them whatever is there. True: their reader found the
  // damage, and to the store they would look sound again.
  std::map<ObjectName, bool> rewrites GUARDED_BY(mutex);

  size_t header_bytes() const {
    return kPlainHeaderBytes + (is_signed ? sizeof(Digest) : 0);
  }
  ObjectName Name(const Address& address) const {
    return NameOf(address, name_key);
  }
  // The prefix of all keys of a salt.
  std::string SaltPrefix(const Address& salt) const {
    return StrCat(kPrefix, Name(salt).Hex().substr(0, 16), ":");
  }
  std::string Key(const ObjectKey& key) const {
    return SaltPrefix(key.salt) + Name(key.address).Hex();
  }
  Digest Sign(const ObjectName& name, std::span<const uint8_t> object) const {
    Digest digest{};
    Blake2b hash(digest.size(), sign_key);
    hash.Update(AsBytes(std::string_view("gkv sign")));
    hash.Update(name.bytes);
    hash.Update(object);
    hash.Finish(digest);
    return digest;
  }
  void Rewrite(const ObjectName& name, bool looks_sound = false) {
    const MutexLock lock(mutex);
    if (rewrites.size() >= kMaxRewrites) rewrites.erase(rewrites.begin());
    rewrites[name] |= looks_sound;
  }
  bool LooksSound(const ObjectName& name) {
    const MutexLock lock(mutex);
    const auto found = rewrites.find(name);
    return found != rewrites.end() && found->second;
  }
  bool IsRewrite(const ObjectName& name) {
    const MutexLock lock(mutex);
    return rewrites.contains(name);
  }
  void Rewritten(const ObjectName& name) {
    const MutexLock lock(mutex);
    rewrites.erase(name);
  }

  std::vector<std::optional<RemoteValue>> Get(
      std::span<const std::string> keys) const {
    auto values = client->GetMany(keys);
    CheckCount(values.size(), keys.size());
    return values;
  }
  std::vector<bool> Has(std::span<const std::string> keys) const {
    auto found = client->HasMany(keys);
    CheckCount(found.size(), keys.size());
    return found;
  }
  static void CheckCount(size_t found, size_t expected) {
    if (found == expected) return;
    throw std::runtime_error(StrCat("the remote's client gave ", found,
                                    " results, expected ", expected));
  }
};

// One Load, on the thread of its call. Each object is handed over as soon as it
// is whole.
class Fetch {
 public:
  struct Result {
    std::vector<Loaded> loaded;
    uint64_t damaged = 0;
  };

  Fetch(std::shared_ptr<Shared> shared, std::span<const ObjectKey> keys)
      : shared_(std::move(shared)) {
    for (const ObjectKey& key : keys) {
      names_.push_back(shared_->Name(key.address));
      keys_.push_back(shared_->Key(key));
    }
    result_.loaded.resize(keys.size());
  }

  void Work(Call& call) {
    size_t batch = kFirstBatch;
    for (size_t first = 0; first < keys_.size();) {
      if (!call.Step()) return;
      const size_t count = std::min(batch, keys_.size() - first);
      const auto values = shared_->Get(std::span(keys_).subspan(first, count));
      std::vector<Partial> partials;
      size_t bytes = 0, there = 0;
      for (size_t i = 0; i < count; ++i) {
        if (!values[i] || shared_->LooksSound(names_[first + i])) continue;
        ++there;
        bytes += values[i]->bytes.size();
        Begin(first + i, *values[i], partials);
      }
      if (!Complete(call, partials)) return;
      first += count;
      if (there > 0) {
        batch = std::clamp<size_t>(
            kBatchBytes / std::max<size_t>(1, bytes / there), 1, kMaxBatch);
      }
    }
  }

  // Returns the objects that are there by now.
  Result Take() {
    const MutexLock lock(mutex_);
    return std::move(result_);
  }

 private:
  struct Partial {
    size_t index;
    uint64_t value_bytes;
    Digest signature;
    RemoteValue first;
    AlignedBuffer<uint8_t> object;  // allocated when a second chunk is there
    size_t next_chunk = 1;
  };

  size_t header_bytes() const { return shared_->header_bytes(); }

  // Reads the first chunk.
  void Begin(size_t index, const RemoteValue& value,
             std::vector<Partial>& partials) {
    try {
      ByteReader reader(value.bytes);
      const auto magic = reader.ReadBytes(kMagic.size(), "magic");
      const auto version = reader.Read<uint32_t>("version");
      const auto flags = reader.Read<uint32_t>("flags");
      const auto size = reader.Read<uint64_t>("size");
      if (!std::ranges::equal(magic, AsBytes(kMagic)) || version != kVersion ||
          flags != (shared_->is_signed ? kSigned : 0) || size == 0 ||
          size > shared_->max_object_bytes ||
          value.bytes.size() != ChunkBytes(header_bytes() + size, 0)) {
        return Damage(index);
      }
      Partial partial{index, header_bytes() + size, {}, value, {}, 1};
      if (shared_->is_signed) {
        const auto signature = reader.ReadBytes(sizeof(Digest), "signature");
        std::ranges::copy(signature, partial.signature.begin());
      }
      if (Chunks(partial.value_bytes) == 1) {
        Allocate(partial);
        Finish(partial);
      } else {
        partials.push_back(std::move(partial));
      }
    } catch (const CorruptFile&) {
      Damage(index);
    }
  }

  void Allocate(Partial& partial) {
    partial.object =
        AlignedBuffer<uint8_t>(partial.value_bytes - header_bytes());
    const auto bytes = partial.first.bytes.subspan(header_bytes());
    std::memcpy(partial.object.data(), bytes.data(), bytes.size());
    partial.first = {};
  }

  // Gets the other chunks. Returns false if nobody waits any more.
  bool Complete(Call& call, std::vector<Partial>& partials) {
    for (size_t begin = 0; begin < partials.size();) {
      size_t end = begin;
      uint64_t bytes = 0;
      do {
        bytes += partials[end++].value_bytes;
      } while (end < partials.size() &&
               bytes + partials[end].value_bytes <= kPartialBytes);
      if (!CompleteGroup(call, std::span(partials).subspan(begin, end - begin)))
        return false;
      begin = end;
    }
    return true;
  }

  bool CompleteGroup(Call& call, std::span<Partial> group) {
    std::vector<std::pair<Partial*, size_t>> chunks;
    for (Partial& partial : group) {
      for (size_t c = 1; c < Chunks(partial.value_bytes); ++c) {
        chunks.emplace_back(&partial, c);
      }
    }
    constexpr size_t kAtOnce = kBatchBytes / kRemoteChunkBytes;
    for (size_t begin = 0; begin < chunks.size();) {
      std::vector<std::pair<Partial*, size_t>> asked;
      std::vector<std::string> keys;
      for (; begin < chunks.size() && asked.size() < kAtOnce; ++begin) {
        const auto [partial, chunk] = chunks[begin];
        if (partial->next_chunk == 0) continue;  // given up
        asked.push_back(chunks[begin]);
        keys.push_back(ChunkKey(keys_[partial->index], chunk));
      }
      if (asked.empty()) break;
      if (!call.Step()) return false;
      const auto values = shared_->Get(keys);
      for (size_t i = 0; i < asked.size(); ++i) {
        Add(*asked[i].first, asked[i].second, values[i]);
      }
    }
    return true;
  }

  void Add(Partial& partial, size_t chunk,
           const std::optional<RemoteValue>& value) {
    if (partial.next_chunk == 0) return;
    assert(chunk == partial.next_chunk);
    const size_t size = ChunkBytes(partial.value_bytes, chunk);
    if (!value || value->bytes.size() != size) {
      partial.next_chunk = 0;
      partial.first = {};
      partial.object = {};
      if (value) return Damage(partial.index);
      shared_->Rewrite(names_[partial.index]);  // evicted
      return;
    }
    if (chunk == 1) Allocate(partial);
    std::memcpy(
        partial.object.data() + chunk * kRemoteChunkBytes - header_bytes(),
        value->bytes.data(), size);
    ++partial.next_chunk;
    if (partial.next_chunk == Chunks(partial.value_bytes)) Finish(partial);
  }

  void Finish(Partial& partial) {
    const size_t index = partial.index;
    auto object =
        std::make_shared<AlignedBuffer<uint8_t>>(std::move(partial.object));
    const std::span<const uint8_t> bytes(object->data(), object->size());
    if (shared_->is_signed &&
        !Equal(shared_->Sign(names_[index], bytes), partial.signature)) {
      return Damage(index);
    }
    const MutexLock lock(mutex_);
    if (result_.loaded.empty()) return;  // taken
    result_.loaded[index] = {LoadState::kHit, {bytes, std::move(object)}};
  }

  void Damage(size_t index) {
    shared_->Rewrite(names_[index]);
    const MutexLock lock(mutex_);
    ++result_.damaged;
  }

  const std::shared_ptr<Shared> shared_;
  std::vector<ObjectName> names_;
  std::vector<std::string> keys_;
  Mutex mutex_{AtFork::kLeaves};
  Result result_ GUARDED_BY(mutex_);
};

// Writes an object, on the thread of its call: the first chunk last. Returns
// false if the whole object was there.
bool Write(Call& call, Shared& shared, const ObjectName& name,
           const std::string& key, const StoredBytes& object) {
  const size_t header_bytes = shared.header_bytes();
  const uint64_t value_bytes = header_bytes + object.bytes.size();
  std::vector<std::string> keys;
  for (size_t c = 0; c < Chunks(value_bytes); ++c) {
    keys.push_back(ChunkKey(key, c));
  }
  if (!call.Step()) return false;
  if (!shared.IsRewrite(name) &&
      std::ranges::all_of(shared.Has(keys), [](bool there) { return there; })) {
    return false;
  }
  ByteWriter first;
  first.bytes().reserve(ChunkBytes(value_bytes, 0));
  first.WriteBytes(AsBytes(kMagic));
  first.Write(kVersion);
  first.Write(shared.is_signed ? kSigned : uint32_t{0});
  first.Write(uint64_t{object.bytes.size()});
  if (shared.is_signed) first.WriteBytes(shared.Sign(name, object.bytes));
  first.WriteBytes(
      object.bytes.first(ChunkBytes(value_bytes, 0) - header_bytes));
  const auto first_owner =
      std::make_shared<std::vector<uint8_t>>(std::move(first.bytes()));

  std::vector<RemoteItem> items;
  const auto put = [&] {
    if (!call.Step()) return false;
    shared.client->PutMany(items);
    items.clear();
    return true;
  };
  for (size_t c = 1; c < keys.size(); ++c) {
    items.push_back({keys[c],
                     {object.bytes.subspan(c * kRemoteChunkBytes - header_bytes,
                                           ChunkBytes(value_bytes, c)),
                      object.owner}});
    if (items.size() == kBatchBytes / kRemoteChunkBytes && !put()) return false;
  }
  if (!items.empty() && !put()) return false;
  items.push_back({key, {*first_owner, first_owner}});
  if (!put()) return false;
  shared.Rewritten(name);
  return true;
}

class Store final : public RemoteStore {
 public:
  Store(std::shared_ptr<RemoteClient> client, const RemoteOptions& options)
      : shared_(std::make_shared<Shared>()),
        calls_(options.calls, [shared = shared_](Call&) {
          const std::string key = StrCat(kPrefix, "probe");
          (void)shared->Has(std::span(&key, 1));
        }) {
    shared_->client = std::move(client);
    shared_->is_signed = !options.secret.empty();
    if (shared_->is_signed) {
      shared_->name_key = KeyOf("gkv name", options.secret);
      shared_->sign_key = KeyOf("gkv key", options.secret);
    }
    shared_->max_object_bytes = options.max_object_bytes;
  }

  void Has(std::span<const ObjectKey> keys,
           std::span<uint8_t> found) noexcept override {
    assert(keys.size() == found.size());
    std::ranges::fill(found, uint8_t{0});
    if (keys.empty()) return;
    Quietly([&] {
      struct Answer {
        std::vector<std::string> keys;
        std::vector<bool> found;
      };
      const auto answer = std::make_shared<Answer>();
      for (const ObjectKey& key : keys) {
        answer->keys.push_back(shared_->Key(key));
      }
      const auto work = [shared = shared_, answer](Call&) {
        answer->found = shared->Has(answer->keys);
      };
      // Only a call that ended in time may be read.
      if (!calls_.Run(RemoteCalls::Side::kRead, work)) return;
      for (size_t i = 0; i < keys.size(); ++i) {
        found[i] = answer->found[i] &&
                   !shared_->IsRewrite(shared_->Name(keys[i].address));
      }
    });
  }

  std::vector<Loaded> Load(std::span<const ObjectKey> keys) override {
    if (keys.empty()) return {};
    const auto fetch = std::make_shared<Fetch>(shared_, keys);
    calls_.Run(RemoteCalls::Side::kRead,
               [fetch](Call& call) { fetch->Work(call); });
    Fetch::Result result = fetch->Take();
    const auto hits = static_cast<uint64_t>(
        std::ranges::count(result.loaded, LoadState::kHit, &Loaded::state));
    const MutexLock lock(mutex_);
    stats_.hits += hits;
    stats_.misses += keys.size() - hits;
    stats_.damaged += result.damaged;
    return std::move(result.loaded);
  }

  void Put(const ObjectKey& key, StoredBytes object) override {
    bool done = false;
    const auto written = std::make_shared<bool>(false);
    if (!object.bytes.empty() &&
        object.bytes.size() <= shared_->max_object_bytes) {
      done = calls_.Run(
          RemoteCalls::Side::kWrite,
          [shared = shared_, written, name = shared_->Name(key.address),
           text = shared_->Key(key), object = std::move(object)](Call& call) {
            *written = Write(call, *shared, name, text, object);
          });
    }
    const MutexLock lock(mutex_);
    if (!done) {
      ++stats_.failed_writes;
    } else if (*written) {
      ++stats_.writes;
    }
  }

  void Remove(std::span<const ObjectKey> keys) noexcept override {
    Quietly([&] {
      std::vector<std::string> firsts;
      for (const ObjectKey& key : keys) firsts.push_back(shared_->Key(key));
      calls_.Run(RemoteCalls::Side::kWrite,
                 [shared = shared_, firsts = std::move(firsts)](Call& call) {
                   Delete(call, *shared, firsts);
                 });
    });
  }

  void Damaged(const ObjectKey& key) noexcept override {
    Quietly([&] { shared_->Rewrite(shared_->Name(key.address), true); });
    const MutexLock lock(mutex_);
    ++stats_.damaged;
  }

  void Flush() noexcept override {}  // a Put is over when it returns

  Cleared Clear(const Address* salt) noexcept override {
    if (!shared_->client->can_clear()) return Cleared::kUnable;
    bool all = false;
    Quietly([&] {
      const std::string prefix =
          salt ? shared_->SaltPrefix(*salt) : std::string(kPrefix);
      all = calls_.Run(RemoteCalls::Side::kWrite,
                 [shared = shared_, prefix](Call& call) {
                   while (call.Step() && shared->client->DeleteSome(prefix)) {
                   }
                 });
    });
    return all ? Cleared::kAll : Cleared::kFailed;
  }

  StoreStats stats() const override {
    const MutexLock lock(mutex_);
    return stats_;
  }

  RemoteCallStats call_stats() const override { return calls_.stats(); }

 private:
  // Deletes values. Only a value itself says how many chunks it has.
  static void Delete(Call& call, Shared& shared,
                     const std::vector<std::string>& firsts) {
    if (firsts.empty() || !call.Step()) return;
    shared.client->DeleteMany(firsts);
    for (const std::string& key : firsts) {
      for (size_t chunk = 1;; chunk += kChunksAsked) {
        std::vector<std::string> keys, there;
        for (size_t i = 0; i < kChunksAsked; ++i) {
          keys.push_back(ChunkKey(key, chunk + i));
        }
        if (!call.Step()) return;
        const std::vector<bool> found = shared.Has(keys);
        for (size_t i = 0; i < keys.size(); ++i) {
          if (found[i]) there.push_back(std::move(keys[i]));
        }
        if (there.empty()) break;
        if (!call.Step()) return;
        shared.client->DeleteMany(there);
        if (chunk > Chunks(shared.max_object_bytes)) break;
      }
    }
  }

  // For functions that may not throw: no memory for the question is no answer.
  template <typename Do>
  static void Quietly(const Do& what) noexcept {
    try {
      what();
    } catch (const std::bad_alloc&) {
      return;
    }
  }

  const std::shared_ptr<Shared> shared_;
  RemoteCalls calls_;
  mutable Mutex mutex_{AtFork::kWaits};
  StoreStats stats_ GUARDED_BY(mutex_);
};

}  // namespace

std::shared_ptr<RemoteStore> MakeRemoteStore(
    std::shared_ptr<RemoteClient> client, RemoteOptions options) {
  return std::make_shared<Store>(std::move(client), options);
}

}  // namespace gkv
