// Invariants of a State, held between all public calls:
//   computed <= log.size()
//   full group: blocks cover exactly [0, computed)
//   sliding group, one of
//     held       sliding_end == computed, blocks cover [sliding_begin,
//     computed) lost       no blocks, sliding_begin == sliding_end == 0 <
//     computed replaying  replay_begin <= sliding_end < replay_target <=
//     computed
//   (and for a moment, when the last token is computed again behind a replay,
//   held with sliding_end == computed - 1)
// Only Commit, Append, Truncate, Reset and Swap change a State.

#include "cache/kv_cache.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "cache/snapshot.h"
#include "ops/kv_strip.h"

namespace gkv {
namespace {

constexpr size_t kFull = static_cast<size_t>(GroupId::kFull);
constexpr size_t kSliding = static_cast<size_t>(GroupId::kSliding);

size_t BlocksFor(size_t tokens, size_t block_tokens) {
  return (tokens + block_tokens - 1) / block_tokens;
}

}  // namespace

KVCache::KVCache(std::shared_ptr<const KvLayout> layout, CacheOptions options,
                 std::string model_type)
    : layout_(std::move(layout)),
      pool_(options.pool ? std::move(options.pool) : BlockPool::Default()),
      model_type_(std::move(model_type)),
      capacity_tokens_(options.capacity_tokens),
      state_(layout_->block_tokens()) {
  if (capacity_tokens_ == 0) {
    throw InvalidArgument("capacity_tokens is 0, expected at least 1");
  }
}

KVCache::~KVCache() = default;

size_t KVCache::length() const {
  std::unique_lock lock(state_mutex_);
  return state_.log.size();
}

std::vector<int32_t> KVCache::tokens() const {
  std::unique_lock lock(state_mutex_);
  std::vector<int32_t> tokens(state_.log.size());
  state_.log.Copy(0, tokens);
  return tokens;
}

size_t KVCache::nbytes() const {
  std::unique_lock lock(state_mutex_);
  size_t bytes = 0;
  for (const Group& group : state_.groups) {
    for (const BlockRef& block : group.blocks) {
      if (!block.shared()) bytes += block.size_bytes();
    }
  }
  return bytes;
}

size_t KVCache::shared_nbytes() const {
  std::unique_lock lock(state_mutex_);
  size_t bytes = 0;
  for (const Group& group : state_.groups) {
    for (const BlockRef& block : group.blocks) {
      if (block.shared()) bytes += block.size_bytes();
    }
  }
  return bytes;
}

Hash128 KVCache::fingerprint() const {
  std::unique_lock lock(state_mutex_);
  return state_.fingerprint;
}

void KVCache::Bind(const Hash128& fingerprint) {
  std::unique_lock lock(state_mutex_);
  if (state_.fingerprint != Hash128{} && state_.fingerprint != fingerprint) {
    throw Mismatch(StrCat("the cache holds keys and values of weights ",
                          state_.fingerprint.Hex(), ", expected ",
                          fingerprint.Hex()));
  }
  state_.fingerprint = fingerprint;
}

KVCache::State KVCache::CopyState() const {
  std::unique_lock lock(state_mutex_);
  return state_;
}

std::unique_ptr<KVCache> KVCache::Fork() const {
  auto fork = std::make_unique<KVCache>(
      layout_, CacheOptions{.capacity_tokens = capacity_tokens_, .pool = pool_},
      model_type_);
  fork->state_ = CopyState();
  return fork;
}

void KVCache::Swap(KVCache& other) noexcept {
  std::scoped_lock lock(state_mutex_, other.state_mutex_);
  std::swap(state_, other.state_);
}

void KVCache::Reset() {
  State empty(layout_->block_tokens());
  std::unique_lock lock(state_mutex_);
  std::swap(state_, empty);
}

// First position that a row sees in sliding layers.
size_t KVCache::WindowBegin(size_t position) const {
  return position + 1 > layout_->window() ? position + 1 - layout_->window()
                                          : 0;
}

void KVCache::DropSliding(State& state) const {
  state.groups[kSliding] = {};
  state.sliding_begin = state.sliding_end = 0;
  state.replay_begin = state.replay_target = 0;
}

Truncation KVCache::Truncate(size_t length) {
  std::unique_lock lock(state_mutex_);
  State& state = state_;
  if (length > state.log.size()) {
    throw InvalidArgument(StrCat("cannot truncate to ", length,
                                 " tokens, expected at most the ",
                                 state.log.size(), " held"));
  }
  state.log.Truncate(length);
  const size_t block_tokens = layout_->block_tokens();
  if (length < state.computed) {
    state.computed = length;
    if (layout_->has_group(GroupId::kFull)) {
      state.groups[kFull].blocks.resize(BlocksFor(length, block_tokens));
    }
    // What is right in the middle of a replay depends on its target, which
    // has moved: it starts anew.
    if (state.replay_target != 0) DropSliding(state);
    if (state.sliding_end > length) {
      if (length == 0 || state.sliding_begin >= length) {
        DropSliding(state);
      } else {
        Group& group = state.groups[kSliding];
        state.sliding_end = length;
        group.blocks.resize(BlocksFor(length, block_tokens) -
                            group.first_block);
      }
    }
  }
  Truncation truncation;
  if (state.computed == 0) return truncation;
  // The cost of going on with new tokens: the next row is at `computed`.
  const bool held =
      !layout_->has_group(GroupId::kSliding) ||
      (state.replay_target == 0 && state.sliding_end == state.computed &&
       state.sliding_begin <= WindowBegin(state.computed));
  if (!held && state.replay_target != 0) {
    truncation.replay_tokens = state.computed - state.sliding_end;
  } else if (!held) {
    truncation.replay_tokens = std::min(
        state.computed, layout_->num_sliding() * (layout_->window() - 1));
  }
  return truncation;
}

void KVCache::Append(std::span<const int32_t> tokens) {
  std::unique_lock lock(state_mutex_);
  const size_t length = state_.log.size();
  if (tokens.size() > capacity_tokens_ - std::min(capacity_tokens_, length)) {
    throw OutOfBlocks(
        StrCat("the conversation holds ", length, " tokens and ", tokens.size(),
               " more are asked for, expected at "
               "most ",
               capacity_tokens_, " in total (its capacity_tokens)"));
  }
  state_.log.Append(tokens);
}

KVCache::StartPoint KVCache::Start(const State& state, bool for_logits) const {
  const size_t length = state.log.size();
  const size_t computed = state.computed;
  size_t target = computed;
  if (computed == length) target = for_logits ? length - 1 : length;
  if (target == length) return {length, length, false};
  if (!layout_->has_group(GroupId::kSliding)) return {target, target, false};
  if (state.replay_target != 0 && state.replay_target <= target) {
    return {state.sliding_end, state.replay_target, false};
  }
  const bool held = state.replay_target == 0 && state.sliding_end >= target &&
                    state.sliding_begin <= WindowBegin(target);
  if (target == 0 || held) return {target, target, false};
  const size_t warm_up = layout_->num_sliding() * (layout_->window() - 1);
  return {target > warm_up ? target - warm_up : 0, target, true};
}

size_t KVCache::next_position() const {
  std::unique_lock lock(state_mutex_);
  return Start(state_, false).position;
}

size_t KVCache::next_position_for_logits() const {
  std::unique_lock lock(state_mutex_);
  return Start(state_, true).position;
}

void KVCache::CopyTokens(size_t begin, std::span<int32_t> out) const {
  std::unique_lock lock(state_mutex_);
  state_.log.Copy(begin, out);
}

// A private copy of the first `tokens` positions of a block. Later positions
// may be under way in another conversation's step: they are not touched.
BlockRef KVCache::CopyBlock(GroupId id, const BlockRef& from,
                            size_t tokens) const {
  BlockRef copy = pool_->Acquire(layout_->block_bytes(id));
  const size_t block_tokens = layout_->block_tokens();
  for (size_t layer = 0; layer < layout_->layers().size(); ++layer) {
    if (layout_->group(layer) != id) continue;
    const KvLayerSpec& spec = layout_->layers()[layer];
    for (size_t head = 0; head < spec.kv_heads; ++head) {
      const size_t keys = layout_->key_offset(layer, head);
      const size_t values = layout_->value_offset(layer, head);
      CopyKeys(layout_->dtype(), from.data() + keys, block_tokens,
               spec.head_dim, tokens, copy.data() + keys, block_tokens);
      CopyValues(layout_->dtype(), from.data() + values, block_tokens,
                 spec.head_dim, tokens, copy.data() + values, block_tokens);
    }
  }
  return copy;
}

// Table of a group for a step over [begin, end), of which positions below
// held_end are stored already. Requires: the state lock is held.
KvStepView::Group KVCache::PrepareGroup(GroupId id, size_t begin, size_t end,
                                        size_t held_end) const {
  const Group& group = state_.groups[static_cast<size_t>(id)];
  const size_t block_tokens = layout_->block_tokens();
  KvStepView::Group view;
  view.write_begin = held_end;
  view.first_block =
      group.blocks.empty() ? begin / block_tokens : group.first_block;
  for (const BlockRef& block : group.blocks)
    view.blocks.push_back(block.data());
  const size_t last = (end - 1) / block_tokens;
  const size_t write_begin = std::max(begin, held_end);
  for (size_t block = write_begin / block_tokens;
       write_begin < end && block <= last; ++block) {
    const size_t index = block - view.first_block;
    if (index < group.blocks.size()) {
      if (!group.blocks[index].shared()) continue;
      const size_t held =
          held_end > block * block_tokens ? held_end - block * block_tokens : 0;
      view.fresh.emplace_back(index, CopyBlock(id, group.blocks[index], held));
      view.blocks[index] = view.fresh.back().second.data();
    } else {
      view.fresh.emplace_back(index, pool_->Acquire(layout_->block_bytes(id)));
      view.blocks.push_back(view.fresh.back().second.data());
    }
  }
  return view;
}

KvStepView KVCache::Prepare(size_t begin, size_t end) {
  std::unique_lock lock(state_mutex_);
  KvStepView view;
  view.begin = begin;
  view.end = end;
  if (layout_->has_group(GroupId::kFull)) {
    view.groups[kFull] =
        PrepareGroup(GroupId::kFull, begin, end, state_.computed);
  }
  if (layout_->has_group(GroupId::kSliding)) {
    const StartPoint start = Start(state_, true);
    view.starts_replay = start.replay && begin == start.position;
    if (view.starts_replay) {
      // Whatever the group still holds is of no use for this window.
      const Group old = std::exchange(state_.groups[kSliding], {});
      try {
        view.groups[kSliding] =
            PrepareGroup(GroupId::kSliding, begin, end, begin);
      } catch (...) {
        state_.groups[kSliding] = old;
        throw;
      }
      state_.groups[kSliding] = old;
      view.groups[kSliding].readable_begin = begin;
    } else {
      view.groups[kSliding] =
          PrepareGroup(GroupId::kSliding, begin, end, state_.sliding_end);
      view.groups[kSliding].readable_begin = state_.sliding_begin;
    }
  }
  return view;
}

void KVCache::Commit(KvStepView& step) {
  std::unique_lock lock(state_mutex_);
  State& state = state_;
  const size_t old_computed = state.computed;
  if (step.starts_replay) {
    const size_t target = Start(state, true).target;
    DropSliding(state);
    state.replay_begin = state.sliding_begin = step.begin;
    state.sliding_end = step.begin;
    state.replay_target = target;
    state.groups[kSliding].first_block = step.groups[kSliding].first_block;
  }
  for (size_t g = 0; g < kNumGroups; ++g) {
    Group& group = state.groups[g];
    if (group.blocks.empty()) group.first_block = step.groups[g].first_block;
    for (auto& [index, block] : step.groups[g].fresh) {
      if (index < group.blocks.size()) {
        group.blocks[index] = std::move(block);
      } else {
        group.blocks.push_back(std::move(block));
      }
    }
    step.groups[g].fresh.clear();
  }
  state.computed = std::max(old_computed, step.end);
  if (!layout_->has_group(GroupId::kSliding)) return;
  state.sliding_end = std::max(state.sliding_end, step.end);
  if (state.replay_target != 0 && state.sliding_end >= state.replay_target) {
    // Deeper layers are right only from the target's window on, unless the
    // replay began with the conversation.
    if (state.replay_begin > 0) {
      state.sliding_begin =
          std::max(state.sliding_begin, WindowBegin(state.replay_target));
    }
    state.replay_begin = state.replay_target = 0;
  }
  // One position more than the next row needs is kept, so that the last token
  // can be computed again for its logits.
  Group& group = state.groups[kSliding];
  const size_t block_tokens = layout_->block_tokens();
  const size_t keep = state.sliding_end > layout_->window()
                          ? state.sliding_end - layout_->window()
                          : 0;
  size_t drop = 0;
  while ((group.first_block + drop + 1) * block_tokens <= keep) ++drop;
  group.blocks.erase(group.blocks.begin(),
                     group.blocks.begin() + static_cast<ptrdiff_t>(drop));
  group.first_block += drop;
  state.sliding_begin =
      std::max(state.sliding_begin, group.first_block * block_tokens);
}

std::pair<size_t, size_t> KVCache::HeldRange(size_t layer) const {
  std::unique_lock lock(state_mutex_);
  if (layout_->group(layer) == GroupId::kFull) return {0, state_.computed};
  if (state_.replay_target != 0) return {0, 0};
  return {state_.sliding_begin, state_.sliding_end};
}

size_t KVCache::LayerBytes(size_t layer) const {
  std::unique_lock lock(state_mutex_);
  const Group& group =
      state_.groups[static_cast<size_t>(layout_->group(layer))];
  return group.blocks.size() * 2 * layout_->layers()[layer].kv_heads *
         layout_->strip_bytes(layer);
}

std::vector<float> KVCache::CopyLayer(size_t layer, bool values) const {
  const std::unique_ptr<KVCache> copy = Fork();
  const auto [begin, end] = copy->HeldRange(layer);
  const KvLayerSpec& spec = layout_->layers()[layer];
  const Group& group =
      copy->state_.groups[static_cast<size_t>(layout_->group(layer))];
  const size_t block_tokens = layout_->block_tokens();
  std::vector<float> out((end - begin) * spec.kv_heads * spec.head_dim);
  float* to = out.data();
  for (size_t position = begin; position < end; ++position) {
    const uint8_t* block =
        group.blocks[position / block_tokens - group.first_block].data();
    for (size_t head = 0; head < spec.kv_heads; ++head) {
      const size_t index = position % block_tokens;
      if (values) {
        LoadValue(layout_->dtype(), block + layout_->value_offset(layer, head),
                  spec.head_dim, index, block_tokens, to);
      } else {
        LoadKey(layout_->dtype(), block + layout_->key_offset(layer, head),
                spec.head_dim, index, block_tokens, to);
      }
      to += spec.head_dim;
    }
  }
  return out;
}

std::vector<uint8_t> KVCache::ToBytes() const {
  return SnapshotEncoder::Encode(*Fork());
}

std::unique_ptr<KVCache> KVCache::FromBytes(std::span<const uint8_t> bytes,
                                            CacheOptions options) {
  return SnapshotDecoder::Decode(bytes, options);
}

}  // namespace gkv
