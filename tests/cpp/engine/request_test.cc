// Requests without a model and without threads: rows are made up, and whoever
// takes them says what is wanted.

#include "engine/request.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "cache/filled_cache.h"
#include "engine/drafter.h"
#include "engine/speculation.h"

namespace gkv {
namespace {

using Tokens = std::vector<int32_t>;

constexpr size_t kVocab = 40;

// Says a given text, whatever the rows are.
class Script : public RowConsumer {
 public:
  explicit Script(Tokens tokens) : tokens_(std::move(tokens)) {}

  RowOutput output() const override { return {}; }
  TokenEvent Take(const OutputRow& row) override {
    EXPECT_EQ(row.values.size(), kVocab);
    if (said_ == tokens_.size()) throw InvalidArgument("nothing more to say");
    TokenEvent event{tokens_[said_++]};
    if (said_ == tokens_.size() || row.last_token) {
      event.finish_reason = FinishReason::kLength;
    }
    return event;
  }

 private:
  const Tokens tokens_;
  size_t said_ = 0;
};

class Guesses : public Drafter {
 public:
  explicit Guesses(Tokens tokens) : tokens_(std::move(tokens)) {}
  void Read(std::span<const int32_t> added, size_t known) noexcept override {
    seen.insert(seen.end(), added.begin(), added.end());
    known_at_first.push_back(known);
  }
  size_t Propose(std::span<const int32_t> added,
                 std::span<DraftGuess> guesses) override {
    seen.insert(seen.end(), added.begin(), added.end());
    const size_t count = std::min(guesses.size(), tokens_.size());
    for (size_t i = 0; i < count; ++i) guesses[i] = {tokens_[i]};
    return count;
  }
  void End(std::span<const int32_t> added) noexcept override {
    seen.insert(seen.end(), added.begin(), added.end());
    ended = true;
  }
  Tokens seen;
  std::vector<size_t> known_at_first;
  bool ended = false;

 private:
  const Tokens tokens_;
};

class RequestTest : public ::testing::Test {
 protected:
  std::shared_ptr<TokenStream> NewStream(size_t prompt, bool streamed = false) {
    Tokens tokens(prompt);
    std::iota(tokens.begin(), tokens.end(), 1);
    return std::make_shared<TokenStream>(
        cache_, cache_->Lock(), tokens, TokenStream::Options{streamed});
  }

  Request& Make(Request::Parts parts) {
    request_ = std::make_unique<Request>(std::move(parts));
    return *request_;
  }

  // Has it guessed for, whether that pays or not.
  const Candidate& Guess(Request& s, size_t max_guesses = 7) {
    speculation_.Guess(std::array{&s.ToGuess(max_guesses)});
    side_work_.Wait();
    return s.ToGuess(max_guesses);
  }

  PlanInput ToPlan(Request& s, size_t max_guesses = 7) {
    if (s.runnable()) Guess(s, max_guesses);
    return s.ToPlan();
  }

  // One step over as much as is there, at most `rows` rows.
  void Step(Request& s, size_t rows = 100) {
    const PlanInput input = ToPlan(s);
    const size_t end = std::min(input.target, input.next + rows);
    StepSlice slice = s.Prepare({0, input.next, end}, kVocab, 8);
    values_.assign(slice.output.rows * kVocab, 0);
    slice.output.data = values_.data();
    if (!slice.masks.empty()) s.ComputeMasks(slice);
    s.TakeRows(slice, nullptr);
    s.Conclude(slice);
  }

