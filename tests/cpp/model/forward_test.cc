#include "model/forward.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/sanitized.h"
#include "model/create_conversation.h"
#include "model/reference_model.h"
#include "model/tiny_model.h"
#include "ops/target.h"

namespace gkv {
namespace {

using Logits = std::vector<std::vector<float>>;

// Computes a conversation's pending positions in steps of the given sizes (the
// last one repeats), with logits, or hidden states, of every row.
class Driver {
 public:
  Driver(std::shared_ptr<const Model> model, size_t threads,
         RowOutput::Kind kind = RowOutput::kLogits)
      : model_(std::move(model)),
        kind_(kind),
        pool_(threads),
        forward_(*model_, pool_) {}

  // Of each slice the last so many rows at most have outputs from now on.
  void set_most_rows(size_t rows) { most_rows_ = rows; }

  Logits Run(Conversation& cache, const std::vector<size_t>& chunks) {
    Logits rows;
    size_t chunk = 0;
    for (size_t begin = cache.next_position_for_logits();
         begin < cache.length();) {
      const size_t size = chunks[std::min(chunk++, chunks.size() - 1)];
      const size_t end = std::min(cache.length(), begin + size);
      Conversation* const caches[] = {&cache};
      const size_t begins[] = {begin}, ends[] = {end};
      for (auto& row : Step(caches, begins, ends)) rows.push_back(row);
      begin = end;
    }
    return rows;
  }

  // One step over several caches.
  Logits Step(std::span<Conversation* const> caches,
              std::span<const size_t> begins, std::span<const size_t> ends) {
    std::vector<KvStepView> views;
    std::vector<std::vector<int32_t>> tokens;
    for (size_t i = 0; i < caches.size(); ++i) {
      views.push_back(
          caches[i]->Prepare(caches[i]->Lock(), begins[i], ends[i]));
      tokens.emplace_back(ends[i] - begins[i]);
      caches[i]->CopyTokens(begins[i], tokens[i]);
    }
    const Logits rows = Outputs(caches, views, tokens);
    for (size_t i = 0; i < caches.size(); ++i) {
      caches[i]->Commit(caches[i]->Lock(), views[i]);
    }
    return rows;
  }

  // A step over the pending tokens and `drafts`, of which the first `right` are
  // accepted.
  Logits Draft(Conversation& cache, std::span<const int32_t> drafts,
               size_t right) {
    const RunLock lock = cache.Lock();
    const size_t begin = cache.next_position(), length = cache.length();
    std::vector<int32_t> tokens(length - begin);
    cache.CopyTokens(begin, tokens);
    tokens.insert(tokens.end(), drafts.begin(), drafts.end());
    std::vector<size_t> keep(tokens.size() - 1);
    std::iota(keep.begin(), keep.end(), begin + 1);
    KvStepView view = cache.Prepare(lock, begin, begin + tokens.size(), keep);
    Conversation* const caches[] = {&cache};
    Logits rows = Outputs(caches, {&view, 1}, {&tokens, 1});
    cache.Append(lock, drafts.first(right));
    cache.Commit(lock, view, length + right);
    rows.resize(length + right - begin);
    return rows;
  }

  // What a prepared step gives. Commits nothing.
  Logits Outputs(std::span<Conversation* const> caches,
                 std::span<const KvStepView> views,
                 std::span<const std::vector<int32_t>> tokens) {
    size_t rows = 0;
    std::vector<SequenceSlice> slices;
    for (size_t i = 0; i < caches.size(); ++i) {
      slices.push_back(
          {tokens[i], &views[i], &caches[i]->layout(),
           {.kind = kind_, .rows = std::min(most_rows_, tokens[i].size())}});
      rows += slices.back().output.rows;
    }
    const size_t width = kind_ == RowOutput::kHidden
                             ? model_->config.hidden_size
                             : model_->config.vocab_size;
    std::vector<float> outputs(rows * width);
    float* next = outputs.data();
    for (SequenceSlice& slice : slices) {
      slice.output.data = next;
      next += slice.output.rows * width;
    }
    forward_.Step(slices);
    Logits result;
    for (size_t r = 0; r < rows; ++r) {
      result.emplace_back(outputs.begin() + static_cast<long>(r * width),
                          outputs.begin() + static_cast<long>((r + 1) * width));
    }
    return result;
  }

