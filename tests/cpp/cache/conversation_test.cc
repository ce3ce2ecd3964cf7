#include "cache/conversation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/sanitized.h"
#include "ops/kv_strip.h"

namespace gkv {
namespace {

using Tokens = std::vector<int32_t>;

// Drives a cache as the engine does, with a stand-in for a model: the "hidden
// state" of a row in a layer is a hash of what the layer below gave and of
// every key that the row sees, and becomes the row's own key. So a single
// wrong, missing or foreign key anywhere changes everything above and behind
// it: replay is right only if it is exactly right.
class FakeModel {
 public:
  static constexpr size_t kHeadDim = 32;
  static constexpr size_t kWidth = 3, kTail = 2;  // recurrent layers

  explicit FakeModel(const KvLayout& layout) : layout_(layout) {}

  void Step(const Conversation& cache, const KvStepView& view) const {
    Tokens ids(view.end - view.begin);
    cache.CopyTokens(view.begin, ids);
    Step(ids, view);
  }
  void Step(const Tokens& ids, const KvStepView& view) const {
    std::vector<uint32_t> hidden(ids.begin(), ids.end());
    for (size_t layer = 0; layer < layout_.layers().size(); ++layer) {
      const KvLayerSpec& spec = layout_.layers()[layer];
      const auto& table = view.groups[layout_.group_of(layer)];
      if (spec.kind == LayerKind::kRecurrent) {
        const auto state = [&](uint8_t* block) {
          return reinterpret_cast<float*>(block + layout_.state_offset(layer));
        };
        auto kept = table.kept.begin();
        for (size_t p = view.begin; p < view.end; ++p) {
          if (kept != table.kept.end() && kept->first == p) {
            std::copy_n(state(table.blocks[0]), layout_.state_floats(layer),
                        state((kept++)->second.data()));
          }
          hidden[p - view.begin] =
              Recur(hidden[p - view.begin], state(table.blocks[0]));
        }
        continue;
      }
      // Stored before anyone reads, as the engine does.
      for (size_t p = view.begin; p < view.end; ++p) {
        if (p < table.write_begin || spec.shares) continue;
        Write(table, layer, p, hidden[p - view.begin]);
      }
      for (size_t p = view.begin; p < view.end; ++p) {
        uint32_t& h = hidden[p - view.begin];
        for (size_t t = WindowBegin(layer, p, table.readable_begin); t <= p;
             ++t) {
          h = Mix(h, Read(table, layer, t));
        }
      }
    }
  }

  // What every layer must hold, computed from the tokens alone: the key of
  // every position, or the state after it.
  std::vector<std::vector<uint32_t>> Expected(const Tokens& tokens) const {
    std::vector<uint32_t> hidden(tokens.begin(), tokens.end());
    std::vector<std::vector<uint32_t>> layers;
    for (size_t layer = 0; layer < layout_.layers().size(); ++layer) {
      const KvLayerSpec& spec = layout_.layers()[layer];
      if (spec.kind == LayerKind::kRecurrent) {
        layers.push_back(ExpectedStates(hidden));
        continue;
      }
      std::vector<uint32_t> keys;
      for (const uint32_t h : hidden) keys.push_back(h & 0xFFFFFF);
      if (spec.shares) keys = layers[*spec.shares];
      layers.push_back(keys);
      for (size_t p = 0; p < hidden.size(); ++p) {
        for (size_t t = WindowBegin(layer, p, 0); t <= p; ++t) {
          hidden[p] = Mix(hidden[p], keys[t]);
        }
      }
    }
    return layers;
  }

 private:
  static uint32_t Mix(uint32_t a, uint32_t b) {
    return (a ^ b) * 0x9E3779B1u + (a >> 15);
  }
  // One row of a recurrent layer: a new state of the old one, of the inputs
  // of the two positions before, and of this one's, which is kept.
  static uint32_t Recur(uint32_t h, float* state) {
    for (size_t i = 0; i < 1 + kTail; ++i) {
      const float x = state[i * kWidth];
      EXPECT_TRUE(x >= 0 && x < 0x1p24f) << "an unwritten state";
      h = Mix(h, x >= 0 && x < 0x1p24f ? static_cast<uint32_t>(x) : 0);
    }
    for (size_t i = 0; i < kWidth; ++i) {
      state[kWidth + i] = state[2 * kWidth + i];
      state[2 * kWidth + i] = static_cast<float>(h >> 8);
      state[i] = static_cast<float>(h & 0xFFFFFF);
    }
    return h;
  }
  static std::vector<uint32_t> ExpectedStates(std::vector<uint32_t>& hidden) {
    float state[(1 + kTail) * kWidth] = {};
    std::vector<uint32_t> states;
    for (uint32_t& h : hidden) {
      h = Recur(h, state);
      states.push_back(h & 0xFFFFFF);
    }
    return states;
  }
  size_t WindowBegin(size_t layer, size_t p, size_t readable) const {
    const size_t window = layout_.layers()[layer].window;
    const size_t begin = window != 0 && p + 1 > window ? p + 1 - window : 0;
    return std::max(begin, readable);
  }
  uint8_t* Strip(const GroupStep& table, size_t layer, size_t p) const {
    return table.blocks[p / layout_.block_tokens() - table.first_block] +
           layout_.key_offset(layer, 0);
  }
  // 24 bits are exact in a float.
  void Write(const GroupStep& table, size_t layer, size_t p,
             uint32_t h) const {
    const std::vector<float> x(kHeadDim, static_cast<float>(h & 0xFFFFFF));
    StoreKey(KvDtype::kF32, x.data(), kHeadDim, p % layout_.block_tokens(),
             layout_.block_tokens(), Strip(table, layer, p));
  }
  uint32_t Read(const GroupStep& table, size_t layer, size_t p) const {
    float x[kHeadDim];
    LoadKey(KvDtype::kF32, Strip(table, layer, p), kHeadDim,
            p % layout_.block_tokens(), layout_.block_tokens(), x);
    EXPECT_TRUE(x[0] >= 0 && x[0] < 0x1p24f) << "an unwritten position";
    return x[0] >= 0 && x[0] < 0x1p24f ? static_cast<uint32_t>(x[0]) : 0;
  }

