#ifndef GEMMAKV_CACHE_CONVERSATION_H_
#define GEMMAKV_CACHE_CONVERSATION_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/hash.h"
#include "base/mutex.h"
#include "cache/block_pool.h"
#include "cache/group_cache.h"
#include "cache/kv_content.h"
#include "cache/kv_layout.h"
#include "cache/run_lock.h"
#include "cache/token_log.h"
#include "gemmakv/options.h"
#include "gemmakv/results.h"
#include "io/byte_io.h"

namespace gkv {

// What one step may read and write of one conversation: raw pointers into its
// blocks, valid until the step is committed or dropped.
struct KvStepView {
  std::vector<GroupStep> groups;  // parallel to KvLayout::groups()
  size_t begin = 0;               // first position of the step
  size_t end = 0;
  // The step begins a replay: `replacements` go on from a checkpoint or from
  // nothing, and replace the cache's groups when the step is committed.
  bool starts_replay = false;
  GroupSet replacements;
};

// A block of positions that no one writes any more, and its identity: the
// page's `hash` is over (parent, tokens), where `parent` is the hash of the
// page before.
struct SealedBlock {
  size_t begin = 0;  // position of its first token
  std::shared_ptr<const TokenPage> page;
  // By group: the valid part of a block of keys and values; the recurrent state
  // after the last position. Null if it is not held.
  std::vector<HeldBlock> held;
};

// Returns the error for keys and values of another fingerprint; `what` begins
// the message.
Mismatch OtherFingerprint(std::string_view what, std::string_view found,
                          std::string_view expected);

// One conversation: its transcript, and the keys and values of the transcript's
// positions. Weights, sampling and text are elsewhere.
//
//   transcript   token ids [0, length())
//   computed     positions [0, c) have been through the model; the rest, which
//                always includes the last sampled token, is pending
//   held         full layers hold keys and values of [0, c), sliding layers
//                those of the last window, recurrent layers the last state
//
// Append extends the transcript. Prepare finds blocks for a step over some
// positions, and Commit makes what the step computed part of the cache:
// positions move from pending to computed, and blocks that no later row of
// sliding layers can see are released. Truncate cuts the transcript and
// everything after its end. MakeCheckpoint and AddCheckpoint keep what sliding
// and recurrent layers hold at one position. Fork, Export and Adopt copy the
// whole content as references to blocks.
//
// The token ids are never lost, so anything else can be recomputed. Where
// Truncate() cuts off what sliding and recurrent layers hold, they go on from a
// checkpoint, or next_position() moves back and the engine replays: it computes
// positions again, and full layers are then only read. All groups of layers
// move together. docs/cache.md derives how many positions a replay goes back.
//
// Blocks are shared between forks; a shared block is never written, but copied
// first. Every function is safe from any thread: each holds state_mutex_, which
// guards the content, for a short time. Only the holder of the run lock changes
// a conversation, except that a full pool takes checkpoints of one that nobody
// holds (ReleaseCheckpoints). The engine holds the run lock for a whole
// request, so that nothing that a running step points into goes away. Forks,
// lengths and snapshots during a request see the last committed step.
class Conversation {
 public:
  // Throws InvalidArgument for a capacity of 0.
  Conversation(std::shared_ptr<const KvLayout> layout, CacheOptions options,
               std::string model_type);
  ~Conversation();
  Conversation(const Conversation&) = delete;
  Conversation& operator=(const Conversation&) = delete;

  const KvLayout& layout() const { return *layout_; }
  std::shared_ptr<const KvLayout> layout_ptr() const { return layout_; }
  // The name of the model that the cache was made for; empty for custom models.
  const std::string& model_type() const { return model_type_; }
  size_t capacity_tokens() const { return capacity_tokens_; }
  const BlockPool& pool() const { return *pool_; }
  const std::shared_ptr<BlockPool>& pool_ptr() const { return pool_; }
  size_t checkpoint_bytes() const { return checkpoint_bytes_; }
  // Whether a request gives back the blocks that it filled when it ends: for
  // conversations that nobody continues. The transcript stays and can be
  // computed again. A fork has a setting of its own.
  bool for_one_request() const { return for_one_request_; }
  void set_for_one_request(bool value) { for_one_request_ = value; }

  size_t length() const;
  // The number of positions that have been through the model.
  size_t computed() const;
  std::vector<int32_t> tokens() const;
  // The bytes of blocks that only this conversation, its checkpoints and prefix
  // indexes refer to, and of blocks that others refer to as well.
  size_t nbytes() const;
  size_t shared_nbytes() const;
  // The bytes of mapped files that it refers to. The two above count heap
  // blocks only.
  size_t mapped_nbytes() const;