 private:
  std::shared_ptr<const Model> model_;
  const RowOutput::Kind kind_;
  size_t most_rows_ = std::numeric_limits<size_t>::max();
  ThreadPool pool_;
  ForwardPass forward_;
};

std::shared_ptr<Conversation> NewCache(const Model& model,
                                       const std::vector<int32_t>& tokens,
                                       KvDtype dtype = KvDtype::kBF16,
                                       size_t block_tokens = 16) {
  CacheOptions options;
  options.pool = BlockPool::Create();
  options.pool->set_poison(true);
  options.kv_dtype = dtype;
  options.block_tokens = block_tokens;
  std::shared_ptr<Conversation> cache =
      CreateConversation(model.config, options);
  cache->Append(cache->Lock(), tokens);
  return cache;
}

// Bitwise: also tells NaN patterns and signed zeros apart.
bool SameBits(const Logits& a, const Logits& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].size() != b[i].size() ||
        std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float))) {
      return false;
    }
  }
  return true;
}

void ExpectNear(const Logits& found,
                const std::vector<ReferenceModel::Row>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  double worst = 0, low = 0, high = 0;
  for (size_t p = 0; p < found.size(); ++p) {
    ASSERT_EQ(found[p].size(), expected[p].size());
    for (size_t i = 0; i < found[p].size(); ++i) {
      worst = std::max(worst, std::abs(found[p][i] - expected[p][i]));
      low = std::min(low, expected[p][i]);
      high = std::max(high, expected[p][i]);
    }
  }
  EXPECT_GT(high - low, 0.1) << "the oracle's outputs are degenerate";
  EXPECT_LT(worst, 1e-5 * (high - low));
}

void ExpectMatchesReference(const TinyOptions& options,
                            MemorySource source) {
  const ModelConfig config = TinyConfig(options);
  ThreadPool pool(1);
  const auto model =
      std::make_shared<Model>(config, LoadWeights(config, source, pool, {}));
  // Two windows and more, in two steps.
  const std::vector<int32_t> tokens = RandomTokens(kSanitized ? 40 : 60, 7);
  const ReferenceModel reference(config, source);
  const auto run = [&](RowOutput::Kind kind) {
    const auto cache = NewCache(*model, tokens, KvDtype::kF32);
    return Driver(model, 2, kind).Run(*cache, {32});
  };
  const std::vector<ReferenceModel::Row> hidden = reference.Hidden(tokens);
  ExpectNear(run(RowOutput::kHidden), hidden);
  ExpectNear(run(RowOutput::kLogits), reference.LogitsOf(hidden));
}

void ExpectMatchesReference(const TinyOptions& options) {
  ExpectMatchesReference(options, TinyTensors(options));
}

TEST(ForwardTest, MatchesReference) { ExpectMatchesReference({}); }

TEST(ForwardTest, EveryFamilyMatchesReference) {
  for (const std::string& family : TinyFamilies()) {
    SCOPED_TRACE(family);
    ExpectMatchesReference(TinyFamily(family));
  }
}

// Heads, rotations, windows and widths by layer, and layers that read the keys
// and values of others.
TEST(ForwardTest, LayersThatDifferMatchReference) {
  size_t shared = 0, windows = 0;
  for (uint32_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE(seed);
    TinyOptions options = LayersDiffer({}, seed);
    options.value_norm = options.keys_are_values = seed % 2 == 0;
    options.layer_scales = seed % 3 == 0;
    options.ple_dim = seed % 3 == 1 ? 24 * seed : 0;
    const ModelConfig config = TinyConfig(options);
    config.Validate();
    for (const LayerConfig& layer : config.layers) {
      shared += layer.shares_kv.has_value();
      windows += layer.window == 10;
    }
    ExpectMatchesReference(options);
  }
  EXPECT_GE(shared, 12u);
  EXPECT_GE(windows, 12u);
}