  const KvLayout& layout_;
};

// One letter a layer: full, sliding, wide (sliding, twice the window and a bit)
// or recurrent. A capital shares what the last layer with its letter holds.
std::shared_ptr<const KvLayout> Layout(const std::string& kinds, size_t window,
                                       size_t block_tokens) {
  std::vector<KvLayerSpec> layers;
  for (const char letter : kinds) {
    const char kind = static_cast<char>(std::tolower(letter));
    if (kind == 'r') {
      layers.push_back({.kind = LayerKind::kRecurrent,
                        .lru_width = FakeModel::kWidth,
                        .conv_tail = FakeModel::kTail});
    } else {
      layers.push_back({kind == 'f' ? LayerKind::kFull : LayerKind::kSliding, 1,
                        FakeModel::kHeadDim,
                        kind == 'f'   ? 0
                        : kind == 's' ? window
                                      : 2 * window + 3});
      if (kind != letter) {
        layers.back().shares = kinds.rfind(kind, layers.size() - 1);
      }
    }
  }
  return std::make_shared<KvLayout>(layers, KvDtype::kF32, block_tokens);
}

// One conversation under test and the list of tokens it must stand for.
struct Subject {
  std::unique_ptr<Conversation> cache;
  Tokens tokens;
};

// Each position of (begin, end) with a chance of one in `odds`.
std::vector<size_t> Some(size_t begin, size_t end, size_t odds,
                         std::mt19937& rng) {
  std::vector<size_t> some;
  for (size_t p = begin + 1; p < end; ++p) {
    if (rng() % odds == 0) some.push_back(p);
  }
  return some;
}

// Up to `max_chunks` steps of pending tokens and, behind them, drafts. Some
// drafts turn out right; a step may be committed up to anywhere, or dropped,
// and leave checkpoints.
void Compute(Subject& s, std::mt19937& rng, size_t max_chunks) {
  Conversation& cache = *s.cache;
  const FakeModel model(cache.layout());
  if (cache.length() == 0) return;
  size_t at =
      rng() % 3 == 0 ? cache.next_position_for_logits() : cache.next_position();
  for (size_t i = 0; i < max_chunks && at < cache.length(); ++i) {
    const RunLock lock = cache.Lock();
    size_t end = std::min(cache.length(), at + 1 + rng() % 50);
    Tokens ids(end - at);
    cache.CopyTokens(at, ids);
    if (end == cache.length() && rng() % 2 == 0) {
      const size_t drafts = std::min<size_t>(rng() % 20, 600 - end);
      for (size_t d = 0; d < drafts; ++d) {
        ids.push_back(static_cast<int32_t>(rng() % 999));
      }
    }
    std::vector<size_t> keep = Some(at, at + ids.size(), 3, rng);
    KvStepView view = cache.Prepare(lock, at, at + ids.size(), keep);
    model.Step(ids, view);
    if (rng() % 10 == 0) return;  // never committed
    if (view.end > end) {
      const size_t right = rng() % (view.end - end + 1);
      const Tokens accepted(ids.end() - static_cast<long>(view.end - end),
                            ids.end() - static_cast<long>(view.end - end) +
                                static_cast<long>(right));
      cache.Append(lock, accepted);
      s.tokens.insert(s.tokens.end(), accepted.begin(), accepted.end());
    }
    keep.push_back(view.end);
    std::erase_if(keep, [&](size_t p) { return p > cache.length(); });
    if (keep.empty()) return;  // no position to commit it to
    end = rng() % 2 == 0 ? keep.back() : keep[rng() % keep.size()];
    for (Checkpoint& made :
         cache.Commit(lock, view, end, Some(at, end + 1, 9, rng))) {
      const size_t position = made.position;
      if (cache.AddCheckpoint(lock, std::move(made))) {
        EXPECT_EQ(cache.Fork()->Truncate(position).replay_tokens, 0u);
      }
    }
    at = end;
  }
}

// Everything that is held is what the tokens give.
void Check(const Subject& subject) {
  ASSERT_EQ(subject.cache->tokens(), subject.tokens);
  const KvLayout& layout = subject.cache->layout();
  const auto expected = FakeModel(layout).Expected(subject.tokens);
  for (size_t layer = 0; layer < layout.layers().size(); ++layer) {
    const auto [begin, end] = subject.cache->HeldRange(layer);
    ASSERT_LE(end, subject.tokens.size());
    if (layout.layers()[layer].kind == LayerKind::kRecurrent) {
      const float state = subject.cache->CopyLayerState(layer)[0];
      ASSERT_EQ(state,
                end == 0 ? 0.0f : static_cast<float>(expected[layer][end - 1]))
          << "layer " << layer << " state after " << end;
      continue;
    }
    const std::vector<float> keys = subject.cache->CopyLayer(layer, false);
    // Sliding layers are exact in the window of the next row; older positions
    // of a replay warmed up only.
    for (size_t p = begin; p < end; ++p) {
      ASSERT_EQ(keys[(p - begin) * FakeModel::kHeadDim],
                static_cast<float>(expected[layer][p]))
          << "layer " << layer << " position " << p << " held " << begin << ".."
          << end;
    }
  }
}

// Truncates, and checks that the cost is what is said.
void TruncateTruthfully(Subject& s, size_t keep) {
  const size_t replay = s.cache->Truncate(keep).replay_tokens;
  s.tokens.resize(keep);
  const auto next = s.cache->Fork();
  next->Append(next->Lock(), {{1}});
  size_t full = 0;
  const KvLayout& layout = s.cache->layout();
  while (full < layout.layers().size() &&
         layout.layers()[full].kind != LayerKind::kFull) {
    ++full;
  }
  if (full == layout.layers().size()) return;  // nothing shows what is computed
  const size_t computed = s.cache->HeldRange(full).second;
  ASSERT_EQ(next->next_position() + replay, computed);
}

// With a budget, steps run out of blocks, and conversations at rest lose
// checkpoints for the sake of others.
void RandomUse(const std::string& kinds, size_t window, size_t block_tokens,
               uint32_t seed, size_t budget = 0) {
  const auto pool = BlockPool::Create(budget);
  pool->set_poison(true);
  {
    const auto layout = Layout(kinds, window, block_tokens);
    std::mt19937 rng(seed);
    std::vector<Subject> subjects;
    const auto fresh = [&] {
      return Subject{
          std::make_unique<Conversation>(
              layout,
              CacheOptions{.capacity_tokens = 601,
                           .checkpoint_bytes =
                               (1 + rng() % 6) * layout->checkpoint_bytes(),
                           .pool = pool},
              ""),
          {}};
    };
    subjects.push_back(fresh());
    for (int step = 0; step < 150; ++step) {
      Subject& s = subjects[rng() % subjects.size()];
      switch (rng() % 9) {
        case 0:
        case 1: {
          Tokens more(std::min<size_t>(rng() % 120, 600 - s.tokens.size()));
          for (int32_t& token : more) token = static_cast<int32_t>(rng() % 999);
          s.cache->Append(s.cache->Lock(), more);
          s.tokens.insert(s.tokens.end(), more.begin(), more.end());
          break;
        }
        case 2: {
          const std::vector<size_t> marks = s.cache->CheckpointLengths();
          const size_t keep = rng() % 2 == 0 && !marks.empty()
                                  ? marks[rng() % marks.size()]
                                  : rng() % (s.tokens.size() + 1);
          ASSERT_NO_FATAL_FAILURE(TruncateTruthfully(s, keep));
          break;
        }
        case 8: {
          const size_t length = s.cache->length();
          if (s.cache->MakeCheckpoint()) {
            EXPECT_EQ(s.cache->Fork()->Truncate(length).replay_tokens, 0u);
          }
          break;
        }
        case 3:
          if (subjects.size() < 5) {
            Subject fork{s.cache->Fork(), s.tokens};
            subjects.push_back(std::move(fork));
          } else {
            std::swap(s, subjects.back());
            subjects.pop_back();
          }
          break;
        case 4: {
          const std::vector<uint8_t> bytes = s.cache->ToBytes(rng() % 2 == 0);
          Tokens tokens = s.tokens;
          if (budget != 0) s = fresh();  // makes room
          try {
            s.cache = Conversation::FromBytes(
                bytes, {.block_tokens = block_tokens, .pool = pool});
            s.tokens = std::move(tokens);
          } catch (const CacheFull&) {
            if (budget == 0) throw;
          }
          break;
        }
        case 5: {
          pool->FailAfter(1 + rng() % 3);
          try {
            Compute(s, rng, 1);
          } catch (const CacheFull&) {
          }
          pool->FailAfter(0);
          break;
        }
        default:
          try {
            Compute(s, rng, 1 + rng() % 6);
          } catch (const CacheFull&) {
            if (budget == 0) throw;
          }
      }
      for (const Subject& subject : subjects) {
        ASSERT_NO_FATAL_FAILURE(Check(subject))
            << "seed " << seed << " step " << step;
      }
    }
    // To the end, and once more for the last token.
    for (Subject& s : subjects) {
      while (s.cache->length() > 0 &&
             s.cache->next_position() < s.cache->length()) {
        try {
          Compute(s, rng, 5);
        } catch (const CacheFull&) {
          if (budget == 0) throw;
          break;
        }
      }
      ASSERT_NO_FATAL_FAILURE(Check(s));
    }
  }
  EXPECT_EQ(pool->blocks_in_use(), 0u);
}

TEST(ConversationTest, Checklist12_AnyUseHoldsWhatTheTokensGive) {
  uint32_t seed = 1;
  for (const size_t window : {1, 7, 16, 100}) {
    if (kSanitized && window % 2 == 0) continue;
    for (const size_t block_tokens : {16, 64}) {
      for (const char* kinds : {"ssfssf", "ssssss", "rrsfrs", "rr", "ff",
                                "swfsSwFW", "wsws", "rwsfSfF"}) {
        ASSERT_NO_FATAL_FAILURE(RandomUse(kinds, window, block_tokens, seed++))
            << kinds << " window " << window << " blocks of " << block_tokens;
      }
    }
  }
}

TEST(ConversationTest, AnyUseOfAFullPoolHoldsWhatTheTokensGive) {
  uint32_t seed = 1000;
  for (const size_t window : {7, 33}) {
    for (const char* kinds : {"ssfssf", "ssssss", "rrsfrs", "rr"}) {
      const auto layout = Layout(kinds, window, 16);
      const size_t bytes = 8 * layout->checkpoint_bytes() +
                           601 * layout->bytes_per_token(LayerKind::kFull);
      ASSERT_NO_FATAL_FAILURE(
          RandomUse(kinds, window, 16, seed++, bytes))
          << kinds << " window " << window;
    }
  }
}

std::unique_ptr<Conversation> Computed(std::shared_ptr<const KvLayout> layout,
                                       size_t length) {
  auto cache = std::make_unique<Conversation>(
      std::move(layout), CacheOptions{.capacity_tokens = 4096}, "");
  Tokens tokens(length);
  std::iota(tokens.begin(), tokens.end(), 0);
  cache->Append(cache->Lock(), tokens);
  const FakeModel model(cache->layout());
  for (size_t at = 0; at < length; at += 64) {
    KvStepView view = cache->Prepare(cache->Lock(), at, std::min(length, at + 64));
    model.Step(*cache, view);
    cache->Commit(cache->Lock(), view);
  }
  return cache;
}

TEST(ConversationTest, TruncationSaysItsCost) {
  // 4 sliding layers of window 33: 4 * 32 tokens of warm-up.
  const auto layout = Layout("ssfssf", 33, 16);
  const auto cache = Computed(layout, 1000);
  EXPECT_EQ(cache->Fork()->Truncate(1000).replay_tokens, 0u);
  EXPECT_EQ(cache->Fork()->Truncate(999).replay_tokens, 0u);
  EXPECT_EQ(cache->Fork()->Truncate(600).replay_tokens, 128u);
  EXPECT_EQ(cache->Fork()->Truncate(100).replay_tokens, 100u);
  EXPECT_EQ(cache->Fork()->Truncate(0).replay_tokens, 0u);
  const auto fork = cache->Fork();
  fork->Truncate(600);
  EXPECT_EQ(fork->next_position(), 600u) << "nothing is pending";
  fork->Append(fork->Lock(), {{1, 2}});
  EXPECT_EQ(fork->next_position(), 600u - 128);
  EXPECT_THROW(fork->Truncate(603), InvalidArgument);
}

void Extend(Conversation& cache, size_t length) {
  Tokens tokens(length - cache.length());
  std::iota(tokens.begin(), tokens.end(), static_cast<int32_t>(cache.length()));
  cache.Append(cache.Lock(), tokens);
  const FakeModel model(cache.layout());
  for (size_t at = cache.next_position(); at < length;) {
    KvStepView view = cache.Prepare(cache.Lock(), at, std::min(length, at + 64));
    model.Step(cache, view);
    cache.Commit(cache.Lock(), view);
    at = view.end;
  }
}

TEST(ConversationTest, TruncationTakesTheCheapestStart) {
  // A warm-up takes 128 tokens.
  const auto cache = Computed(Layout("ssfssf", 33, 16), 300);
  ASSERT_TRUE(cache->MakeCheckpoint());
  Extend(*cache, 1000);
  EXPECT_EQ(cache->CheckpointLengths(), std::vector<size_t>{300});
  EXPECT_EQ(cache->Fork()->Truncate(300).replay_tokens, 0u);
  EXPECT_EQ(cache->Fork()->Truncate(320).replay_tokens, 20u) << "checkpoint";
  EXPECT_EQ(cache->Fork()->Truncate(428).replay_tokens, 128u) << "either";
  EXPECT_EQ(cache->Fork()->Truncate(450).replay_tokens, 128u) << "warm-up";
  EXPECT_EQ(cache->Fork()->Truncate(90).replay_tokens, 90u) << "from 0";
  // With recurrent layers there is no warm-up.
  const auto hybrid = Computed(Layout("rsfrsf", 33, 16), 300);
  ASSERT_TRUE(hybrid->MakeCheckpoint());
  Extend(*hybrid, 1000);
  EXPECT_EQ(hybrid->Fork()->Truncate(300).replay_tokens, 0u);
  EXPECT_EQ(hybrid->Fork()->Truncate(450).replay_tokens, 150u);
  EXPECT_EQ(hybrid->Fork()->Truncate(290).replay_tokens, 290u);
  // Within the last step: from where that began, layers of all kinds.
  EXPECT_EQ(hybrid->Fork()->Truncate(999).replay_tokens, 999u - 940);
  EXPECT_EQ(hybrid->Fork()->Truncate(940).replay_tokens, 0u);
  // Full layers alone need nothing of the kind.
  const auto full = Computed(Layout("ff", 33, 16), 300);
  EXPECT_TRUE(full->MakeCheckpoint());
  EXPECT_TRUE(full->CheckpointLengths().empty());
  EXPECT_EQ(full->Truncate(77).replay_tokens, 0u);
}

// Layers of window 33 and 69; those that share add nothing to a warm-up.
TEST(ConversationTest, AWarmUpIsTheSumOverAllWindows) {
  for (const auto& [kinds, warm_up] :
       std::map<std::string, size_t>{{"sfs", 2 * 32},
                                     {"swfsSwFW", 2 * 32 + 2 * 68},
                                     {"wsws", 2 * 32 + 2 * 68}}) {
    const auto layout = Layout(kinds, 33, 16);
    std::mt19937 rng(3);
    Subject s{Computed(layout, 1000), {}};
    s.tokens = s.cache->tokens();
    ASSERT_EQ(s.cache->Truncate(600).replay_tokens, warm_up) << kinds;
    s.tokens.resize(600);
    s.cache->Append(s.cache->Lock(), {{5, 6, 7}});
    s.tokens.insert(s.tokens.end(), {5, 6, 7});
    EXPECT_EQ(s.cache->next_position(), 600 - warm_up);
    while (s.cache->next_position() < s.cache->length()) Compute(s, rng, 9);
    const size_t length = s.tokens.size();
    // Every layer holds its own window, of the next row too, and is right.
    for (size_t layer = 0; layer < kinds.size(); ++layer) {
      const size_t window = layout->layers()[layer].window;
      const auto [begin, end] = s.cache->HeldRange(layer);
      EXPECT_EQ(end, length);
      EXPECT_LE(begin, window == 0 ? 0 : length + 1 - window);
    }
    ASSERT_NO_FATAL_FAILURE(Check(s)) << kinds;
  }
}

// Drafts that turn out right and wrong leave what single steps leave, however
// many are taken; a fork made before does not see them.
TEST(ConversationTest, AStepCommittedInPartEqualsStepsOfOne) {
  for (const char* kinds : {"ssfssf", "swfSWF", "rrsfrs", "rr", "rf", "ff"}) {
    const auto layout = Layout(kinds, 33, 16);
    const FakeModel model(*layout);
    const auto origin = Computed(layout, 200);
    const auto pool = BlockPool::Create();
    pool->set_poison(true);
    for (size_t right = 0; right <= 40; ++right) {
      Subject s{origin->Fork(), origin->tokens()};
      const Subject fork{s.cache->Fork(), s.tokens};
      const RunLock lock = s.cache->Lock();
      s.cache->Append(lock, {{7}});
      Tokens ids(41, 500);
      ids[0] = 7;
      std::vector<size_t> keep(40);
      std::iota(keep.begin(), keep.end(), 201);
      KvStepView view = s.cache->Prepare(lock, 200, 241, keep);
      model.Step(ids, view);
      EXPECT_EQ(s.cache->length(), 201u) << "drafts are not in the transcript";
      s.cache->Append(lock, Tokens(right, 500));
      s.cache->Append(lock, {{8}});  // what came in place of the wrong one
      s.cache->Commit(lock, view, 201 + right);
      s.tokens.push_back(7);
      s.tokens.insert(s.tokens.end(), right, 500);
      s.tokens.push_back(8);
      ASSERT_NO_FATAL_FAILURE(Check(s)) << kinds << " " << right;
      EXPECT_EQ(s.cache->next_position(), 201 + right);
      // One row at a time holds as much, and as many bytes of its own.
      const auto single = origin->Fork();
      single->Append(single->Lock(), std::span(s.tokens).subspan(200));
      for (size_t p = 200; p < 201 + right; ++p) {
        KvStepView row = single->Prepare(single->Lock(), p, p + 1);
        model.Step(*single, row);
        single->Commit(single->Lock(), row);
      }
      for (size_t layer = 0; layer < layout->layers().size(); ++layer) {
        EXPECT_EQ(s.cache->HeldRange(layer).second, 201 + right);
        EXPECT_LE(s.cache->HeldRange(layer).first,
                  single->HeldRange(layer).first);
      }
      if (right == 40) {
        view = {};
        EXPECT_EQ(s.cache->nbytes(), single->nbytes());
      }
      ASSERT_NO_FATAL_FAILURE(Check(fork));
    }
  }
}

// A point inside a long step is kept without cutting the step. It holds no more
// than a checkpoint does: three fit the default budget.
TEST(ConversationTest, APointInsideALongStepCostsNoReplay) {
  for (const char* kinds : {"ssfssf", "swfSWF", "rrsfrs", "rr", "rf"}) {
    const auto layout = Layout(kinds, 33, 16);
    const FakeModel model(*layout);
    const auto pool = BlockPool::Create();
    pool->set_poison(true);
    Tokens tokens(900);
    std::iota(tokens.begin(), tokens.end(), 3);
    Subject s{
        std::make_unique<Conversation>(
            layout, CacheOptions{.capacity_tokens = 1000, .pool = pool}, ""),
        {}};
    {
      const RunLock lock = s.cache->Lock();
      s.cache->Append(lock, tokens);
      const size_t keep[] = {199, 200, 350};
      KvStepView view = s.cache->Prepare(lock, 0, 900, keep);
      model.Step(*s.cache, view);
      const size_t at[] = {200, 350, 900};
      std::vector<Checkpoint> made = s.cache->Commit(lock, view, 900, at);
      ASSERT_EQ(made.size(), 3u);
      for (Checkpoint& c : made) {
        ASSERT_TRUE(s.cache->AddCheckpoint(lock, std::move(c)));
      }
    }
    EXPECT_EQ(s.cache->CheckpointLengths(),
              (std::vector<size_t>{200, 350, 900}));
    EXPECT_GT(s.cache->Fork()->Truncate(500).replay_tokens, 0u);
    std::mt19937 rng(4);
    for (const size_t length : {350, 200}) {
      Subject back{s.cache->Fork(), tokens};
      EXPECT_EQ(back.cache->Truncate(length).replay_tokens, 0u) << kinds;
      back.tokens.resize(length);
      ASSERT_NO_FATAL_FAILURE(Check(back)) << kinds;
      // 199 was kept too, 349 was not.
      const bool recurs = layout->state_bytes() > 0;
      EXPECT_EQ(back.cache->next_position_for_logits() == length - 1,
                length == 200 || !recurs)
          << kinds;
      back.cache->Append(back.cache->Lock(), {{1, 2, 3}});
      back.tokens.insert(back.tokens.end(), {1, 2, 3});
      EXPECT_EQ(back.cache->next_position(), length);
      while (back.cache->next_position() < back.cache->length()) {
        Compute(back, rng, 3);
      }
      ASSERT_NO_FATAL_FAILURE(Check(back)) << kinds;
    }
  }
}

TEST(ConversationTest, APointThatWasNotKeptGivesNoCheckpoint) {
  const auto layout = Layout("rrsfrs", 33, 16);
  Conversation cache(layout, {.capacity_tokens = 1000}, "");
  const RunLock lock = cache.Lock();
  cache.Append(lock, Tokens(300, 1));
  const size_t keep[] = {200};
  KvStepView view = cache.Prepare(lock, 0, 300, keep);
  FakeModel(*layout).Step(cache, view);
  const size_t at[] = {150, 200};
  const std::vector<Checkpoint> made = cache.Commit(lock, view, 300, at);
  ASSERT_EQ(made.size(), 1u);
  EXPECT_EQ(made[0].position, 200u);
}

// The pending token of the moment is pending again.
TEST(ConversationTest, ACheckpointBringsItsMomentBack) {
  const auto cache = Computed(Layout("ssfssf", 33, 16), 300);
  cache->Append(cache->Lock(), {{7}});
  ASSERT_TRUE(cache->MakeCheckpoint());
  Extend(*cache, 900);
  EXPECT_EQ(cache->Truncate(301).replay_tokens, 0u);
  EXPECT_EQ(cache->HeldRange(2), (std::pair<size_t, size_t>{0, 300}));
  EXPECT_EQ(cache->HeldRange(0).second, 300u);
  EXPECT_EQ(cache->next_position(), 300u);
  // Without the pending token it costs nothing either.
  Extend(*cache, 900);
  EXPECT_EQ(cache->Truncate(300).replay_tokens, 0u);
  EXPECT_EQ(cache->CheckpointLengths(), std::vector<size_t>{300});
}

// 0.5, 1, 2 and 8 windows; every kind of layer; with and without checkpoints,
// straight and through a snapshot.
TEST(ConversationTest, Checklist13_RewindAndRestoreAreExactForEveryKind) {
  constexpr size_t kWindow = 32;
  std::mt19937 rng(1);
  for (const char* kinds :
       {"ssfssf", "ss", "rrsfrs", "rr", "rf", "ff", "swfSWF"}) {
    const auto cache = Computed(Layout(kinds, kWindow, 16), 100);
    for (size_t length = 100; length < 320; length += 37) {
      Extend(*cache, length);
      ASSERT_TRUE(cache->MakeCheckpoint());
    }
    Tokens tokens = cache->tokens();
    for (const bool checkpoints : {false, true}) {
      const auto origin = Conversation::FromBytes(cache->ToBytes(checkpoints),
                                                  {.block_tokens = 32});
      for (const size_t base :
           {kWindow / 2, kWindow, 2 * kWindow, 8 * kWindow}) {
        for (const size_t length : {base - 1, base, base + 1}) {
          Subject s{origin->Fork(), tokens};
          ASSERT_NO_FATAL_FAILURE(TruncateTruthfully(s, length));
          s.cache = Conversation::FromBytes(s.cache->ToBytes(checkpoints));
          ASSERT_NO_FATAL_FAILURE(Check(s));
          s.cache->Append(s.cache->Lock(), {{5, 6, 7}});
          s.tokens.insert(s.tokens.end(), {5, 6, 7});
          while (s.cache->next_position() < s.cache->length()) {
            Compute(s, rng, 5);
            ASSERT_NO_FATAL_FAILURE(Check(s)) << kinds << " " << length;
          }
        }
      }
    }
  }
}

TEST(ConversationTest, Checklist15_ManyRecurrentConversationsEqualOne) {
  const auto layout = Layout("rrsfrs", 20, 16);
  const auto pool = BlockPool::Create();
  pool->set_poison(true);
  std::mt19937 rng(5);
  std::vector<Subject> subjects;
  for (int i = 0; i < 6; ++i) {
    subjects.push_back(
        {std::make_unique<Conversation>(
             layout, CacheOptions{.capacity_tokens = 500, .pool = pool}, ""),
         {}});
  }
  for (int step = 0; step < 200; ++step) {
    Subject& s = subjects[rng() % subjects.size()];
    Tokens more(1 + rng() % 12);
    for (int32_t& token : more) token = static_cast<int32_t>(rng() % 999);
    s.cache->Append(s.cache->Lock(), more);
    s.tokens.insert(s.tokens.end(), more.begin(), more.end());
    while (s.cache->next_position() < s.cache->length()) {
      Compute(s, rng, 3);
    }
  }
  for (const Subject& s : subjects) ASSERT_NO_FATAL_FAILURE(Check(s));
}

TEST(ConversationTest, SealedBlocksAreIdentifiedByWhatTheyHold) {
  const auto layout = Layout("ssfssf", 33, 16);
  const auto cache = Computed(layout, 70);  // four blocks and a part
  cache->Append(cache->Lock(), Tokens(30, 1));             // pending
  const std::vector<SealedBlock> sealed = cache->SealedBlocks();
  ASSERT_EQ(sealed.size(), 4u);
  Hash128 parent;
  for (size_t i = 0; i < sealed.size(); ++i) {
    EXPECT_EQ(sealed[i].begin, 16 * i);
    EXPECT_EQ(sealed[i].page->claimed, 16u);
    EXPECT_EQ(sealed[i].page->parent, parent);
    Tokens tokens(16);
    cache->CopyTokens(16 * i, tokens);
    EXPECT_EQ(sealed[i].page->tokens, tokens);
    parent = sealed[i].page->hash;
    EXPECT_EQ(sealed[i].held[1].block.size_bytes(),
              layout->groups()[1].block_bytes);
  }
  // A conversation with the same beginning has the same identities, whatever
  // follows and however it came to be.
  const auto other = Computed(layout, 50);
  const std::vector<SealedBlock> same = other->SealedBlocks();
  ASSERT_EQ(same.size(), 3u);
  for (size_t i = 0; i < same.size(); ++i) {
    EXPECT_EQ(same[i].page->hash, sealed[i].page->hash);
  }
  // A fork that goes another way, and the blocks' own conversation: what is
  // sealed stays as it was.
  const std::vector<float> keys = cache->CopyLayer(2, false);
  const auto fork = cache->Fork();
  cache->Truncate(20);
  cache->Append(cache->Lock(), Tokens(40, 3));
  Extend(*cache, 80);
  const FakeModel model(*layout);
  EXPECT_EQ(fork->CopyLayer(2, false), keys);
  EXPECT_EQ(cache->SealedBlocks()[0].page->hash, sealed[0].page->hash);
  EXPECT_NE(cache->SealedBlocks()[1].page->hash, sealed[1].page->hash);
  EXPECT_EQ(sealed[1].page->tokens, Tokens({16, 17, 18, 19, 20, 21, 22, 23, 24,
                                            25, 26, 27, 28, 29, 30, 31}));
}

TEST(ConversationTest, CheckpointsCountInBytesUntilTheyAreDropped) {
  const auto layout = Layout("ssfssf", 33, 16);
  const auto pool = BlockPool::Create();
  Conversation cache(layout, {.capacity_tokens = 2000, .pool = pool}, "");
  Extend(cache, 200);
  EXPECT_EQ(cache.nbytes(), pool->bytes_in_use());
  ASSERT_TRUE(cache.MakeCheckpoint());
  EXPECT_EQ(cache.nbytes(), pool->bytes_in_use()) << "by reference";
  Extend(cache, 900);
  EXPECT_EQ(cache.nbytes(), pool->bytes_in_use());
  const auto fork = cache.Fork();
  EXPECT_EQ(cache.nbytes(), 0u);
  EXPECT_EQ(cache.shared_nbytes(), pool->bytes_in_use());
  cache.Reset();
  EXPECT_EQ(fork->nbytes(), pool->bytes_in_use());
  fork->Truncate(199);
  EXPECT_TRUE(fork->CheckpointLengths().empty());
  EXPECT_EQ(fork->nbytes(), pool->bytes_in_use());
}

TEST(ConversationTest, ReplayOnlyReadsFullLayers) {
  const auto cache = Computed(Layout("ssfssf", 33, 16), 1000);
  const auto fork = cache->Fork();
  fork->Truncate(600);
  fork->Append(fork->Lock(), {{1}});
  KvStepView view = fork->Prepare(fork->Lock(), 472, 601);
  EXPECT_EQ(view.groups[1].write_begin, 600u);
  EXPECT_EQ(view.groups[0].write_begin, 472u);
  EXPECT_EQ(view.groups[0].readable_begin, 472u);
  EXPECT_TRUE(view.starts_replay);
}

// What a step points into stays where it is until the step's holder is done,
// whoever wants to change the conversation meanwhile.
TEST(ConversationTest, ChangesWaitForARunningStep) {
  const auto layout = Layout("ssfssf", 33, 16);
  for (const auto change : {+[](Conversation& cache) { cache.Truncate(3); },
                            +[](Conversation& cache) { cache.Reset(); }}) {
    const auto pool = BlockPool::Create();
    Conversation cache(layout, {.capacity_tokens = 1000, .pool = pool}, "");
    RunLock lock = cache.Lock();
    cache.Append(lock, Tokens(200, 1));
    KvStepView view = cache.Prepare(lock, 0, 150);
    FakeModel(*layout).Step(cache, view);
    cache.Commit(lock, view);
    view = cache.Prepare(lock, 150, 200);
    const size_t blocks = pool->blocks_in_use();
    std::thread other([&] { change(cache); });
    // No state tells that it waits: it has the time to do what it must not.
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    EXPECT_EQ(cache.length(), 200u);
    EXPECT_EQ(pool->blocks_in_use(), blocks);
    FakeModel(*layout).Step(cache, view);
    cache.Commit(lock, view);
    lock.Release();
    other.join();
    EXPECT_LE(cache.length(), 3u);
  }
}

TEST(ConversationTest, SlidingLayersHoldTheirWindowOnly) {
  const auto layout = Layout("ssfssf", 33, 16);
  const auto cache = Computed(layout, 1000);
  const auto [begin, end] = cache->HeldRange(0);
  EXPECT_EQ(end, 1000u);
  EXPECT_LE(begin, 1000u - 33);
  EXPECT_GT(begin, 1000u - 33 - 16 - 64) << "old blocks were kept";
  EXPECT_EQ(cache->HeldRange(2), (std::pair<size_t, size_t>{0, 1000}));
}

TEST(ConversationTest, ForkCopiesNoKeyAndTheFirstWriteCopiesTheLastBlock) {
  const auto layout = Layout("ssfssf", 33, 64);
  const auto cache = Computed(layout, 1000);  // ends inside a block
  const size_t alone = cache->nbytes();
  const auto fork = cache->Fork();
  EXPECT_EQ(cache->nbytes(), 0u);
  EXPECT_EQ(fork->nbytes(), 0u);
  EXPECT_EQ(fork->shared_nbytes(), alone);
  fork->Append(fork->Lock(), {{7}});
  {
    KvStepView view = fork->Prepare(fork->Lock(), 1000, 1001);
    FakeModel(*layout).Step(*fork, view);
    fork->Commit(fork->Lock(), view);
  }
  EXPECT_EQ(fork->nbytes(), layout->groups()[0].block_bytes +
                                layout->groups()[1].block_bytes);
}

TEST(ConversationTest, Checklist06_PastTheCapacityRaisesAndChangesNothing) {
  Conversation cache(Layout("ssfssf", 5, 16), {.capacity_tokens = 10}, "");
  cache.Append(cache.Lock(), Tokens(10, 1));
  try {
    cache.Append(cache.Lock(), {{1}});
    FAIL();
  } catch (const CacheFull& error) {
    EXPECT_NE(std::string(error.what()).find("10 in total"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(cache.length(), 10u);
}

TEST(ConversationTest, BindingIsToOneModel) {
  Conversation cache(Layout("ssfssf", 5, 16), {.capacity_tokens = 10}, "");
  cache.Bind({1, 2});
  EXPECT_NO_THROW(cache.Bind({1, 2}));
  EXPECT_THROW(cache.Bind({1, 3}), Mismatch);
  EXPECT_EQ(cache.fingerprint(), (Hash128{1, 2}));
  cache.Reset();
  EXPECT_NO_THROW(cache.Bind({1, 3}));
}

}  // namespace
}  // namespace gkv
