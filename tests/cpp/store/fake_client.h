#ifndef GEMMAKV_TESTS_STORE_FAKE_CLIENT_H_
#define GEMMAKV_TESTS_STORE_FAKE_CLIENT_H_

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "store/remote_store.h"

namespace gkv {

// A remote in memory that does what a test tells it to.
class FakeClient final : public RemoteClient {
 public:
  using Bytes = std::vector<uint8_t>;

  std::vector<std::optional<RemoteValue>> GetMany(
      std::span<const std::string> keys) override {
    Before("get");
    std::vector<std::optional<RemoteValue>> values(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
      const std::lock_guard lock(mutex);
      const auto found = stored.find(keys[i]);
      ++gets[keys[i]];
      if (found == stored.end()) continue;
      const auto owner = std::make_shared<Bytes>(found->second);
      values[i] = RemoteValue{*owner, owner};
    }
    if (after_get) after_get();
    values.resize(values.size() + extra);
    return values;
  }
  void PutMany(std::span<const RemoteItem> items) override {
    Before("put");
    const std::lock_guard lock(mutex);
    for (const RemoteItem& item : items) {
      EXPECT_LE(item.value.bytes.size(), kRemoteChunkBytes);
      written.push_back(item.key);
      stored[item.key].assign(item.value.bytes.begin(), item.value.bytes.end());
    }
  }
  std::vector<bool> HasMany(std::span<const std::string> keys) override {
    Before("has");
    const std::lock_guard lock(mutex);
    std::vector<bool> found;
    for (const std::string& key : keys) found.push_back(stored.contains(key));
    found.resize(found.size() + extra);
    return found;
  }
  void DeleteMany(std::span<const std::string> keys) override {
    Before("delete");
    const std::lock_guard lock(mutex);
    for (const std::string& key : keys) stored.erase(key);
  }
  bool DeleteSome(const std::string& prefix) override {
    Before("delete");
    const std::lock_guard lock(mutex);
    const auto found = stored.lower_bound(prefix);
    if (found == stored.end() || !found->first.starts_with(prefix)) {
      return false;
    }
    stored.erase(found);
    return true;
  }

  Bytes& First() {
    EXPECT_FALSE(stored.empty());
    return stored.begin()->second;
  }

  std::mutex mutex;
  std::map<std::string, Bytes> stored;
  std::vector<std::string> written;
  std::map<std::string, int> gets;
  std::function<void(const std::string&)> before;
  std::function<void()> after_get;
  size_t extra = 0;

 private:
  void Before(const std::string& call) {
    if (before) before(call);
  }
};

}  // namespace gkv

#endif  // GEMMAKV_TESTS_STORE_FAKE_CLIENT_H_
