#include "engine/target_drafter.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace gkv {
namespace {

// Returns what a round reads of the drafter, as a share of the target; of a
// head with clusters it reads the chosen ones.
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
                             const Model& target, ThreadPool& pool,
                             DraftWork& work)
    : ModelDrafter(model, ReadShare(*model, target), work),
      pool_(pool),
      pass_(*model_, target, pool) {}

// Whether the cache holds everything before the last token.
bool TargetDrafter::TryView(const Candidate& candidate, KvStepView& view) {
  const size_t length = candidate.cache->length();
  if (candidate.hidden.empty() || candidate.hidden_length != length ||
      length < 2) {
    return false;
  }
  std::optional<KvStepView> held = candidate.cache->View(*candidate.lock);
  if (!held || held->end + 1 != length) return false;
  view = *std::move(held);
  return true;
}

void TargetDrafter::Offer(std::span<Candidate* const> requests,
                          const GuessCosts& costs) {
  offered_.clear();
  for (Candidate* const candidate : requests) {
    Judge(*candidate);
    if (offered_.size() == kMaxRequests) continue;
    candidate->record.decoded_s +=
        costs.step / static_cast<double>(costs.tokens);
    KvStepView view;
    if (!TryView(*candidate, view)) continue;
    candidate->offer = OfferTo(*candidate, 0);
    offered_.push_back({.candidate = candidate, .view = std::move(view)});
  }
}

// A request without a planned guess gets one now and then that is not proposed,
// to learn whether it would be right.
void TargetDrafter::MakeGuesses(const GuessCosts& costs) {
  const double try_s = RoundSeconds(1, costs.step);
  std::vector<Member> members;
  for (Member& member : std::exchange(offered_, {})) {
    Candidate& candidate = *member.candidate;
    member.left = candidate.planned;
    if (member.left == 0) {
      if (candidate.most == 0 || !Try(candidate, try_s)) continue;
      member.left = 1;
    }
    candidate.cache->CopyTokens(candidate.cache->length() - 1,
                                {&member.last, 1});
    candidate.hidden_length = 0;  // rounds overwrite the state
    members.push_back(std::move(member));
  }
  while (!members.empty()) {
    RunRound(members);
    std::vector<Member> next;
    for (Member& member : members) {
      if (!Add(*member.candidate, member.guess, member.left)) continue;
      member.last = member.guess.id;
      next.push_back(std::move(member));
    }
    members = std::move(next);
  }
}

// Makes one more guess for each member.
void TargetDrafter::RunRound(std::span<Member> members) {
  const size_t vocab = model_->config.vocab_size;
  const Clock::time_point begin = Clock::now();
  std::vector<RowOutput> outputs;
  std::vector<RowOutput*> places;
  outputs.reserve(members.size());
  for (const Member& member : members) {
    outputs.push_back(member.candidate->consumer->output());
    outputs.back().rows = 1;
    outputs.back().data = nullptr;
    places.push_back(&outputs.back());
  }
  rows_.Place(places, model_->config);
  std::vector<DraftPass::Row> rows;
  rows.reserve(members.size());
  for (size_t i = 0; i < members.size(); ++i) {
    const Member& member = members[i];
    float* const state = member.candidate->hidden.data();
    rows.push_back({.view = &member.view,
                    .layout = &member.candidate->cache->layout(),
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
    Candidate& candidate = *member.candidate;
    const std::vector<int32_t>& guesses = candidate.record.guesses;
    OutputRow output = OutputRow::Of(
        outputs[i], 0, vocab, candidate.cache->length() + guesses.size());
    output.pool = free_pool;
    try {
      member.guess = candidate.consumer->GuessNext(output, guesses);
    } catch (const std::bad_alloc&) {
      member.guess = {};
    }
  });
  NoteRound(members.size(), std::max(SecondsSince(begin), 1e-9));
}

}  // namespace gkv