// One expert and all of them, gates apart from the rest, and beside all else
// that a layer may have.
TEST(ForwardTest, ExpertsOfAnyShapeMatchReference) {
  const std::pair<size_t, size_t> counts[] = {{1, 1}, {5, 1}, {4, 4}, {33, 8}};
  for (const auto& [count, used] : counts) {
    for (const bool split : {false, true}) {
      SCOPED_TRACE(StrCat(used, " of ", count, split ? ", split" : ""));
      TinyOptions options = TinyFamily("gemma4_moe");
      options.num_experts = count;
      options.experts_used = used;
      options.expert_ffn = split ? 48 : 16;
      options.split_experts = split;
      options.biases = count == 5;
      options.post_norms = count != 4;
      options.ple_dim = count == 33 ? 32 : 0;
      ExpectMatchesReference(options);
    }
  }
}

// With scores that are all alike, the first experts are those that count.
TEST(ForwardTest, OfEqualScoresTheExpertOfTheLowerNumberWins) {
  const TinyOptions options = TinyFamily("gemma4_moe");
  MemorySource source = TinyTensors(options);
  const size_t row_bytes = options.hidden * sizeof(float);
  for (auto& [name, tensor] : source.tensors) {
    if (!name.ends_with("ffn_gate_inp.weight")) continue;
    for (size_t r = 1; r < tensor.rows; ++r) {
      std::memcpy(&tensor.bytes[r * row_bytes], &tensor.bytes[0], row_bytes);
    }
  }
  ExpectMatchesReference(options, source);
}

// The oracle of streams has products beside attention and embeddings by layer.
TEST(ForwardTest, StreamsOfAnyNumberMatchReference) {
  for (const size_t inputs : {2, 3, 5, 8}) {
    SCOPED_TRACE(inputs);
    TinyOptions options = TinyFamily("gemma3n");
    options.altup_inputs = inputs;
    options.altup_active = inputs - 1;
    options.altup_correct_scale = inputs % 2 == 0;
    options.laurel_rank = 12 * inputs;
    options.tied = false;
    ExpectMatchesReference(options);
  }
}

// Shapes that no published model has.
TEST(ForwardTest, RecurrentLayersOfAnyShapeMatchReference) {
  for (const size_t conv_width : {1, 2, 9}) {
    TinyOptions options = TinyFamily("recurrentgemma");
    options.conv_width = conv_width;
    options.lru_width = 80;
    options.lru_blocks = conv_width == 2 ? 1 : 5;
    options.biases = conv_width != 1;
    options.post_norms = true;
    options.qk_norm = true;
    options.kv_heads = 2;
    options.rope_dim = 30;
    options.pattern = {LayerKind::kRecurrent, LayerKind::kFull,
                       LayerKind::kSliding};
    options.tied = false;
    SCOPED_TRACE(conv_width);
    ExpectMatchesReference(options);
  }
}

TEST(ForwardTest, RecurrentLayersAloneMatchReference) {
  TinyOptions options = TinyFamily("recurrentgemma");
  options.pattern = {LayerKind::kRecurrent};
  options.window = 0;
  options.num_layers = 3;
  ExpectMatchesReference(options);
}

TEST(ForwardTest, MatchesReferenceWithSoftCapsAndUntiedHead) {
  TinyOptions options;
  options.attn_soft_cap = 2;
  options.final_soft_cap = 3;
  options.tied = false;
  ExpectMatchesReference(options);
}

TEST(ForwardTest, MatchesReferenceWithoutExtraNormsAndOneKvHead) {
  TinyOptions options;
  options.qk_norm = false;
  options.post_norms = false;
  options.kv_heads = 1;
  options.pattern = {LayerKind::kFull};
  ExpectMatchesReference(options);
}

