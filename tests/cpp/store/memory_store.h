#ifndef GEMMAKV_TESTS_STORE_MEMORY_STORE_H_
#define GEMMAKV_TESTS_STORE_MEMORY_STORE_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "store/block_store.h"

namespace gkv {

// A tier in memory that does what a test tells it to: objects outlive the
// prefix cache that wrote them, may be lost, be changed, come slowly, or not at
// all.
class MemoryStore final : public BlockStore {
 public:
  explicit MemoryStore(std::string tier = "disk", bool mapped = false)
      : tier_(std::move(tier)), mapped_(mapped) {}

  std::string_view tier() const override { return tier_; }

  void Has(std::span<const ObjectKey> keys,
           std::span<uint8_t> found) noexcept override {
    Delay();
    const std::lock_guard lock(mutex_);
    ++questions_;
    for (size_t i = 0; i < keys.size(); ++i) {
      found[i] = objects_.contains(keys[i].address);
    }
  }
  std::vector<Loaded> Load(std::span<const ObjectKey> keys) override {
    Delay();
    std::vector<Loaded> loaded(keys.size());
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto at = objects_.find(keys[i].address);
      if (at == objects_.end() || (lose_ && lose_(keys[i]))) {
        ++stats_.misses;
        continue;
      }
      ++stats_.hits;
      auto bytes = at->second.bytes;
      if (change_) {
        auto copy = std::make_shared<AlignedBuffer<uint8_t>>(bytes->size());
        std::memcpy(copy->data(), bytes->data(), bytes->size());
        change_(keys[i], *copy);
        bytes = copy;
      }
      loaded[i] = {LoadState::kHit,
                   {{bytes->data(), bytes->size()}, bytes, mapped_}};
    }
    return loaded;
  }
  void Put(const ObjectKey& key, StoredBytes object) override {
    Delay();
    if (fail_writes_) {
      const std::lock_guard lock(mutex_);
      ++stats_.failed_writes;
      return;
    }
    auto bytes = std::make_shared<AlignedBuffer<uint8_t>>(object.bytes.size());
    std::memcpy(bytes->data(), object.bytes.data(), object.bytes.size());
    const std::lock_guard lock(mutex_);
    if (!objects_.emplace(key.address, Object{key, bytes}).second) return;
    order_.push_back(key);
    ++stats_.writes;
  }
  void Remove(std::span<const ObjectKey> keys) noexcept override {
    const std::lock_guard lock(mutex_);
    for (const ObjectKey& key : keys) objects_.erase(key.address);
  }
  void Damaged(const ObjectKey& key) noexcept override {
    const std::lock_guard lock(mutex_);
    ++stats_.damaged;
    objects_.erase(key.address);
  }
  void Flush() noexcept override {}
  Cleared Clear(const Address* salt) noexcept override {
    Delay();
    const std::lock_guard lock(mutex_);
    if (fail_writes_) return Cleared::kFailed;
    std::erase_if(objects_, [&](const auto& entry) {
      return salt == nullptr || entry.second.key.salt == *salt;
    });
    return Cleared::kAll;
  }
  StoreStats stats() const override {
    const std::lock_guard lock(mutex_);
    StoreStats stats = stats_;
    stats.entries = objects_.size();
    for (const auto& [address, object] : objects_) {
      stats.bytes += object.bytes->size();
    }
    return stats;
  }

  // Every call takes so long.
  void set_delay(std::chrono::milliseconds delay) { delay_ = delay.count(); }
  // No call returns before Release().
  void Hang() {
    const std::lock_guard lock(mutex_);
    hangs_ = true;
  }
  void Release() {
    {
      const std::lock_guard lock(mutex_);
      hangs_ = false;
    }
    released_.notify_all();
  }
  // Calls that hang now.
  size_t hanging() const {
    const std::lock_guard lock(mutex_);
    return hanging_;
  }
  void set_fail_writes(bool fail) { fail_writes_ = fail; }
  // What is there and not to be had when it is loaded.
  void set_lose(std::function<bool(const ObjectKey&)> lose) {
    const std::lock_guard lock(mutex_);
    lose_ = std::move(lose);
  }
  // What becomes of the bytes on their way.
  void set_change(
      std::function<void(const ObjectKey&, AlignedBuffer<uint8_t>&)> change) {
    const std::lock_guard lock(mutex_);
    change_ = std::move(change);
  }
  // In the order of writing.
  std::vector<ObjectKey> keys() const {
    const std::lock_guard lock(mutex_);
    return order_;
  }
  size_t questions() const {
    const std::lock_guard lock(mutex_);
    return questions_;
  }

 private:
  struct Object {
    ObjectKey key;
    std::shared_ptr<const AlignedBuffer<uint8_t>> bytes;
  };

  void Delay() {
    std::unique_lock lock(mutex_);
    ++hanging_;
    released_.wait(lock, [&] { return !hangs_; });
    --hanging_;
    lock.unlock();
    if (delay_ > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(delay_));
    }
  }

  const std::string tier_;
  const bool mapped_;
  std::atomic<int64_t> delay_ = 0;
  std::atomic<bool> fail_writes_ = false;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable released_;
  bool hangs_ = false;
  size_t hanging_ = 0;
  std::map<Address, Object> objects_;
  std::vector<ObjectKey> order_;
  std::function<bool(const ObjectKey&)> lose_;
  std::function<void(const ObjectKey&, AlignedBuffer<uint8_t>&)> change_;
  size_t questions_ = 0;
  StoreStats stats_;
};

}  // namespace gkv

#endif  // GEMMAKV_TESTS_STORE_MEMORY_STORE_H_
