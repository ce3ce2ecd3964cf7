#include "store/block_store.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>

#include "base/aligned_buffer.h"
#include "store/block_store_conformance.h"
#include "store/fake_client.h"
#include "store/folder_places.h"
#include "store/folder_store.h"

namespace gkv {
namespace {

// What a tier is in the simplest way: others are compared with it.
class MemoryStore final : public BlockStore {
 public:
  using Medium = std::map<Address, std::pair<ObjectKey, std::vector<uint8_t>>>;

  explicit MemoryStore(std::shared_ptr<Medium> medium)
      : medium_(std::move(medium)) {}
  std::string_view tier() const override { return "memory"; }
  void Has(std::span<const ObjectKey> keys,
           std::span<uint8_t> found) noexcept override {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < keys.size(); ++i) {
      found[i] = medium_->contains(keys[i].address);
    }
  }
  std::vector<Loaded> Load(std::span<const ObjectKey> keys) override {
    const std::lock_guard lock(mutex_);
    std::vector<Loaded> loaded;
    for (const ObjectKey& key : keys) {
      loaded.emplace_back();
      const auto at = medium_->find(key.address);
      ++(at == medium_->end() ? stats_.misses : stats_.hits);
      if (at == medium_->end()) continue;
      const auto& bytes = at->second.second;
      const auto copy = std::make_shared<AlignedBuffer<uint8_t>>(bytes.size());
      std::copy(bytes.begin(), bytes.end(), copy->data());
      loaded.back() = {LoadState::kHit,
                       {{copy->data(), copy->size()}, copy, false}};
    }
    return loaded;
  }
  void Put(const ObjectKey& key, StoredBytes object) override {
    const std::lock_guard lock(mutex_);
    stats_.writes +=
        medium_
            ->try_emplace(
                key.address, key,
                std::vector<uint8_t>(object.bytes.begin(), object.bytes.end()))
            .second;
  }
  void Remove(std::span<const ObjectKey> keys) noexcept override {
    const std::lock_guard lock(mutex_);
    for (const ObjectKey& key : keys) medium_->erase(key.address);
  }
  void Damaged(const ObjectKey& key) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto at = medium_->find(key.address);
    if (at == medium_->end()) return;
    try {
      if (AddressOf(ReadHead(at->second.second)) == key.address) return;
    } catch (const Error&) {
    }
    medium_->erase(at);
    ++stats_.damaged;
  }
  void Flush() noexcept override {}
  Cleared Clear(const Address* salt) noexcept override {
    const std::lock_guard lock(mutex_);
    std::erase_if(*medium_, [&](const auto& one) {
      return salt == nullptr || one.second.first.salt == *salt;
    });
    return Cleared::kAll;
  }
  StoreStats stats() const override {
    const std::lock_guard lock(mutex_);
    StoreStats stats = stats_;
    stats.entries = medium_->size();
    for (const auto& one : *medium_) stats.bytes += one.second.second.size();
    return stats;
  }

 private:
  mutable std::mutex mutex_;
  const std::shared_ptr<Medium> medium_;
  StoreStats stats_;
};

class MemoryTier final : public ConformanceTier {
 public:
  BlockStore& store() override { return *store_; }
  void Reopen() override { store_ = std::make_unique<MemoryStore>(medium_); }
  void Corrupt(const ObjectKey& key, size_t offset) override {
    medium_->at(key.address).second[offset] ^= 8;
  }

 private:
  std::shared_ptr<MemoryStore::Medium> medium_ =
      std::make_shared<MemoryStore::Medium>();
  std::unique_ptr<BlockStore> store_ = std::make_unique<MemoryStore>(medium_);
};

class FolderTier final : public ConformanceTier {
 public:
  explicit FolderTier(const FolderOptions& options, const std::string& above)
      : options_(options), folder_(above) {
    Reopen();
  }
  BlockStore& store() override { return *store_; }
  void Reopen() override {
    store_.reset();
    store_ = OpenFolderStore(folder_ / "cache", options_);
  }
  void Corrupt(const ObjectKey& key, size_t offset) override {
    FlipByte(FileOf(folder_ / "cache", key), offset);
  }

 private:
  const FolderOptions options_;
  const FolderAt folder_;
  std::shared_ptr<FolderStore> store_;
};

class RemoteTier final : public ConformanceTier {
 public:
  explicit RemoteTier(std::vector<uint8_t> secret) {
    options_.secret = std::move(secret);
    options_.calls.timeout = std::chrono::seconds(60);
    Reopen();
  }
  BlockStore& store() override { return *store_; }
  void Reopen() override { store_ = MakeRemoteStore(client_, options_); }
  void Corrupt(const ObjectKey& key, size_t offset) override {
    const size_t header = options_.secret.empty() ? 24 : 56;
    size_t found = 0;
    const std::lock_guard lock(client_->mutex);
    for (auto& [name, value] : client_->stored) {
      const std::span object = std::span(value).subspan(header);
      if (AddressOf(ReadHead(object)) != key.address) continue;
      object[offset] ^= 8;
      ++found;
    }
    EXPECT_EQ(found, 1u);
  }
  bool counts() const override { return false; }
  bool trusts() const override { return true; }

 private:
  RemoteOptions options_;
  const std::shared_ptr<FakeClient> client_ = std::make_shared<FakeClient>();
  std::shared_ptr<RemoteStore> store_;
};

std::unique_ptr<ConformanceTier> MakeSigned() {
  return std::make_unique<RemoteTier>(std::vector<uint8_t>{1, 2, 3, 4});
}
std::unique_ptr<ConformanceTier> MakeUnsigned() {
  return std::make_unique<RemoteTier>(std::vector<uint8_t>{});
}
std::unique_ptr<ConformanceTier> MakeMemory() {
  return std::make_unique<MemoryTier>();
}
std::unique_ptr<ConformanceTier> MakeDisk() {
  return std::make_unique<FolderTier>(
      FolderOptions{.tier = "disk", .budget_bytes = 1 << 30}, OnDisk());
}
std::unique_ptr<ConformanceTier> MakeShared() {
  return std::make_unique<FolderTier>(
      FolderOptions{.tier = "shared", .mapped = true, .budget_bytes = 1 << 26},
      InMemory());
}
std::unique_ptr<ConformanceTier> MakeSharedRead() {
  return std::make_unique<FolderTier>(
      FolderOptions{.tier = "shared", .mapped = false, .budget_bytes = 1 << 26},
      InMemory());
}

INSTANTIATE_TEST_SUITE_P(Memory, BlockStoreConformance,
                         testing::Values(ConformanceFactory(&MakeMemory)));
INSTANTIATE_TEST_SUITE_P(Disk, BlockStoreConformance,
                         testing::Values(ConformanceFactory(&MakeDisk)));
INSTANTIATE_TEST_SUITE_P(Shared, BlockStoreConformance,
                         testing::Values(ConformanceFactory(&MakeShared)));
INSTANTIATE_TEST_SUITE_P(SharedRead, BlockStoreConformance,
                         testing::Values(ConformanceFactory(&MakeSharedRead)));
INSTANTIATE_TEST_SUITE_P(RemoteSigned, BlockStoreConformance,
                         testing::Values(ConformanceFactory(&MakeSigned)));
INSTANTIATE_TEST_SUITE_P(RemoteUnsigned, BlockStoreConformance,
                         testing::Values(ConformanceFactory(&MakeUnsigned)));

}  // namespace
}  // namespace gkv