// Each slice of a step has the output that it asks for, whatever others ask.
void ExpectOutputsOfTheirOwn(const TinyOptions& options) {
  const auto model = TinyModel(options);
  const std::vector<int32_t> tokens = RandomTokens(20, 2);
  const size_t vocab = model->config.vocab_size;
  const size_t hidden = model->config.hidden_size;
  const auto run = [&](RowOutput::Kind kind) {
    return Driver(model, 1, kind).Run(*NewCache(*model, tokens), {20});
  };
  const Logits logits = run(RowOutput::kLogits);
  const Logits states = run(RowOutput::kHidden);

  ThreadPool pool(2);
  ForwardPass forward(*model, pool);
  constexpr RowOutput::Kind kKinds[] = {RowOutput::kHidden, RowOutput::kLogits,
                                        RowOutput::kHidden,
                                        RowOutput::kLargest};
  constexpr size_t kRows[] = {3, 20, 0, 1};
  std::vector<std::shared_ptr<Conversation>> caches;
  std::vector<KvStepView> views;
  std::vector<std::vector<float>> outputs;
  for (const RowOutput::Kind kind : kKinds) {
    caches.push_back(NewCache(*model, tokens));
    views.push_back(
        caches.back()->Prepare(caches.back()->Lock(), 0, tokens.size()));
    const size_t width = kind == RowOutput::kHidden ? hidden : vocab;
    outputs.emplace_back(kRows[outputs.size()] * width + 1, -7.5f);
  }
  std::vector<SequenceSlice> slices;
  TokenList list;
  for (size_t i = 0; i < caches.size(); ++i) {
    slices.push_back({tokens, &views[i], &caches[i]->layout(),
                      {kKinds[i], kRows[i], outputs[i].data()}});
    if (kKinds[i] == RowOutput::kLargest) {
      slices.back().output.data = nullptr;
      slices.back().output.count = 3;
      slices.back().output.tokens = &list;
    }
  }
  forward.Step(slices);

  for (size_t r = 0; r < 3; ++r) {
    EXPECT_TRUE(std::equal(states[17 + r].begin(), states[17 + r].end(),
                           outputs[0].begin() + static_cast<long>(r * hidden)));
  }
  for (size_t r = 0; r < 20; ++r) {
    EXPECT_TRUE(std::equal(logits[r].begin(), logits[r].end(),
                           outputs[1].begin() + static_cast<long>(r * vocab)));
  }
  std::vector<size_t> order(vocab);
  std::iota(order.begin(), order.end(), size_t{0});
  std::partial_sort(order.begin(), order.begin() + 3, order.end(),
                    [&](size_t a, size_t b) {
                      return logits[19][a] > logits[19][b];
                    });
  for (size_t k = 0; k < 3; ++k) {
    const auto found = std::find(list.ids.begin(), list.ids.end(),
                                 static_cast<int32_t>(order[k]));
    ASSERT_NE(found, list.ids.end());
    EXPECT_EQ(list.logits[static_cast<size_t>(found - list.ids.begin())],
              logits[19][order[k]]);
  }
  for (const auto& output : outputs) {
    EXPECT_EQ(output.back(), -7.5f) << "written past its end";
  }
}

TEST(ForwardTest, SlicesOfAStepHaveOutputsOfTheirOwn) {
  ExpectOutputsOfTheirOwn(MixedTypes());
  // Rows without outputs end before the layers that share keys and values.
  TinyOptions options = MixedTypes(TinyFamily("gemma4"));
  options.final_soft_cap = 0;
  ExpectOutputsOfTheirOwn(options);
  options = MixedTypes(TinyFamily("gemma3n"));
  options.final_soft_cap = 0;
  ExpectOutputsOfTheirOwn(options);
}

// A conversation may be longer than the file's context: positions go on as in
// the same weights with the larger context stated.
TEST(ForwardTest, PositionsBeyondTheContextOfTheFile) {
  for (const std::string& family : CheckedFamilies()) {
    SCOPED_TRACE(family);
    const auto model = TinyModel(TinyFamily(family));
    MemorySource source = TinyTensors(TinyFamily(family));
    ModelConfig short_config = model->config;
    short_config.context_length = 8;
    ThreadPool pool(1);
    const auto short_model = std::make_shared<Model>(
        short_config, LoadWeights(short_config, source, pool, {}));
    const std::vector<int32_t> tokens = RandomTokens(700, 5);
    const Logits expected =
        Driver(model, 1).Run(*NewCache(*model, tokens), {300});
    Driver driver(short_model, 2);
    EXPECT_TRUE(SameBits(driver.Run(*NewCache(*model, tokens), {100, 1, 90}),
                         expected));
  }
}

