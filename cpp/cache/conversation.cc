// Invariants between public calls:
//   computed <= log.size()
//   groups that forget nothing hold exactly [0, computed)
//   the others can go on from a position <= computed, from a checkpoint, or
//   start cold; what they hold never reaches past computed, and groups of one
//   conversation warm up together or not at all
//   checkpoints are at positions <= computed, ascending, as are their lengths
// The keys and values of guesses are in the blocks of a step, never in a group.
// Only Commit, Append, Truncate, MakeCheckpoint, AddCheckpoint, Reset and Adopt
// change the content, under the run lock and the state lock, and
// ReleaseCheckpoints, under the state lock while nobody holds the run lock.
// Bind changes the fingerprint alone. Forks change no content, so a
// conversation may be forked while somebody holds its run lock.

#include "cache/conversation.h"

#include <algorithm>
#include <cassert>
#include <unordered_map>
#include <utility>

#include "base/error.h"

namespace gkv {
namespace {

// The default budget in checkpoints that share nothing: enough for a few turns
// far apart, or for many close together. More memory has to be asked for.
constexpr size_t kDefaultCheckpoints = 4;

}  // namespace

// Reclaims checkpoints of a conversation for the pool as long as the
// conversation exists.
class Conversation::IdleCheckpoints final : public Reclaimer {
 public:
  explicit IdleCheckpoints(Conversation* cache) : cache_(cache) {}

  size_t Reclaim(size_t bytes) override {
    MutexLock lock(mutex_);
    return cache_ == nullptr ? 0 : cache_->ReleaseCheckpoints(bytes);
  }
  bool gives_way_readily() const override { return false; }
  void Detach() {
    MutexLock lock(mutex_);
    cache_ = nullptr;
  }
  // The scope of the conversation's mutexes. When the conversation is gone,
  // only Reclaim locks this mutex; a pool calls it while fork() waits for the
  // pool's own.
  ForkScope& scope() { return scope_; }

