#include "engine/draft_model.h"

#include <algorithm>
#include <array>
#include <limits>
#include <new>
#include <utility>

#include "base/error.h"

namespace gkv {
namespace {

// A conversation takes part in rounds with up to so many new tokens: they are a
// few more rows of its first round.
constexpr size_t kNear = 16;
// The most rows of a first round whose guesses are judged: their next token is
// known.
constexpr size_t kJudgedRows = 8;
// The most rows of logits of one step.
constexpr size_t kLogitsRows = 32;
// Shorter prefixes are computed again, which takes less time than taking them
// over.
constexpr size_t kWorthSharing = 16;
// The time of one row of many as a share of a round, before it was measured.
constexpr double kRowShare = 0.07;
// The number of tokens that a reply is expected to have, and to have left, at
// least.
constexpr size_t kExpectedTokens = 64;

}  // namespace

DraftModel::DraftModel(std::shared_ptr<const Model> model, const Model& target,
                       ThreadPool& pool, size_t cache_bytes, DraftWork& work)
    : ModelDrafter(model,
                   MatrixBytes(*model) / std::max(1.0, MatrixBytes(target)),
                   work),
      pool_(pool),
      cache_pool_(BlockPool::Create(cache_bytes)),
      forward_(*model_, pool) {}

// ---- What it knows of conversations ----

// Returns the length of the common prefix. The tokens before `begin` are known
// to be equal.
size_t DraftModel::CountCommon(const Conversation& a, const Conversation& b,
                               size_t begin) {
  constexpr size_t kPiece = 256;
  const size_t most = std::min(a.length(), b.length());
  std::array<int32_t, kPiece> of_a, of_b;
  for (; begin < most; begin += kPiece) {
    const size_t count = std::min(kPiece, most - begin);
    a.CopyTokens(begin, {of_a.data(), count});
    b.CopyTokens(begin, {of_b.data(), count});
    const auto end = of_a.begin() + static_cast<ptrdiff_t>(count);
    const auto differs = std::mismatch(of_a.begin(), end, of_b.begin()).first;
    if (differs != end) {
      return begin + static_cast<size_t>(differs - of_a.begin());
    }
  }
  return most;
}

// Returns the conversation whose computed part shares the longest prefix with
// the transcript; null if that is too short.
std::shared_ptr<DraftConversation> DraftModel::FindMostAlike(
    const Candidate& candidate, size_t& common) const {
  std::shared_ptr<DraftConversation> best;
  common = kWorthSharing - 1;
  for (const auto& known : known_) {
    if (known->tenant != candidate.sources.tenant) continue;
    const size_t count =
        std::min(CountCommon(*known->cache, *candidate.cache, 0),
                 known->cache->computed());
    if (count > common) {
      best = known;
      common = count;
    }
  }
  return best;
}

// Gives the request a conversation, with the keys and values that the model has
// of its transcript.
void DraftModel::Begin(Candidate& candidate) {
  size_t common = 0;
  std::shared_ptr<DraftConversation> mine = FindMostAlike(candidate, common);
  if (mine && mine.use_count() == 2 && common >= mine->known) {
    mine->ended = true;
  } else {
    auto cache = mine
                     ? std::shared_ptr<Conversation>(mine->cache->Fork())
                     : std::make_shared<Conversation>(
                           model_->config.MakeKvLayout(KvDtype::kBF16, 16),
                           CacheOptions{.capacity_tokens =
                                            std::numeric_limits<int32_t>::max(),
                                        .pool = cache_pool_},
                           model_->config.name);
    if (mine) cache->Truncate(common);
    mine = std::make_shared<DraftConversation>(std::move(cache));
    mine->known = mine->cache->length();
    mine->tenant = candidate.sources.tenant;
    known_.push_back(mine);
  }
  mine->catching_up = mine->gave_up = false;
  mine->moved = true;
  candidate.drafted = std::move(mine);
  DropBeyond(kMaxKept);
}

// Brings the transcript up to the target's, and learns which of the last
// guesses were right.
void DraftModel::Follow(Candidate& candidate) {
  DraftConversation& c = *candidate.drafted;
  Conversation& cache = *c.cache;
  const size_t length = candidate.cache->length();
  c.used = ++uses_;
  Judge(candidate);
  size_t kept = CountCommon(cache, *candidate.cache, c.known);
  if (kept < cache.length()) {
    const Truncation cut = cache.Truncate(c.lock, kept);
    if (c.before_guesses && cut.replay_tokens > kept - c.known) {
      cache.Adopt(c.lock, *std::move(c.before_guesses));
      kept = c.known;
    }
    c.moved = true;
  }
  c.before_guesses.reset();
  c.known = kept;
  // A turn ended here: the conversation may be rewound to this point.
  if (std::exchange(c.ended, false)) cache.MakeCheckpoint(c.lock);
  std::vector<int32_t> added(length - kept);
  candidate.cache->CopyTokens(kept, added);
  cache.Append(c.lock, added);
  c.known = length;
  if (std::exchange(c.moved, false)) c.next = cache.next_position_for_logits();
}

// There is no memory for the conversation: its request has no guesses.
void DraftModel::GiveUp(DraftConversation& conversation) noexcept {
  conversation.gave_up = true;
  conversation.before_guesses.reset();
  try {
    conversation.cache->Reset(conversation.lock);
  } catch (const std::bad_alloc&) {
    // It is freed when the request ends.
  }
}

// Drops the least recently used idle conversation. Returns false if there is
// none.
bool DraftModel::DropOldest() noexcept {
  auto oldest = known_.end();
  for (auto it = known_.begin(); it != known_.end(); ++it) {
    if (it->use_count() > 1) continue;
    if (oldest == known_.end() || (*it)->used < (*oldest)->used) oldest = it;
  }
  if (oldest == known_.end()) return false;
  known_.erase(oldest);
  return true;
}

void DraftModel::DropBeyond(size_t kept) noexcept {
  const auto idle = std::count_if(
      known_.begin(), known_.end(),
      [](const auto& known) { return known.use_count() == 1; });
  for (auto left = static_cast<size_t>(idle); left > kept; --left) DropOldest();
}

// ---- What it costs ----

size_t DraftModel::Lag(const DraftConversation& conversation) {
  return conversation.known - conversation.next;
}

double DraftModel::RowSeconds(double step_s) const {
  const double known = row_s_.seconds();
  return known > 0 ? known : kRowShare * RoundSeconds(1, step_s);
}

double DraftModel::CatchUpSeconds(const DraftConversation& c,
                                  double step_s) const {
  return RoundSeconds(1, step_s) +
         static_cast<double>(Lag(c)) * RowSeconds(step_s);
}

// ---- Steps ----

bool DraftModel::Prepare(Slice& slice, size_t begin, size_t end,
                         size_t outputs) {
  DraftConversation& c = *slice.conversation;
  do {
    try {
      slice.ids.resize(end - begin);
      c.cache->CopyTokens(begin, slice.ids);
      slice.output = slice.candidate->consumer->output();
      slice.output.rows = outputs;
      slice.output.data = nullptr;
      slice.view =
          c.cache->Prepare(c.lock, begin, end, {},
                           c.before_guesses ? &*c.before_guesses : nullptr);
      return true;
    } catch (const CacheFull&) {
    } catch (const std::bad_alloc&) {
      break;
    }
  } while (DropOldest());
  GiveUp(c);
  return false;
}

// Runs and commits the slices. Returns false if there is no memory: slices that
// were not committed are computed again.
bool DraftModel::Run(std::span<Slice> slices) {
  for (Slice& slice : slices) slice.conversation->moved = true;
  try {
    std::vector<SequenceSlice> inputs;
    inputs.reserve(slices.size());
    std::vector<RowOutput*> outputs;
    outputs.reserve(slices.size());
    for (Slice& slice : slices) outputs.push_back(&slice.output);
    rows_.Place(outputs, model_->config);
    for (Slice& slice : slices) {
      inputs.push_back({slice.ids, &slice.view,
                        &slice.conversation->cache->layout(), slice.output});
    }
    forward_.Step(inputs);
    for (const Slice& slice : slices) CountRows(slice.ids.size());
    for (Slice& slice : slices) {
      DraftConversation& c = *slice.conversation;
      c.cache->Commit(c.lock, slice.view);
      c.next = slice.view.end;
      c.moved = false;
    }
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

// Guesses the token after each slice, and judges the guesses for the rows
// before the last one, whose next token is known.
void DraftModel::Sample(std::span<Slice> slices) {
  const size_t vocab = model_->config.vocab_size;
  ThreadPool* const free_pool = slices.size() == 1 ? &pool_ : nullptr;
  pool_.Run(slices.size(), [&](size_t i, size_t) {
    Slice& slice = slices[i];
    const size_t rows = slice.output.rows;
    try {
      for (size_t row = 0; row < rows; ++row) {
        OutputRow output = OutputRow::Of(slice.output, row, vocab,
                                         slice.view.end - rows + row + 1);
        output.pool = free_pool;
        const bool last = row + 1 == rows;
        const RowConsumer::Guess guess = slice.candidate->consumer->GuessNext(
            output, last ? std::span<const int32_t>(
                               slice.candidate->record.guesses)
                         : std::span<const int32_t>());
        if (last) {
          slice.guess = guess;
        } else {
          ++slice.seen;
          slice.right +=
              guess.id == slice.ids[slice.ids.size() - rows + row + 1];
        }
      }
    } catch (const std::bad_alloc&) {
      slice.guess = {};
    }
  });
}

// Whether guesses can still save more time than reading the new tokens takes,
// or it is time to try whether they would be right.
bool DraftModel::WorthCatchingUp(Candidate& candidate,
                                 const GuessCosts& costs) const {
  const double seconds = CatchUpSeconds(*candidate.drafted, costs.step);
  const GuessOffer alone = OfferTo(candidate, 0);
  const double gain = PlanGuesses({&alone, 1}, costs).gain;
  const size_t said = candidate.cache->length() - candidate.sampled_from;
  const size_t expected = std::min(candidate.consumer->tokens_left(),
                                   std::max(kExpectedTokens, said));
  const double saved = (1 - 1 / gain) * static_cast<double>(expected) *
                       costs.step / static_cast<double>(costs.tokens);
  return costs.always || saved > seconds || Try(candidate, seconds);
}

// Reads up to `rows` new tokens, and leaves the last one to a round.
void DraftModel::CatchUp(Candidate& candidate, size_t rows) {
  DraftConversation& c = *candidate.drafted;
  Slice slice{.candidate = &candidate, .conversation = &c};
  const size_t count = std::min(rows, Lag(c) - 1);
  const Clock::time_point begin = Clock::now();
  if (!Prepare(slice, c.next, c.next + count, 0) || !Run({&slice, 1})) return;
  if (count >= kNear) {
    row_s_.Note(SecondsSince(begin) / static_cast<double>(count));
  }
}

void DraftModel::Offer(std::span<Candidate* const> requests,
                       const GuessCosts& costs) {
  offered_.clear();
  bool catches_up = false;
  for (Candidate* const candidate : requests) {
    if (offered_.size() == kMaxRequests) break;
    if (!candidate->drafted) Begin(*candidate);
    DraftConversation& c = *candidate->drafted;
    if (c.gave_up) continue;
    Follow(*candidate);
    candidate->record.decoded_s +=
        costs.step / static_cast<double>(costs.tokens);
    if (Lag(c) > kNear) {
      c.catching_up = c.catching_up || WorthCatchingUp(*candidate, costs);
      if (!c.catching_up) continue;
      // One of them at a time: a later one may find what this one has read.
      if (std::exchange(catches_up, true)) continue;
      CatchUp(*candidate, costs.read_rows);
      if (Lag(c) > kNear || c.gave_up) continue;
    }
    c.catching_up = false;
    const double reading =
        static_cast<double>(Lag(c) - 1) * RowSeconds(costs.step);
    candidate->offer = OfferTo(*candidate, costs.always ? 0 : reading);
    offered_.push_back(candidate);
  }
}

// A request without a planned guess takes part in the first round now and then,
// so that the model learns whether it would be right.
void DraftModel::MakeGuesses(const GuessCosts& costs) {
  std::vector<Slice> members;
  // The requests may have ended before the next step.
  for (Candidate* const candidate : std::exchange(offered_, {})) {
    DraftConversation& c = *candidate->drafted;
    if (candidate->planned > 0 ||
        (Lag(c) >= kNear / 2 &&
         Try(*candidate, CatchUpSeconds(c, costs.step)))) {
      members.push_back({.candidate = candidate,
                         .conversation = &c,
                         .left = candidate->planned});
    }
  }
  if (!members.empty()) RunRounds(std::move(members));
}

// Runs rounds. The first one reads the new tokens; those that could have been
// guessed are judged.
void DraftModel::RunRounds(std::vector<Slice> members) {
  const size_t judged = std::min(
      kJudgedRows, (kLogitsRows - members.size()) / members.size());
  std::vector<Slice> slices;
  slices.reserve(members.size());
  for (Slice& slice : members) {
    const DraftConversation& c = *slice.conversation;
    const size_t from = std::max({slice.candidate->sampled_from,
                                  slice.candidate->record.judged, c.next + 1});
    const size_t news = c.known - std::min(c.known, from);
    if (Prepare(slice, c.next, c.known, 1 + std::min(judged, news))) {
      slices.push_back(std::move(slice));
    }
  }
  for (size_t round = 0; !slices.empty(); ++round) {
    size_t rows = 0;
    for (const Slice& slice : slices) rows += slice.ids.size();
    const Clock::time_point begin = Clock::now();
    if (!Run(slices)) return;
    Sample(slices);
    std::vector<Slice> next;
    next.reserve(slices.size());
    for (Slice& slice : slices) {
      Candidate& candidate = *slice.candidate;
      DraftConversation& c = *slice.conversation;
      for (size_t k = 0; k < slice.seen; ++k) Learn(candidate, k < slice.right);
      if (round == 0) candidate.record.judged = c.known;
      if (!Add(candidate, slice.guess, slice.left)) continue;
      if (!c.before_guesses) c.before_guesses = c.cache->Export();
      c.cache->Append(c.lock, {&slice.guess.id, 1});
      Slice following{.candidate = &candidate,
                      .conversation = &c,
                      .left = slice.left};
      if (Prepare(following, c.next, c.next + 1, 1)) {
        next.push_back(std::move(following));
      }
    }
    // The first round has a few more rows.
    const double more =
        static_cast<double>(rows - slices.size()) * row_s_.seconds();
    NoteRound(slices.size(), std::max(SecondsSince(begin) - more, 1e-9));
    slices = std::move(next);
  }
}

}  // namespace gkv