// What no cut of the work may change, for a family and a type of stored keys
// and values.
constexpr char kLayersDiffer[] = "layers_differ";
struct BitsCase {
  std::string family;
  KvDtype dtype;
};

std::string NameOf(const BitsCase& of) {
  const char* const dtypes[] = {"f32", "bf16", "int8"};
  return of.family + "_" + dtypes[static_cast<size_t>(of.dtype)];
}

class ForwardBitsTest : public ::testing::TestWithParam<BitsCase> {
 protected:
  // Made once for all tests of a process: it takes as long as many of them.
  struct Made {
    std::shared_ptr<const Model> model = TinyModel(Options());
    std::vector<int32_t> tokens = RandomTokens(150, 3);
    Logits expected = Driver(model, 1).Run(
        *gkv::NewCache(*model, tokens, GetParam().dtype), {tokens.size()});
  };
  static const Made& MadeOnce() {
    static std::map<std::string, Made> made;
    return made[NameOf(GetParam())];
  }

  std::shared_ptr<Conversation> NewCache(const std::vector<int32_t>& tokens,
                                         size_t block_tokens = 16) {
    return gkv::NewCache(*model_, tokens, GetParam().dtype, block_tokens);
  }

  static TinyOptions Options() {
    return GetParam().family == kLayersDiffer
               ? LayersDiffer(MixedTypes())
               : MixedTypes(TinyFamily(GetParam().family));
  }

  const std::shared_ptr<const Model> model_ = MadeOnce().model;
  const std::vector<int32_t>& tokens_ = MadeOnce().tokens;
  const Logits& expected_ = MadeOnce().expected;
};

TEST_P(ForwardBitsTest, LogitsAreFinite) {
  for (const auto& row : expected_) {
    for (const float value : row) ASSERT_TRUE(std::isfinite(value));
  }
}

TEST_P(ForwardBitsTest, SameForAnyChunking) {
  Driver driver(model_, 1);
  std::vector<std::vector<size_t>> all = {{3, 5, 7}, {17}, {1, 149}};
  if (!kSanitized) {
    for (const size_t chunk : {1, 2, 16, 64}) all.push_back({chunk});
    all.push_back({149, 1});
  }
  for (const std::vector<size_t>& chunks : all) {
    const auto cache = NewCache(tokens_);
    EXPECT_TRUE(SameBits(driver.Run(*cache, chunks), expected_)) << chunks[0];
  }
}

// What a row leaves to later steps does not depend on whether it, or others of
// its step, have outputs.
TEST_P(ForwardBitsTest, SameWhicheverRowsHaveOutputs) {
  Driver driver(model_, 2);
  for (const size_t most : {0, 1, 2, 30}) {
    const auto cache = NewCache(tokens_);
    const auto other = NewCache(RandomTokens(60, 4));
    Conversation* const caches[] = {cache.get(), other.get()};
    driver.set_most_rows(most);
    size_t done = 0;
    // The other one is read in steps of its own sizes beside it.
    size_t other_done = 0;
    for (const size_t chunk : {40, 1, 30}) {
      const size_t begins[] = {done, other_done};
      const size_t ends[] = {done + chunk, other_done + 20};
      const Logits rows = driver.Step(caches, begins, ends);
      done = ends[0];
      other_done = ends[1];
      const size_t count = std::min(most, chunk);
      ASSERT_EQ(rows.size(), count + std::min<size_t>(most, 20));
      EXPECT_TRUE(SameBits(
          Logits(rows.begin(), rows.begin() + static_cast<long>(count)),
          Logits(expected_.begin() + static_cast<long>(done - count),
                 expected_.begin() + static_cast<long>(done))))
          << most;
    }
    driver.set_most_rows(tokens_.size());
    EXPECT_TRUE(SameBits(
        driver.Run(*cache, {33}),
        Logits(expected_.begin() + static_cast<long>(done), expected_.end())))
        << most;
  }
}