 private:
  ForkScope scope_;
  Mutex mutex_{scope_};  // its holder does not wait
  Conversation* cache_ GUARDED_BY(mutex_);
};

Conversation::Conversation(std::shared_ptr<const KvLayout> layout,
                           CacheOptions options, std::string model_type)
    : layout_(std::move(layout)),
      pool_(options.pool ? std::move(options.pool) : BlockPool::Default()),
      model_type_(std::move(model_type)),
      capacity_tokens_(options.capacity_tokens),
      checkpoint_bytes_(options.checkpoint_bytes.value_or(
          kDefaultCheckpoints * layout_->checkpoint_bytes())),
      idle_checkpoints_(std::make_shared<IdleCheckpoints>(this)),
      gate_(idle_checkpoints_->scope()),
      state_mutex_(idle_checkpoints_->scope()),
      state_(layout_, pool_) {
  if (capacity_tokens_ == 0) {
    throw InvalidArgument(Unexpected("capacity_tokens", "at least 1", 0));
  }
  pool_->AddReclaimer(idle_checkpoints_);
}

Conversation::~Conversation() { idle_checkpoints_->Detach(); }

KvContent Conversation::Export() const {
  MutexLock lock(state_mutex_);
  return state_;
}

size_t Conversation::length() const {
  MutexLock lock(state_mutex_);
  return state_.log.size();
}

size_t Conversation::computed() const {
  MutexLock lock(state_mutex_);
  return state_.computed;
}

std::vector<int32_t> Conversation::tokens() const {
  MutexLock lock(state_mutex_);
  std::vector<int32_t> tokens(state_.log.size());
  state_.log.Copy(0, tokens);
  return tokens;
}

// A block is the conversation's own if every reference to it is from one of its
// groups, a checkpoint that no fork carries, or a prefix index.
Conversation::Bytes Conversation::CountBytes() const {
  std::unordered_map<const Block*, uint32_t> own_references;
  const auto add = [&](const GroupSet& groups, uint32_t references) {
    std::vector<const Block*> blocks;
    for (const auto& group : groups) {
      if (group) group->AddBlocks(blocks);
    }
    for (const Block* block : blocks) own_references[block] += references;
  };
  MutexLock lock(state_mutex_);
  add(state_.groups, 1);
  for (const Checkpoint& checkpoint : state_.checkpoints.list()) {
    add(*checkpoint.groups, checkpoint.groups.use_count() == 1 ? 1 : 0);
  }
  Bytes bytes;
  for (const auto& [block, references] : own_references) {
    const bool alone =
        block->refs.load() - block->indexed.load() == references;
    (block->mapped ? bytes.mapped
     : alone       ? bytes.own
                   : bytes.shared) += block->size_bytes;
  }
  return bytes;
}

size_t Conversation::nbytes() const { return CountBytes().own; }

size_t Conversation::shared_nbytes() const { return CountBytes().shared; }

size_t Conversation::mapped_nbytes() const { return CountBytes().mapped; }

Hash128 Conversation::fingerprint() const {
  MutexLock lock(state_mutex_);
  return state_.fingerprint;
}

Mismatch OtherFingerprint(std::string_view what, std::string_view found,
                          std::string_view expected) {
  return Mismatch(StrCat(
      what, " of other weights, or of these on another arithmetic (that of "
      "another version of gemmakv or kind of processor): their fingerprint is ",
      found, ", expected ", expected));
}

void Conversation::Bind(const Hash128& fingerprint) {
  MutexLock lock(state_mutex_);
  if (state_.fingerprint != Hash128{} && state_.fingerprint != fingerprint) {
    throw OtherFingerprint("the cache holds keys and values",
                           state_.fingerprint.Hex(), fingerprint.Hex());
  }
  state_.fingerprint = fingerprint;
}

std::unique_ptr<Conversation> Conversation::Fork() const {
  auto fork = std::make_unique<Conversation>(
      layout_,
      CacheOptions{.capacity_tokens = capacity_tokens_,
                   .checkpoint_bytes = checkpoint_bytes_,
                   .pool = pool_},
      model_type_);
  fork->Adopt(fork->Lock(), Export());
  return fork;
}

Mutex& Conversation::ToChange([[maybe_unused]] const RunLock& run_lock) const {
  assert(gate_.Owns(run_lock));
  return state_mutex_;
}

void Conversation::Adopt(const RunLock& run_lock, KvContent content) noexcept {
  const MutexLock lock(ToChange(run_lock));
  std::swap(state_, content);
}

void Conversation::Reset(const RunLock& run_lock) {
  Adopt(run_lock, KvContent(layout_, pool_));
}

// Returns the start that recomputes least; of equals, what is held comes first.
Conversation::StartPoint Conversation::FindStart(const KvContent& state,
                                                 size_t target) const {
  const std::optional<size_t> held = ResumeAt(state.groups, target);
  if (held == target) return {target, target};
  StartPoint best{ColdStart(state.groups, target), target, StartPoint::kCold};
  const Checkpoint* checkpoint = state.checkpoints.AtOrBefore(target);
  if (checkpoint != nullptr && checkpoint->position >= best.position) {
    best = {checkpoint->position, target, StartPoint::kCheckpoint, checkpoint};
  }
  if (held && *held >= best.position) best = {*held, target};
  return best;
}

Conversation::StartPoint Conversation::FindNextStart(const KvContent& state,
                                                     bool for_logits) const {
  const size_t length = state.log.size();
  if (state.computed < length) return FindStart(state, state.computed);
  if (!for_logits || length == 0) return {length, length};
  return FindStart(state, length - 1);
}

// Rewinds the groups to `length`. Requires: length < state.computed; the log
// and the checkpoints are cut.
void Conversation::Rewind(KvContent& state, size_t length,
                          const Checkpoint* made_here) const {
  StartPoint start = FindStart(state, length);
  state.computed = length;
  if (start.position < length && made_here != nullptr) {
    // Goes back to the checkpoint: what was pending then is pending again.
    state.computed = made_here->position;
    start = FindStart(state, state.computed);
  }
  for (size_t g = 0; g < state.groups.size(); ++g) {
    std::unique_ptr<GroupCache>& group = state.groups[g];
    if (!group->forgets()) {
      group->Rewind(state.computed);
    } else if (start.source == StartPoint::kCheckpoint) {
      group = (*start.checkpoint->groups)[g]->Share();
    } else {
      group->Rewind(start.source == StartPoint::kHeld ? start.position : 0);
    }
  }
}

Truncation Conversation::Truncate(const RunLock& run_lock, size_t length) {
  const MutexLock lock(ToChange(run_lock));
  KvContent& state = state_;
  if (length > state.log.size()) {
    throw InvalidArgument(Unexpected(
        "length", StrCat("at most the ", state.log.size(), " tokens held"),
        length));
  }
  const Checkpoint* made_here = state.checkpoints.OfLength(length);
  std::optional<Checkpoint> copy;
  if (made_here != nullptr) copy = *made_here;
  state.log.Truncate(length);
  state.checkpoints.Truncate(length);
  if (length < state.computed) {
    Rewind(state, length, copy ? &*copy : nullptr);
  }
  // The cost of going on with new tokens.
  return {state.computed - FindStart(state, state.computed).position};
}

bool Conversation::MakeCheckpoint(const RunLock& run_lock) {
  const MutexLock lock(ToChange(run_lock));
  KvContent& state = state_;
  if (state.computed == 0) return true;
  if (ResumeAt(state.groups, state.computed) != state.computed) return false;
  return state.checkpoints.Add(
      {state.computed, state.log.size(),
       std::make_shared<const GroupSet>(ShareGroups(state.groups, true))},
      checkpoint_bytes_);
}

std::optional<KvStepView> Conversation::View(const RunLock& run_lock) const {
  const MutexLock lock(ToChange(run_lock));
  const KvContent& state = state_;
  KvStepView view;
  view.begin = view.end = state.computed;
  const size_t block_tokens = layout_->block_tokens();
  for (size_t g = 0; g < state.groups.size(); ++g) {
    GroupStep& step = view.groups.emplace_back();
    if (layout_->groups()[g].kind == LayerKind::kRecurrent) continue;
    const auto [begin, end] = state.groups[g]->Held();
    if (end != state.computed) return std::nullopt;
    const std::vector<HeldBlock> held =
        state.groups[g]->Export(state.computed);
    step.readable_begin = begin;
    step.write_begin = end;
    if (held.empty()) continue;
    step.first_block = held.front().begin / block_tokens;
    step.blocks.reserve(held.size());
    for (const HeldBlock& block : held) {
      step.blocks.push_back(block.block.data());
    }
  }
  return view;
}

bool Conversation::AddCheckpoint(const RunLock& run_lock,
                                 Checkpoint checkpoint) {
  const MutexLock lock(ToChange(run_lock));
  assert(checkpoint.position <= state_.computed);
  return state_.checkpoints.Add(std::move(checkpoint), checkpoint_bytes_);
}

// A request that runs on the conversation may have planned on a checkpoint, and
// may run on this very thread. A caller that takes the run lock after the
// second look finds the state locked.
size_t Conversation::ReleaseCheckpoints(size_t bytes) {
  size_t freed = 0;
  std::vector<Checkpoint> given_up;  // destroyed after the unlock
  if (gate_.held()) return 0;
  if (!state_mutex_.TryLock()) return 0;
  const MutexLock lock(state_mutex_, std::adopt_lock);
  if (gate_.held()) return 0;
  given_up = state_.checkpoints.GiveUp(pool_.get(), bytes, freed);
  return freed;
}

std::vector<size_t> Conversation::CheckpointLengths() const {
  MutexLock lock(state_mutex_);
  std::vector<size_t> lengths;
  for (const Checkpoint& checkpoint : state_.checkpoints.list()) {
    lengths.push_back(checkpoint.length);
  }
  return lengths;
}

void Conversation::Append(const RunLock& run_lock,
                          std::span<const int32_t> tokens) {
  const MutexLock lock(ToChange(run_lock));
  const size_t length = state_.log.size();
  if (tokens.size() > capacity_tokens_ - std::min(capacity_tokens_, length)) {
    throw CacheFull(
        StrCat("the conversation holds ", length, " tokens and ", tokens.size(),
               " more are asked for, expected at "
               "most ",
               capacity_tokens_, " in total (its capacity_tokens)"));
  }
  state_.log.Append(tokens);
}

size_t Conversation::next_position() const {
  MutexLock lock(state_mutex_);
  return FindNextStart(state_, false).position;
}

size_t Conversation::next_position_for_logits() const {
  MutexLock lock(state_mutex_);
  return FindNextStart(state_, true).position;
}

void Conversation::CopyTokens(size_t begin, std::span<int32_t> out) const {
  MutexLock lock(state_mutex_);
  state_.log.Copy(begin, out);
}

KvStepView Conversation::Prepare(const RunLock& run_lock, size_t begin,
                                 size_t end, std::span<const size_t> keep,
                                 const KvContent* before) {
  const MutexLock lock(ToChange(run_lock));
  assert(begin < state_.log.size() && begin < end && end <= capacity_tokens_);
  KvStepView view;
  view.begin = begin;
  view.end = end;
  const StartPoint start = FindNextStart(state_, true);
  view.starts_replay =
      start.source != StartPoint::kHeld && begin == start.position;
  if (view.starts_replay) {
    if (start.source == StartPoint::kCheckpoint) {
      view.replacements = ShareGroups(*start.checkpoint->groups);
    } else {
      view.replacements = MakeGroups(layout_, pool_);
      for (auto& group : view.replacements) {
        group->Restart(begin, start.target);
      }
    }
  }
  view.groups.reserve(state_.groups.size());
  for (size_t g = 0; g < state_.groups.size(); ++g) {
    const GroupCache* group = state_.groups[g].get();
    if (view.starts_replay && group->forgets()) {
      group = view.replacements[g].get();
    }
    view.groups.push_back(group->Prepare(
        begin, end, keep, before ? before->groups[g].get() : nullptr));
  }
  return view;
}

std::vector<Checkpoint> Conversation::Commit(const RunLock& run_lock,
                                             KvStepView& step, size_t end,
                                             std::span<const size_t> at) {
  const MutexLock lock(ToChange(run_lock));
  KvContent& state = state_;
  assert(step.begin < end && end <= step.end && end <= state.log.size());
  size_t floor = end;
  try {
    for (size_t g = 0; g < state.groups.size(); ++g) {
      std::unique_ptr<GroupCache>& group = state.groups[g];
      if (step.starts_replay && group->forgets()) {
        group = std::move(step.replacements[g]);
      }
      group->Commit(step.groups[g], step.begin, end);
      floor = std::min(floor, group->RewindFloor());
    }
  } catch (...) {
    // Some groups have taken the step over: none may hold more than is
    // computed.
    for (const auto& group : state.groups) {
      group->Rewind(group->forgets() ? 0 : state.computed);
    }
    throw;
  }
  state.computed = std::max(state.computed, end);
  std::vector<Checkpoint> checkpoints;
  for (const size_t position : at) {
    auto groups = CheckpointGroups(state.groups, position);
    if (groups) checkpoints.push_back({position, position, std::move(groups)});
  }
  for (const auto& group : state.groups) group->Forget(floor);
  return checkpoints;
}

}  // namespace gkv
