#include "cache/token_log.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <vector>

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

}  // namespace
}  // namespace gkv
