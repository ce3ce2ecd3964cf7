#include "cache/token_log.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "base/failing_new.h"

namespace gkv {
namespace {

using Tokens = std::vector<int32_t>;

Tokens All(const TokenLog& log) {
  Tokens tokens(log.size());
  log.Copy(0, tokens);
  return tokens;
}

Tokens Iota(size_t count, int32_t from = 0) {
  Tokens tokens(count);
  std::iota(tokens.begin(), tokens.end(), from);
  return tokens;
}

TEST(TokenLogTest, RandomUseEqualsAVector) {
  std::mt19937 rng(1);
  std::vector<std::pair<TokenLog, Tokens>> logs = {{TokenLog(16), {}}};
  for (int step = 0; step < 5000; ++step) {
    auto& [log, model] = logs[rng() % logs.size()];
    switch (rng() % 4) {
      case 0: {
        const Tokens more = Iota(rng() % 40, static_cast<int32_t>(rng() % 99));
        log.Append(more);
        model.insert(model.end(), more.begin(), more.end());
        break;
      }
      case 1: {
        const size_t size = rng() % (model.size() + 1);
        log.Truncate(size);
        model.resize(size);
        break;
      }
      case 2:
        if (logs.size() < 8) {
          auto copy = logs[rng() % logs.size()];
          logs.push_back(std::move(copy));
        } else {
          logs.pop_back();
        }
        break;
      default: {
        const size_t begin = rng() % (model.size() + 1);
        Tokens part(rng() % (model.size() - begin + 1));
        log.Copy(begin, part);
        EXPECT_TRUE(std::equal(part.begin(), part.end(),
                               model.begin() + static_cast<long>(begin)));
      }
    }
    for (const auto& [other, expected] : logs) {
      ASSERT_EQ(All(other), expected) << "step " << step;
    }
  }
}

TEST(TokenLogTest, EqualPrefixesHaveEqualHashesHoweverTheyCame) {
  TokenLog whole(16), pieces(16), other(16);
  whole.Append(Iota(64));
  for (const int32_t token : Iota(64)) pieces.Append({{token}});
  Tokens changed = Iota(64);
  changed[20] = -1;
  other.Append(changed);
  EXPECT_EQ(whole.PrefixHash(0), Hash128{});
  for (size_t pages = 1; pages <= 4; ++pages) {
    EXPECT_EQ(whole.PrefixHash(pages), pieces.PrefixHash(pages));
    EXPECT_EQ(whole.PrefixHash(pages) == other.PrefixHash(pages), pages == 1);
  }
  // A page's hash covers those before it.
  EXPECT_NE(whole.PrefixHash(4), other.PrefixHash(4));
  pieces.Truncate(33);
  pieces.Append(Iota(31, 33));
  EXPECT_EQ(whole.PrefixHash(4), pieces.PrefixHash(4));
}

// What a copy reads is never written, neither while it is there nor when it has
// just gone away without anybody having waited for it. The flag orders nothing:
// ThreadSanitizer sees what the log itself orders.
TEST(TokenLogTest, AppendingRacesWithNoCopy) {
  TokenLog log(16);
  log.Append(Iota(5));
  for (int32_t round = 0; round < 100; ++round) {
    const size_t size = log.size();
    std::atomic<bool> go_on = false;
    std::thread reader([copy = log, size, &go_on, round]() mutable {
      if (round % 2 == 0) go_on.store(true, std::memory_order_relaxed);
      EXPECT_EQ(All(copy).size(), size);
      if (round % 3 == 0) copy.Append({{-1}});
      copy = TokenLog(16);
      go_on.store(true, std::memory_order_relaxed);
    });
    while (!go_on.load(std::memory_order_relaxed)) std::this_thread::yield();
    log.Append({{round}});
    EXPECT_EQ(All(log).back(), round);
    reader.join();
  }
}

TEST(TokenLogTest, OfTwoThatShareATailBothGoOn) {
  TokenLog left(16);
  left.Append(Iota(5));
  TokenLog right = left;
  left.Append({{100}});
  right.Append({{200, 201}});
  left.Append({{101}});
  EXPECT_EQ(All(left), (Tokens{0, 1, 2, 3, 4, 100, 101}));
  EXPECT_EQ(All(right), (Tokens{0, 1, 2, 3, 4, 200, 201}));
}

TEST(TokenLogTest, AFailedAppendChangesNothing) {
  TokenLog log(16), other(16);
  log.Append(Iota(20));
  other.Append(Iota(20));
  size_t failures = 0;
  while (log.size() == 20) {
    const TokenLog copy = log;
    const Tokens more = Iota(60, 20);
    try {
      const FailingNew failing(failures + 1);
      log.Append(more);
    } catch (const std::bad_alloc&) {
      ++failures;
      ASSERT_EQ(All(log), Iota(20)) << failures;
    }
  }
  EXPECT_GT(failures, 3u);
  other.Append(Iota(60, 20));
  EXPECT_EQ(All(log), Iota(80));
  EXPECT_EQ(log.PrefixHash(5), other.PrefixHash(5));
}

}  // namespace
}  // namespace gkv