  // The identity of the weights whose keys and values these are; all zero until
  // the first step. Bind throws Mismatch if another identity is bound already.
  Hash128 fingerprint() const;
  void Bind(const Hash128& fingerprint);

  // Returns an independent conversation with the same content and checkpoints.
  // O(blocks) reference copies; no key or value is copied. Allowed during a
  // request.
  std::unique_ptr<Conversation> Fork() const;
  // Export returns the content as a value that shares the blocks. Adopt
  // replaces the whole content by such a value: a fork adopts what its origin
  // exported. Adopt requires: content of an equal layout with blocks of equal
  // size, made for this cache's pool, whose keys and values are those of its
  // tokens.
  KvContent Export() const;
  void Adopt(const RunLock& lock, KvContent content) noexcept;
  // Keeps the first `length` tokens, and the checkpoints up to there. Always
  // exact; returns what the next use costs: the cheapest way of going on from
  // what is held, from the last checkpoint, from a warm-up (without recurrent
  // layers) and from 0. If a checkpoint was made when the transcript had this
  // length, everything is as it was then, at no cost. Throws InvalidArgument if
  // length > length(). Without a lock, takes one.
  Truncation Truncate(const RunLock& lock, size_t length);
  Truncation Truncate(size_t length) { return Truncate(Lock(), length); }
  // Makes a checkpoint, so that truncating to the present length() will cost
  // nothing. Returns whether it will: not if the checkpoint does not fit the
  // budget, or if there is nothing to keep because a replay is due first.
  // Copies nothing: refers to blocks that would be released later.
  bool MakeCheckpoint(const RunLock& lock);
  bool MakeCheckpoint() { return MakeCheckpoint(Lock()); }
  // Gives up checkpoints, those first whose loss costs least, until at least
  // `bytes` of the pool's blocks are freed, if there are so many. Returns the
  // bytes that are freed; 0 if something runs on the conversation or changes it
  // now: never waits. The loss costs time for replays. The pool calls this
  // before it fails.
  size_t ReleaseCheckpoints(size_t bytes);
  // The lengths of the transcript at which a checkpoint was made, ascending.
  std::vector<size_t> CheckpointLengths() const;
  // Truncate(0), and unbinds the fingerprint.
  void Reset(const RunLock& lock);
  void Reset() { Reset(Lock()); }

  // The right to change this conversation; see RunGate.
  RunLock Lock(const std::function<void()>& poll = {}) {
    return gate_.Lock(poll);
  }
  RunLock TryLock() noexcept { return gate_.TryLock(); }
  RunLock TryLock(LockWait& wait, const RunGate::Callback& on_free) {
    return gate_.TryLock(wait, on_free);
  }
  RunLock TryLockAfter(uint64_t serial) noexcept {
    return gate_.TryLockAfter(serial);
  }

  // ---- Engine interface. Requires of each lock: it is of this cache. ----

  // Extends the transcript; the new positions are pending. Throws CacheFull,
  // changing nothing, if the capacity does not allow it.
  void Append(const RunLock& lock, std::span<const int32_t> tokens);

  // Returns the first position that the next step must compute; length() if
  // nothing is pending. Const: planning never changes a cache.
  size_t next_position() const;
  // As next_position(), but never length(): at least the last token is
  // computed, so that logits exist. Requires: length() > 0.
  size_t next_position_for_logits() const;

  // Copies token ids [begin, begin + out.size()) of the transcript.
  void CopyTokens(size_t begin, std::span<int32_t> out) const;

