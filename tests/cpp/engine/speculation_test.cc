// Who guesses for whom, and how much, without a model: requests are made up.
// request_test has guesses as a request takes them, draft_model_test and
// target_drafter_test have models that guess.

#include "engine/speculation.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "cache/filled_cache.h"
#include "engine/drafter.h"

namespace gkv {
namespace {

using Tokens = std::vector<int32_t>;
using Shares = std::vector<double>;

// Guesses the same each time, tokens from 5 on, so likely; throws with none.
class Says : public Drafter {
 public:
  explicit Says(const Shares& shares) {
    for (const double right : shares) {
      guesses_.push_back({5 + static_cast<int32_t>(guesses_.size()), right});
    }
  }
  void Read(std::span<const int32_t> added, size_t) noexcept override {
    seen.insert(seen.end(), added.begin(), added.end());
  }
  size_t Propose(std::span<const int32_t> added,
                 std::span<DraftGuess> guesses) override {
    seen.insert(seen.end(), added.begin(), added.end());
    ++asked;
    if (guesses_.empty()) throw InvalidArgument("mine");
    const size_t count = std::min(guesses.size(), guesses_.size());
    std::copy_n(guesses_.begin(), count, guesses.begin());
    return count;
  }
  void End(std::span<const int32_t> added) noexcept override {
    seen.insert(seen.end(), added.begin(), added.end());
    ended = true;
  }
  Tokens seen;
  size_t asked = 0;
  bool ended = false;

 private:
  std::vector<DraftGuess> guesses_;
};

// A request that decodes, with room for seven guesses.
struct Made {
  explicit Made(const Shares& shares)
      : drafter(std::make_shared<Says>(shares)) {
    cache->Append(lock, Tokens{1, 2, 3});
    candidate.sources.drafter = drafter;
    candidate.cache = cache.get();
    candidate.lock = &lock;
    candidate.decodes = candidate.is_new = true;
    candidate.most = 7;
  }
  std::shared_ptr<Conversation> cache =
      std::make_shared<Conversation>(FilledLayout(KvDtype::kBF16, 16),
                                     CacheOptions{.capacity_tokens = 100}, "");
  RunLock lock = cache->Lock();
  std::shared_ptr<Says> drafter;
  Candidate candidate;
};

class SpeculationTest : public ::testing::Test {
 protected:
  void Guess(std::vector<Candidate*> round) { speculation_.Guess(round); }
  // A few steps that decode so many requests, each with so many guesses.
  void Steps(size_t requests, size_t guesses, double seconds) {
    for (int i = 0; i < 40; ++i) {
      speculation_.Note(
          {.requests = requests, .guesses = guesses, .seconds = seconds});
    }
  }

  const Model target_ = {};
  ThreadPool threads_{1};
  SideWork side_work_{this};
  Speculation speculation_{target_, threads_, {}, side_work_};
};

TEST_F(SpeculationTest, NothingBeforeItIsKnownWhatItCosts) {
  Made a(Shares{1, 1});
  Guess({&a.candidate});
  EXPECT_EQ(a.candidate.proposed.size(), 2u);
  EXPECT_TRUE(a.candidate.guesses().empty());
  Steps(1, 0, 0.01);
  Guess({&a.candidate});
  ASSERT_EQ(a.candidate.guesses().size(), 2u);
  EXPECT_EQ(a.candidate.guesses()[1].id, 6);
  a.candidate.Forget();
  EXPECT_TRUE(a.candidate.guesses().empty());
}

TEST_F(SpeculationTest, OnlyWhatPays) {
  Made sure(Shares{0.99, 0.99}), doubtful(Shares{0.2, 0.2});
  const auto guesses = [&] {
    Guess({&doubtful.candidate, &sure.candidate});
    return std::pair(doubtful.candidate.guesses().size(),
                     sure.candidate.guesses().size());
  };
  Steps(2, 0, 0.01);
  Steps(2, 2, 0.012);
  EXPECT_EQ(guesses(), (std::pair<size_t, size_t>(0, 2)));
  // As much as a step each: with two requests they would have to bring two
  // tokens.
  Steps(2, 2, 0.04);
  EXPECT_EQ(guesses(), (std::pair<size_t, size_t>(0, 0)));
  // Of steps with other requests nothing is known.
  speculation_.Note({.requests = 2, .only_decodes = false});
  EXPECT_EQ(guesses(), (std::pair<size_t, size_t>(0, 0)));
}

TEST_F(SpeculationTest, NoneWhileAPromptIsRead) {
  Made a(Shares{1}), reads(Shares{1});
  reads.candidate.decodes = reads.candidate.is_new = false;
  Steps(1, 0, 0.01);
  Guess({&a.candidate, &reads.candidate});
  EXPECT_TRUE(a.candidate.guesses().empty());
  EXPECT_EQ(reads.drafter->seen, (Tokens{1, 2, 3}));
  EXPECT_EQ(reads.drafter->asked, 0u);
  Guess({&a.candidate});
  EXPECT_EQ(a.candidate.guesses().size(), 1u);
}

// One that waits for its turn keeps what was guessed for it, and is planned for
// again.
TEST_F(SpeculationTest, NobodyIsAskedTwice) {
  Made a(Shares{1});
  Steps(1, 0, 0.01);
  Steps(2, 0, 0.01);
  Guess({&a.candidate});
  EXPECT_EQ(a.drafter->asked, 1u);
  a.candidate.is_new = false;
  Made b(Shares{1});
  Guess({&a.candidate, &b.candidate});
  EXPECT_EQ(a.drafter->asked, 1u);
  EXPECT_EQ(a.candidate.guesses().size(), 1u);
  EXPECT_EQ(b.candidate.guesses().size(), 1u);
}

TEST_F(SpeculationTest, WhatIsThrownIsOfOneRequest) {
  Made bad(Shares{}), good(Shares{1});
  Steps(2, 0, 0.01);
  Guess({&bad.candidate, &good.candidate});
  ASSERT_TRUE(bad.candidate.error);
  EXPECT_THROW(std::rethrow_exception(bad.candidate.error), InvalidArgument);
  EXPECT_TRUE(bad.candidate.guesses().empty());
  EXPECT_FALSE(good.candidate.error);
  EXPECT_EQ(good.candidate.guesses().size(), 1u);
}

TEST_F(SpeculationTest, ADrafterSeesEachTokenOnce) {
  Made a(Shares{1});
  a.candidate.decodes = false;
  Guess({&a.candidate});
  a.candidate.decodes = true;
  a.cache->Append(a.lock, Tokens{4, 5});
  Guess({&a.candidate});
  a.cache->Append(a.lock, Tokens{6});
  DrafterGuesser::End(a.candidate);
  EXPECT_TRUE(a.drafter->ended);
  EXPECT_EQ(a.drafter->seen, (Tokens{1, 2, 3, 4, 5, 6}));
  DrafterGuesser::End(a.candidate);
  EXPECT_EQ(a.drafter->seen.size(), 6u);
}

}  // namespace
}  // namespace gkv