TEST_P(ForwardBitsTest, SameForAnyNumberOfThreads) {
  for (const size_t threads : {3, 2, 5}) {
    if (kSanitized && threads != 3) continue;
    Driver driver(model_, threads);
    for (const size_t chunk : {9, 150, 1}) {
      if (kSanitized && chunk == 1) continue;
      const auto cache = NewCache(tokens_);
      EXPECT_TRUE(SameBits(driver.Run(*cache, {chunk}), expected_))
          << threads << " threads, chunks of " << chunk;
    }
  }
}

TEST_P(ForwardBitsTest, SameForAnyBlockSize) {
  Driver driver(model_, 2);
  for (const size_t block_tokens : {32, 64, 128}) {
    const auto cache = NewCache(tokens_, block_tokens);
    EXPECT_TRUE(SameBits(driver.Run(*cache, {40, 1, 30}), expected_))
        << block_tokens;
  }
}

TEST_P(ForwardBitsTest, SameInABatch) {
  Driver driver(model_, 2);
  Driver alone(model_, 1);
  const std::vector<size_t> lengths = {1, 30, 77, 150, 24};
  std::vector<std::shared_ptr<Conversation>> caches;
  std::vector<Logits> expected;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto tokens = RandomTokens(lengths[i], 10 + static_cast<uint32_t>(i));
    caches.push_back(NewCache(tokens));
    expected.push_back(alone.Run(*NewCache(tokens), {lengths[i]}));
  }
  // Ragged: whoever has rows left takes part with up to 13 of them.
  std::vector<Logits> found(lengths.size());
  std::vector<size_t> done(lengths.size(), 0);
  while (true) {
    std::vector<Conversation*> members;
    std::vector<size_t> begins, ends, ids;
    for (size_t i = 0; i < lengths.size(); ++i) {
      if (done[i] == lengths[i]) continue;
      members.push_back(caches[i].get());
      begins.push_back(done[i]);
      ends.push_back(std::min(lengths[i], done[i] + 3 + 5 * (i % 3)));
      ids.push_back(i);
    }
    if (ids.empty()) break;
    const Logits rows = driver.Step(members, begins, ends);
    size_t row = 0;
    for (size_t m = 0; m < ids.size(); ++m) {
      for (size_t p = begins[m]; p < ends[m]; ++p) {
        found[ids[m]].push_back(rows[row++]);
      }
      done[ids[m]] = ends[m];
    }
  }
  for (size_t i = 0; i < lengths.size(); ++i) {
    EXPECT_TRUE(SameBits(found[i], expected[i])) << "conversation " << i;
  }
}

TEST_P(ForwardBitsTest, SameAfterForkTruncateAndReplay) {
  Driver driver(model_, 2);
  // Points within the window, just past it, and far past it.
  for (const size_t keep : {1, 23, 24, 25, 60, 100, 120, 149, 150}) {
    if (kSanitized && keep % 3 != 0) continue;
    const auto parent = NewCache(tokens_);
    driver.Run(*parent, {50});
    const std::unique_ptr<Conversation> fork = parent->Fork();
    fork->Truncate(keep);
    fork->Append(fork->Lock(), std::span(tokens_).subspan(keep));
    const Logits rows = driver.Run(*fork, {37});
    // The rows from `keep` - 1 or earlier on; replay rows before it are void.
    ASSERT_GE(rows.size(), tokens_.size() - keep);
    const size_t count = std::max<size_t>(1, tokens_.size() - keep);
    EXPECT_TRUE(SameBits(
        Logits(rows.end() - static_cast<long>(count), rows.end()),
        Logits(expected_.end() - static_cast<long>(count), expected_.end())))
        << "kept " << keep;
  }
}