  // Makes positions [begin, end) computable: allocates blocks, copies shared
  // blocks that will be written, starts a replay if begin lies before what
  // sliding layers hold. Positions from length() on belong to tokens that only
  // the step knows, as guesses. At the positions `keep` recurrent layers keep
  // copies of their states, so that the step can be committed up to there and
  // checkpoints can be taken there. `before` is an export that the caller may
  // go back to and does not use otherwise: a block that only `before` refers to
  // as well is not treated as shared if the step continues in it. Requires:
  // begin is next_position() or next_position_for_logits(), or the end of the
  // step before; begin < length(); begin < end <= capacity_tokens(); `keep`
  // ascending, within (begin, end). Throws CacheFull, changing nothing
  // observable.
  KvStepView Prepare(const RunLock& lock, size_t begin, size_t end,
                     std::span<const size_t> keep = {},
                     const KvContent* before = nullptr);
  // Commits a step up to `end`: its keys and values of [step.begin, end) are
  // complete and held from now on, the rest is dropped. Then releases sliding
  // blocks that no row from `end` on can see. A step that is not committed
  // leaves no trace. Takes over the step's references. Requires: begin < end <=
  // step.end; end <= length(), and the tokens there are those of the step; with
  // recurrent layers, `end` is step.end or one of Prepare's `keep`.
  //
  // Returns checkpoints, without copies, at the positions `at` within (begin,
  // end], taken before anything is released: a point inside a long step is kept
  // without cutting the step. Leaves out points that computing cannot go on
  // from (in a warm-up, or a recurrent state that was not kept). Throws
  // std::bad_alloc: nothing is committed then, and a replay may be due.
  std::vector<Checkpoint> Commit(const RunLock& lock, KvStepView& step,
                                 size_t end,
                                 std::span<const size_t> at = {});
  void Commit(const RunLock& lock, KvStepView& step) {
    Commit(lock, step, step.end);
  }
  // Returns what is held, for reading: positions up to `end`, which is
  // computed(). Only attention layers have blocks there. Returns nullopt if a
  // replay is due first. Valid until the conversation is changed.
  std::optional<KvStepView> View(const RunLock& lock) const;
  // Adds a checkpoint that Commit returned to those of the conversation.
  // Returns false if the budget does not allow it. Requires: the transcript was
  // not cut before its position since.
  bool AddCheckpoint(const RunLock& lock, Checkpoint checkpoint);

  // ---- Snapshots ----

  // Write the conversation as bytes, piece by piece or at once; the format is
  // in docs/internals/snapshot-format.md. They save what Export returns, so a
  // running request is not held up. SnapshotWriter tells the size in advance.
  void Save(const ByteSink& sink, bool checkpoints = false) const;
  std::vector<uint8_t> ToBytes(bool checkpoints = false) const;
  // Restores a snapshot. Throws CorruptFile if the bytes are not a whole, sound
  // snapshot, Mismatch if they are of a later format version, CacheFull if the
  // pool is full. Never reads outside `bytes`, whatever they are. Of the
  // options, block_tokens and pool apply, capacity_tokens and checkpoint_bytes
  // if they are set; everything else is as it was saved.
  static std::unique_ptr<Conversation> FromBytes(std::span<const uint8_t> bytes,
                                                 CacheOptions options = {});

  // ---- Inspection ----

  // Returns positions [begin, end) whose keys and values a layer holds; empty
  // for a recurrent layer, which holds the state of position `end`.
  std::pair<size_t, size_t> HeldRange(size_t layer) const;
  // Returns the bytes of a layer's part of the blocks, shared ones included; 0
  // if it reads another layer's keys and values. The sum over all layers is
  // nbytes() + shared_nbytes(), without blocks that only checkpoints hold and
  // the padding between recurrent states.
  size_t LayerBytes(size_t layer) const;
  // Returns a dequantized copy of the held range, [tokens, kv_heads, head_dim].
  // Requires: an attention layer.
  std::vector<float> CopyLayer(size_t layer, bool values) const;
  // Returns a copy of a recurrent layer's state, [1 + conv_tail, lru_width].
  std::vector<float> CopyLayerState(size_t layer) const;
  // Returns the full blocks of the computed part that begin at position `from`
  // or later, in order, for a prefix index or a lower tier. The references keep
  // the blocks as they are.
  std::vector<SealedBlock> SealedBlocks(size_t from = 0) const;

 private:
  // Where the next step begins, and on what it goes on.
  struct StartPoint {
    enum Source { kHeld, kCheckpoint, kCold };
    size_t position;
    size_t target;  // first row that must be right
    Source source = kHeld;
    const Checkpoint* checkpoint = nullptr;
  };
  class IdleCheckpoints;

  // Returns the state's mutex to the holder of the run lock.
  Mutex& ToChange(const RunLock& run_lock) const
      GKV_ANALYSIS(lock_returned(state_mutex_));
  StartPoint FindStart(const KvContent& state, size_t target) const;
  StartPoint FindNextStart(const KvContent& state, bool for_logits) const;
  void Rewind(KvContent& state, size_t length,
              const Checkpoint* made_here) const;
  struct Bytes {
    size_t own = 0, shared = 0, mapped = 0;
  };
  Bytes CountBytes() const;

  std::shared_ptr<const KvLayout> layout_;
  std::shared_ptr<BlockPool> pool_;
  std::string model_type_;
  size_t capacity_tokens_;
  size_t checkpoint_bytes_;
  std::atomic<bool> for_one_request_ = false;
  const std::shared_ptr<IdleCheckpoints> idle_checkpoints_;
  RunGate gate_;
  mutable Mutex state_mutex_;
  KvContent state_ GUARDED_BY(state_mutex_);
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_CONVERSATION_H_
