#include "engine/target_drafter.h"

#include <algorithm>
#include <array>
#include <new>
#include <optional>
#include <utility>

#include "engine/draft_plan.h"

namespace gkv {
namespace {

// What a round reads of the drafter, as a share of the target: of a head with
// clusters those that are chosen.
double ReadShare(const Model& drafter, const Model& target) {
  const ModelConfig& config = drafter.config;
  double bytes = MatrixBytes(drafter);
  if (config.num_centroids != 0) {
    const PackedMatrix& head = drafter.weights.output_head();
    const double unread = 1 - static_cast<double>(config.centroids_used) /
                                  static_cast<double>(config.num_centroids);
    bytes -= unread * static_cast<double>(head.rows *
                                          RowBytes(head.type, head.cols));
  }
  return bytes / std::max(1.0, MatrixBytes(target));
}

}  // namespace

TargetDrafter::TargetDrafter(std::shared_ptr<const Model> model,
                             const Model& target, ThreadPool& pool)
    : ModelDrafter(model, ReadShare(*model, target)),
      pool_(pool),
      pass_(*model_, target, pool) {}

// From what came of the last guesses.
void TargetDrafter::Learn(const Request& request) {
  DraftState& state = *request.state;
  if (!std::exchange(state.begun, true)) {
    state.right = {right_.value, kOthersWeight};
  }
  const size_t length = request.target->length();
  for (size_t i = 0; i < state.guesses.size(); ++i) {
    if (state.guessed_at + i >= length) break;
    int32_t token;
    request.target->CopyTokens(state.guessed_at + i, {&token, 1});
    const bool was_right = token == state.guesses[i];
    state.right.Note(was_right, kLately);
    right_.Note(was_right, kLatelyInAll);
    if (!was_right) break;
  }
  state.guesses.clear();
  state.guessed_at = length;
}

// Whether everything before the last token is there to be read.
bool TargetDrafter::Ready(const Request& request, KvStepView& view) const {
  const DraftState& state = *request.state;
  const size_t length = request.target->length();
  if (state.hidden.empty() || state.length != length || length < 2) {
    return false;
  }
  std::optional<KvStepView> held = request.target->View(*request.lock);
  if (!held || held->end + 1 != length) return false;
  view = *std::move(held);
  return true;
}

void TargetDrafter::Guess(std::span<Request> requests, const Price& price) {
  if (price.step_s <= 0) return;
  try {
    GuessAll(requests, price);
  } catch (const std::bad_alloc&) {
    // Those that have no guesses do without.
  }
}

void TargetDrafter::GuessAll(std::span<Request> requests, const Price& price) {
  const double step_s = price.step_s;
  std::array<double, kMaxConversations> rounds;
  for (size_t i = 0; i < rounds.size(); ++i) {
    rounds[i] = price.always ? 0 : RoundSeconds(i + 1, step_s);
  }
  std::vector<Member> members;
  std::vector<DraftCandidate> candidates;
  for (Request& request : requests) {
    Learn(request);
    if (members.size() == kMaxConversations) continue;
    request.state->decoded_s += step_s / static_cast<double>(price.tokens);
    KvStepView view;
    if (!Ready(request, view)) continue;
    members.push_back({.request = &request, .view = std::move(view)});
    candidates.push_back({request.state->right.value, request.most, 0});
  }
  if (members.empty()) return;
  const DraftPlan plan =
      PlanDrafts(candidates, {price.tokens, step_s, price.extra, rounds});
  const double try_s = RoundSeconds(1, step_s);
  for (size_t i = 0; i < members.size(); ++i) {
    Member& member = members[i];
    DraftState& state = *member.request->state;
    member.left = plan.guesses[i];
    member.shown = member.left > 0;
    // To see now and then whether a guess would be right.
    if (member.left == 0 && member.request->most > 0 &&
        state.tried_s + try_s < kTryShare * state.decoded_s) {
      member.left = 1;
      state.tried_s += try_s;
    }
  }
  std::erase_if(members, [](const Member& m) { return m.left == 0; });
  Rounds(members);
}

void TargetDrafter::Rounds(std::vector<Member>& members) {
  const size_t width = model_->config.target_hidden;
  states_.EnsureSize(members.size() * width);
  for (size_t i = 0; i < members.size(); ++i) {
    const Request& request = *members[i].request;
    std::copy_n(request.state->hidden.data(), width,
                states_.data() + i * width);
    request.target->CopyTokens(request.target->length() - 1,
                               {&members[i].last, 1});
  }
  while (!members.empty()) {
    Round(members);
    size_t kept = 0;
    for (size_t i = 0; i < members.size(); ++i) {
      Member& member = members[i];
      if (member.guess.id < 0) continue;
      member.request->state->guesses.push_back(member.guess.id);
      if (member.shown) member.request->guesses.push_back(member.guess.id);
      if (--member.left == 0 || member.guess.last) continue;
      member.last = member.guess.id;
      if (kept != i) {
        std::copy_n(states_.data() + i * width, width,
                    states_.data() + kept * width);
        members[kept] = std::move(member);
      }
      ++kept;
    }
    members.resize(kept);
  }
}

// One more guess for each.
void TargetDrafter::Round(std::span<Member> members) {
  const size_t vocab = model_->config.vocab_size;
  const size_t width = model_->config.target_hidden;
  const Clock::time_point begin = Clock::now();
  std::vector<RowOutput> outputs;
  std::vector<RowOutput*> places;
  outputs.reserve(members.size());
  for (const Member& member : members) {
    outputs.push_back(member.request->consumer->output());
    outputs.back().rows = 1;
    outputs.back().data = nullptr;
    places.push_back(&outputs.back());
  }
  rows_.Place(places, model_->config);
  std::vector<DraftPass::Row> rows;
  rows.reserve(members.size());
  for (size_t i = 0; i < members.size(); ++i) {
    const Member& member = members[i];
    float* const state = states_.data() + i * width;
    rows.push_back({.view = &member.view,
                    .layout = &member.request->target->layout(),
                    .token = member.last,
                    .state = state,
                    .next = state,
                    .logits = outputs[i].data,
                    .largest = outputs[i].tokens,
                    .count = outputs[i].count});
  }
  pass_.Run(rows);
  CountRows(rows.size());
  ThreadPool* const free_pool = members.size() == 1 ? &pool_ : nullptr;
  pool_.Run(members.size(), [&](size_t i, size_t) {
    Member& member = members[i];
    const Request& request = *member.request;
    OutputRow output =
        OutputRow::Of(outputs[i], 0, vocab,
                      request.target->length() + request.state->guesses.size());
    output.pool = free_pool;
    try {
      member.guess =
          request.consumer->GuessNext(output, request.state->guesses);
    } catch (const std::bad_alloc&) {
      member.guess = {};
    }
  });
  NoteRound(members.size(), std::max(SecondsSince(begin), 1e-9));
}

}  // namespace gkv