// As a speculative decoder runs: guesses behind the pending token, of which any
// number turns out right, or none.
TEST_P(ForwardBitsTest, SameWhenAPartOfAStepIsCommitted) {
  Driver driver(model_, 2);
  const auto cache = NewCache({tokens_.begin(), tokens_.begin() + 41});
  driver.Run(*cache, {40});
  const std::unique_ptr<Conversation> fork = cache->Fork();
  cache->Append(cache->Lock(), std::span(tokens_).subspan(41, 1));
  for (size_t round = 0; cache->length() + 20 < tokens_.size(); ++round) {
    const size_t begin = cache->next_position(), length = cache->length();
    const size_t right = round * 5 % 17;
    std::vector<int32_t> drafts(
        tokens_.begin() + static_cast<long>(length),
        tokens_.begin() + static_cast<long>(length + 17));
    for (size_t i = right; i < drafts.size(); ++i) drafts[i] ^= 1;
    const Logits rows = driver.Draft(*cache, drafts, right);
    ASSERT_TRUE(SameBits(
        rows, Logits(expected_.begin() + static_cast<long>(begin),
                     expected_.begin() + static_cast<long>(length + right))))
        << "from " << begin << ", " << right << " guesses right";
    cache->Append(cache->Lock(),
                  std::span(tokens_).subspan(cache->length(), 1));
  }
  for (Conversation* const each : {cache.get(), fork.get()}) {
    each->Append(each->Lock(), std::span(tokens_).subspan(each->length()));
    const auto begin = static_cast<long>(each->next_position());
    EXPECT_TRUE(SameBits(driver.Run(*each, {16}),
                         Logits(expected_.begin() + begin, expected_.end())));
  }
}

TEST_P(ForwardBitsTest, SameFromAPointInsideAStep) {
  Driver driver(model_, 2);
  const auto cache = NewCache(tokens_);
  {
    const RunLock lock = cache->Lock();
    const size_t keep[] = {40, 41, 99, 100, 149}, at[] = {41, 100};
    KvStepView view = cache->Prepare(lock, 0, tokens_.size(), keep);
    Conversation* const caches[] = {cache.get()};
    EXPECT_TRUE(SameBits(driver.Outputs(caches, {&view, 1}, {&tokens_, 1}),
                         expected_));
    for (Checkpoint& point : cache->Commit(lock, view, view.end, at)) {
      EXPECT_TRUE(cache->AddCheckpoint(lock, std::move(point)));
    }
  }
  for (const size_t length : {100, 41}) {
    const auto fork = cache->Fork();
    EXPECT_EQ(fork->Truncate(length).replay_tokens, 0u) << length;
    EXPECT_EQ(fork->next_position_for_logits(), length - 1) << length;
    fork->Append(fork->Lock(), std::span(tokens_).subspan(length));
    EXPECT_TRUE(SameBits(
        driver.Run(*fork, {37}),
        Logits(expected_.begin() + static_cast<long>(length), expected_.end())))
        << length;
  }
}

TEST_P(ForwardBitsTest, SameOnEveryTargetWithFusedMultiplyAdd) {
  // With float weights as well: mixed types hold both.
  uint32_t id = NumericsId();
  size_t compared = 0;
  for (const std::string& target : AttainableTargets()) {
    ForceTarget(target);
    if (NumericsId() == id) {
      const auto cache = NewCache(tokens_);
      EXPECT_TRUE(SameBits(Driver(model_, 1).Run(*cache, {70}), expected_))
          << target;
      ++compared;
    }
  }
  ForceTarget("");
  EXPECT_GE(compared, 1u);
}

// Every family, and every dtype where layers of both attention kinds are. Under
// the sanitizers those that are made of other parts.
std::vector<BitsCase> BitsCases() {
  std::vector<BitsCase> cases;
  for (const std::string& family : CheckedFamilies()) {
    cases.push_back({family, KvDtype::kBF16});
  }
  if (kSanitized) cases.push_back({"gemma4_moe", KvDtype::kBF16});
  cases.push_back({"gemma3", KvDtype::kInt8});
  if (!kSanitized) cases.push_back({"gemma3", KvDtype::kF32});
  cases.push_back({kLayersDiffer, KvDtype::kBF16});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Families, ForwardBitsTest,
                         ::testing::ValuesIn(BitsCases()),
                         [](const auto& info) { return NameOf(info.param); });

}  // namespace
}  // namespace gkv