  std::shared_ptr<BlockPool> pool_ = BlockPool::Create();
  std::shared_ptr<Conversation> cache_ = std::make_shared<Conversation>(
      FilledLayout(KvDtype::kBF16, 16),
      CacheOptions{.capacity_tokens = 100, .pool = pool_}, "");
  std::unique_ptr<Request> request_;
  std::vector<float> values_;
  std::atomic<size_t> asked_ = 0;  // of Forces
  const Model target_ = {};
  ThreadPool threads_{1};
  SideWork side_work_{this};
  Speculation speculation_{
      target_, threads_, {.always_guess = true}, side_work_};
};

TEST_F(RequestTest, WaitsPrefillsDecodesEnds) {
  const auto stream = NewStream(20);
  Request& s = Make({.stream = stream,
                      .consumer = std::make_unique<Script>(Tokens{7, 8, 9})});
  EXPECT_TRUE(s.is<Request::Waiting>());
  EXPECT_FALSE(s.runnable());
  s.Start();
  EXPECT_TRUE(s.is<Request::Prefilling>());
  EXPECT_TRUE(s.runnable());
  PlanInput input = ToPlan(s);
  EXPECT_EQ(input.next, 0u);
  EXPECT_EQ(input.target, 20u);
  EXPECT_EQ(input.logits_begin, 19u);
  EXPECT_FALSE(input.decoding);
  Step(s, 12);
  EXPECT_TRUE(s.is<Request::Prefilling>());
  EXPECT_EQ(ToPlan(s).next, 12u);
  Step(s);
  EXPECT_TRUE(s.is<Request::Decoding>());
  input = ToPlan(s);
  EXPECT_EQ(input.next, 20u);
  EXPECT_EQ(input.target, 21u);
  EXPECT_TRUE(input.decoding);
  EXPECT_FALSE(cache_->TryLock());
  Step(s);
  Step(s);
  EXPECT_TRUE(s.is<Request::Ended>());
  EXPECT_EQ(stream->Result().token_ids, (Tokens{7, 8, 9}));
  EXPECT_EQ(stream->Result().finish_reason, FinishReason::kLength);
  EXPECT_EQ(cache_->length(), 23u);
  EXPECT_TRUE(cache_->TryLock());
}

// Allows everything, and says that it forces given tokens.
struct Forces : Constraint {
  Forces(Tokens tokens, std::atomic<size_t>* asked)
      : tokens(std::move(tokens)), asked(asked) {}
  bool ComputeMask(std::span<uint32_t> mask) override {
    std::fill(mask.begin(), mask.end(), ~uint32_t{0});
    return false;
  }
  size_t Forced(std::span<int32_t> found) override {
    ++*asked;
    const size_t count = std::min(found.size(), tokens.size());
    std::copy_n(tokens.begin(), count, found.begin());
    return count;
  }
  void Accept(int32_t) override {}
  void Rollback(size_t) override {}
  std::unique_ptr<Constraint> Clone() const override {
    return std::make_unique<Forces>(tokens, asked);
  }
  const Tokens tokens;
  std::atomic<size_t>* const asked;  // how often
};

TEST_F(RequestTest, WhatIsForcedComesBeforeWhatIsGuessed) {
  struct Case {
    Tokens guessed, forced, expected;
  };
  for (const Case& c : {
           Case{{7, 8, 9}, {}, {7, 8, 9}},
           Case{{}, {7, 8}, {7, 8}},
           Case{{7, 8, 9}, {7, 8}, {7, 8, 9}},  // further
           Case{{7}, {7, 8}, {7, 8}},
           Case{{7, 9, 9}, {7, 8}, {7, 8}},  // otherwise
           Case{{5}, {1, 2, 3, 4, 5, 6, 7, 8}, {1, 2, 3, 4, 5}},
       }) {
    cache_->Truncate(0);
    const auto stream = NewStream(20);
    Request& s = Make({.stream = stream,
                        .consumer = std::make_unique<Script>(Tokens(10, 3)),
                        .constraint =
                            std::make_unique<Forces>(c.forced, &asked_),
                        .guessed_by = {
                            .drafter = std::make_shared<Guesses>(c.guessed),
                            .forced = true}});
    s.Start();
    EXPECT_TRUE(Guess(s, 5).proposed.empty())
        << "nothing of its own follows yet";
    Step(s);
    Tokens ids;
    for (const DraftGuess& guess : Guess(s, 5).proposed) {
      ids.push_back(guess.id);
      EXPECT_EQ(guess.right, 1);
    }
    EXPECT_EQ(ids, c.expected);
    // It waits for its turn: these are its guesses still.
    asked_ = 0;
    EXPECT_EQ(Guess(s, 5).guesses().size(), c.expected.size());
    EXPECT_EQ(asked_, 0u);
    Step(s);
    Guess(s, 5);
    EXPECT_EQ(asked_, 1u) << "another token was said";
    s.Settle(FinishReason::kCancelled);
  }
}

TEST_F(RequestTest, NoMoreIsForcedThanThereIsRoomFor) {
  const Tokens forced(30, 5);
  const auto most = [&](size_t prompt, bool forces) {
    cache_->Truncate(0);
    const auto stream = NewStream(prompt);
    GenerateOptions options;
    options.max_tokens = 4;
    Request& s = Make(
        {.stream = stream,
         .consumer = std::make_unique<TokenSampler>(
             options, 1, Tokens(), true, Tokens(), nullptr),
         .constraint = std::make_unique<Forces>(forced, &asked_),
         .guessed_by = {.forced = forces}});
    s.Start();
    Step(s);
    const size_t count = Guess(s, 15).guesses().size();
    s.Settle(FinishReason::kCancelled);
    return count;
  };
  EXPECT_EQ(most(20, true), 2u);  // the last one follows from the row before
  EXPECT_EQ(most(97, true), 1u);  // 98 of 100 are there
  EXPECT_EQ(most(98, true), 0u);
  EXPECT_EQ(most(20, false), 0u);
}

TEST_F(RequestTest, APromptAlone) {
  const auto stream = NewStream(20);
  Request& s = Make({.stream = stream});
  s.Start();
  Step(s);
  EXPECT_TRUE(s.is<Request::Ended>());
  EXPECT_EQ(cache_->length(), 20u);
  EXPECT_EQ(cache_->next_position(), 20u);
}

TEST_F(RequestTest, WaitsForItsReader) {
  const auto stream = NewStream(20, true);
  Request& s =
      Make({.stream = stream,
            .consumer = std::make_unique<Script>(Tokens{7, 8, 9, 10})});
  s.Start();
  Step(s);
  EXPECT_TRUE(s.runnable());
  Step(s);
  EXPECT_FALSE(s.runnable());
  EXPECT_TRUE(s.is<Request::Decoding>());
  EXPECT_EQ(stream->NextEvent()->token_id, 7);
  EXPECT_TRUE(s.runnable());
  Step(s);
  // What was not delivered goes.
  EXPECT_TRUE(stream->Stop(TokenStream::Interrupt::kCancel));
  s.Settle(FinishReason::kCancelled);
  EXPECT_EQ(cache_->length(), 21u);
  EXPECT_EQ(stream->NextEvent()->finish_reason, FinishReason::kCancelled);
  EXPECT_TRUE(stream->Drained());
  EXPECT_EQ(stream->Result().token_ids, Tokens{7});
}

TEST_F(RequestTest, AnErrorAfterDeliveredTokensStaysWhatItIs) {
  const auto stream = NewStream(20, true);
  Request& s =
      Make({.stream = stream,
            .consumer = std::make_unique<Script>(Tokens{7, 8, 9, 10})});
  s.Start();
  Step(s);
  EXPECT_EQ(stream->NextEvent()->token_id, 7);
  s.Fail(
      std::make_exception_ptr(CorruptFile("weights of layer 3 are damaged")));
  try {
    stream->Result();
    ADD_FAILURE();
  } catch (const CorruptFile& error) {
    EXPECT_STREQ(error.what(),
                 "weights of layer 3 are damaged; the conversation keeps the 1 "
                 "tokens that were delivered");
  }
}

// As that of a Python exception: whoever has the interpreter's lock may be
// asking the stream something.
TEST_F(RequestTest, AnErrorThatNobodyGetsIsDestroyedBehindNoLock) {
  const auto stream = NewStream(20);
  struct AsksAtItsEnd {
    std::shared_ptr<bool> asked;
    std::shared_ptr<TokenStream> stream;
    ~AsksAtItsEnd() {
      if (asked.use_count() > 2) return;  // a copy of what is thrown
      *asked = stream->done();
    }
  };
  const auto asked = std::make_shared<bool>(false);
  stream->Stop(TokenStream::Interrupt::kAbort);
  stream->End(FinishReason::kNone,
              std::make_exception_ptr(AsksAtItsEnd{asked, stream}));
  EXPECT_TRUE(*asked);
}

TEST_F(RequestTest, ReadersOfManyStreamsSayWhenTheyHaveReadAll) {
  const auto stream = NewStream(20, true);
  size_t told = 0;
  stream->set_on_change([&] { ++told; });
  Request& s =
      Make({.stream = stream,
            .consumer = std::make_unique<Script>(Tokens{7, 8, 9, 10})});
  s.Start();
  Step(s);
  EXPECT_EQ(told, 1u);
  EXPECT_FALSE(stream->Acknowledge());  // nobody waits for that
  Step(s);
  EXPECT_FALSE(s.runnable());
  EXPECT_FALSE(stream->Acknowledge());  // nothing was read
  const std::chrono::milliseconds now(0);
  EXPECT_EQ(stream->NextEvent(now, false)->token_id, 7);
  EXPECT_EQ(stream->NextEvent(now, false)->token_id, 8);
  EXPECT_FALSE(s.runnable());
  EXPECT_TRUE(stream->waits_for_reader());
  EXPECT_TRUE(stream->Acknowledge());
  EXPECT_FALSE(stream->Acknowledge());
  EXPECT_TRUE(s.runnable());
  Step(s);
  EXPECT_EQ(told, 3u);
  stream->set_on_change({});
}

TEST_F(RequestTest, GivesItsBlocksBackAndComesBack) {
  const auto stream = NewStream(20);
  Request& s = Make({.stream = stream,
                      .consumer = std::make_unique<Script>(Tokens{7, 8, 9})});
  s.Start();
  Step(s);
  Step(s);
  EXPECT_TRUE(s.holds_blocks());
  EXPECT_GT(pool_->bytes_in_use(), 0u);
  s.Preempt();
  EXPECT_TRUE(s.is<Request::Preempted>());
  EXPECT_FALSE(s.runnable());
  EXPECT_FALSE(s.holds_blocks());
  EXPECT_EQ(pool_->bytes_in_use(), 0u);
  EXPECT_EQ(cache_->length(), 22u);
  s.Start();
  EXPECT_TRUE(s.catching_up());
  const PlanInput input = ToPlan(s);
  EXPECT_EQ(input.next, 0u);
  EXPECT_EQ(input.target, 22u);
  EXPECT_EQ(input.logits_begin, 21u) << "no row is taken twice";
  Step(s, 21);
  EXPECT_TRUE(s.catching_up());
  Step(s);
  EXPECT_FALSE(s.catching_up());
  EXPECT_EQ(stream->Result().token_ids, (Tokens{7, 8, 9}));
}

TEST_F(RequestTest, RowsThatWereWrittenAreNotWrittenAgain) {
  const auto stream = NewStream(20);
  std::vector<float> out(20 * kVocab);
  const RowOutput output{RowOutput::kLogits, 20, out.data()};
  Request& s = Make({.stream = stream,
                      .consumer = std::make_unique<RowWriter>(output),
                      .output_rows = 20});
  s.Start();
  Step(s, 12);
  s.Preempt();
  s.Start();
  const PlanInput input = ToPlan(s);
  EXPECT_EQ(input.next, 0u);
  EXPECT_EQ(input.logits_begin, 12u);
  const StepSlice slice = s.Prepare({0, 0, 20}, kVocab, 8);
  EXPECT_EQ(slice.output.rows, 8u);
  EXPECT_EQ(slice.output.data, out.data() + 12 * kVocab);
}

TEST_F(RequestTest, GuessesCountAsFarAsTheyAreRight) {
  const auto stream = NewStream(20);
  const auto drafter = std::make_shared<Guesses>(Tokens{8, 9, 11, 12});
  Request& s = Make(
      {.stream = stream,
       .consumer = std::make_unique<Script>(Tokens{7, 8, 9, 10, 11, 12, 13}),
       .guessed_by = {.drafter = drafter}});
  s.Start();
  Step(s);
  EXPECT_EQ(ToPlan(s).target, 25u);
  Step(s);  // 8 and 9 were right, so 10 is known as well
  EXPECT_EQ(cache_->length(), 24u);
  EXPECT_EQ(ToPlan(s, 2).next, 23u);
  EXPECT_EQ(ToPlan(s).target, 26u) << "guesses are made once";
  EXPECT_EQ(drafter->seen, cache_->tokens());
  EXPECT_EQ(drafter->known_at_first, (std::vector<size_t>{0}));
  EXPECT_FALSE(drafter->ended);
  s.Settle(FinishReason::kLength);
  EXPECT_TRUE(drafter->ended);
  EXPECT_EQ(drafter->seen, cache_->tokens());
}

TEST_F(RequestTest, GuessesStayWithinTheCapacity) {
  const auto stream = NewStream(97);
  Request& s =
      Make({.stream = stream,
            .consumer = std::make_unique<Script>(Tokens{7, 8, 9, 10, 11}),
            .guessed_by = {
                .drafter = std::make_shared<Guesses>(Tokens{8, 9, 10, 11})}});
  s.Start();
  Step(s);
  EXPECT_EQ(ToPlan(s).target, 99u);
  Step(s);
  EXPECT_TRUE(s.is<Request::Ended>());
  EXPECT_EQ(cache_->length(), 100u);
  EXPECT_EQ(stream->Result().token_ids, (Tokens{7, 8, 9}));
}

TEST_F(RequestTest, AFailureOfItsConsumerRestores) {
  const auto stream = NewStream(20);
  Request& s = Make(
      {.stream = stream, .consumer = std::make_unique<Script>(Tokens{})});
  s.Start();
  Step(s);
  EXPECT_TRUE(s.is<Request::Ended>());
  EXPECT_THROW(stream->Result(), InvalidArgument);
  EXPECT_EQ(cache_->length(), 0u);
  EXPECT_EQ(pool_->bytes_in_use(), 0u);
}

TEST_F(RequestTest, ABatchWaitsForItsLast) {
  const auto batch = std::make_shared<Batch>();
  const auto first = NewStream(20);
  const auto one = cache_;
  cache_ = std::make_shared<Conversation>(
      FilledLayout(KvDtype::kBF16, 16),
      CacheOptions{.capacity_tokens = 100, .pool = pool_}, "");
  const auto second = NewStream(10);
  Request a({.stream = first, .batch = batch});
  Request b({.stream = second, .batch = batch});
  a.Start();
  b.Start();
  Step(a);
  a.EndSettled();
  EXPECT_TRUE(a.is<Request::Settled>());
  EXPECT_FALSE(first->done());
  b.Fail(std::make_exception_ptr(InvalidArgument("mine")));
  a.EndSettled();
  EXPECT_TRUE(a.is<Request::Ended>());
  EXPECT_THROW(first->Result(), InvalidArgument);
  EXPECT_EQ(one->length(), 0u);
}

// One that was never driven leaves no trace.
TEST_F(RequestTest, LettingGoUndoes) {
  {
    const auto stream = NewStream(20);
    Make({.stream = stream});
    request_.reset();
    EXPECT_EQ(cache_->length(), 20u);
  }
  EXPECT_EQ(cache_->length(), 0u);
  EXPECT_TRUE(cache_->TryLock());
}

}  // namespace
}  // namespace gkv
