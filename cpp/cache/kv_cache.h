#ifndef GEMMAKV_CACHE_KV_CACHE_H_
#define GEMMAKV_CACHE_KV_CACHE_H_

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
// blocks, valid until the step is committed or abandoned.
struct KvStepView {
  std::vector<GroupStep> groups;  // parallel to KvLayout::groups()
  size_t begin = 0;               // first position of the step
  size_t end = 0;
  // The step begins a replay: groups that go on from a checkpoint or from
  // nothing, to take the place of the cache's own when it is committed.
  bool starts_replay = false;
  GroupSet replacements;
};

// The blocks of positions that no one will write any more, with what identifies
// them: `hash` of the page is over (parent, tokens), `parent` that of the block
// before.
struct SealedBlock {
  size_t begin = 0;  // position of its first token
  std::shared_ptr<const TokenPage> page;
  // By group: what counts of a block of keys and values; the recurrent state
  // behind the last position. Null where that is not held.
  std::vector<HeldBlock> held;
};

// What to throw where keys and values are of another fingerprint; `what` begins
// the message.
Mismatch OtherFingerprint(std::string_view what, std::string_view found,
                          std::string_view expected);

// One conversation: its transcript, the keys and values of the transcript's
// positions, and nothing else. Weights, sampling and text live elsewhere.
//
//   transcript   token ids [0, length())
//   computed     positions [0, c) have been through the model; the rest, which
//                always includes the last sampled token, is pending
//   held         full layers hold keys and values of [0, c), sliding layers
//                those of the last window, recurrent layers the last state
//
// The token ids are never lost, so anything else can be recomputed: where
// Truncate() cuts off what sliding and recurrent layers hold, they go on from
// a checkpoint, or next_position() moves back and the engine replays. All
// groups of layers move together. Full-layer keys and values are then only
// read. The number of positions to go back is derived in docs/cache.md.
//
// Blocks are shared between forks; a block that is shared is never written, it
// is copied first. Every method is safe from any thread: each holds the state
// lock for a short time. Whoever changes a conversation holds its run lock, the
// engine for a whole request: nothing that a running step points into can go
// away. Forks, lengths and snapshots during a request see the last committed
// step.
class KVCache {
 public:
  // Throws InvalidArgument for a capacity of 0.
  KVCache(std::shared_ptr<const KvLayout> layout, CacheOptions options,
          std::string model_type);
  ~KVCache();
  KVCache(const KVCache&) = delete;
  KVCache& operator=(const KVCache&) = delete;

  const KvLayout& layout() const { return *layout_; }
  std::shared_ptr<const KvLayout> layout_ptr() const { return layout_; }
  // Name of the model that the cache was made for; empty for custom models.
  const std::string& model_type() const { return model_type_; }
  size_t capacity_tokens() const { return capacity_tokens_; }
  const BlockPool& pool() const { return *pool_; }
  const std::shared_ptr<BlockPool>& pool_ptr() const { return pool_; }
  size_t checkpoint_bytes() const { return checkpoint_bytes_; }
  // Whether a request gives back the blocks that it filled when it ends: for
  // conversations that nobody goes on with. The transcript stays, to be
  // computed again. Forks have their own.
  bool for_one_request() const { return for_one_request_; }
  void set_for_one_request(bool value) { for_one_request_ = value; }

  size_t length() const;
  // Positions that have been through the model.
  size_t computed() const;
  std::vector<int32_t> tokens() const;
  // Bytes of blocks that only this conversation, its checkpoints and prefix
  // indexes refer to, and of those that others refer to as well.
  size_t nbytes() const;
  size_t shared_nbytes() const;
  // Bytes of mapped files that it refers to; not among the others, which count
  // the heap's.
  size_t mapped_nbytes() const;

  // Identity of the weights whose keys and values these are; all zero until
  // the first step. Bind throws Mismatch if another identity is bound already.
  Hash128 fingerprint() const;
  void Bind(const Hash128& fingerprint);

  // An independent conversation with the same content. O(blocks) reference
  // copies; no key or value is copied. Carries the checkpoints. Allowed during
  // a request.
  std::unique_ptr<KVCache> Fork() const;
  // The content as a value that shares the blocks, and the other way round:
  // whatever was held before is given up. A fork adopts what its origin
  // exported. Requires: content of an equal layout with blocks of equal size,
  // made for this cache's pool; that it is what the tokens give.
  KvContent Export() const;
  void Adopt(const RunLock& lock, KvContent content) noexcept;
  // Keeps the first `length` tokens, and the checkpoints among them. Always
  // exact; says what it costs at the next use: the cheapest of going on from
  // what is held, from the last checkpoint, from a warm-up (no recurrent
  // layers) and from 0. Where a checkpoint was made with the transcript at
  // `length`, everything is again as it was then, at no cost. Throws
  // InvalidArgument if length > length(). Without a lock, takes one.
  Truncation Truncate(const RunLock& lock, size_t length);
  Truncation Truncate(size_t length) { return Truncate(Lock(), length); }
  // Marks the present, so that truncating to length() will cost nothing. True
  // if it will; false if the checkpoint does not fit the budget, or there is
  // nothing to keep because a replay is due first. Costs no copy: holds on to
  // blocks that would be released later.
  bool MakeCheckpoint(const RunLock& lock);
  bool MakeCheckpoint() { return MakeCheckpoint(Lock()); }
  // Gives up checkpoints, those first whose loss costs least, for at least
  // `bytes` of the pool's blocks to be free where they are so many; the bytes
  // that are free by it. 0 if something runs on the conversation or changes it
  // now: never waits. What is lost is time, for replays. The pool asks for it
  // before it fails.
  size_t ReleaseCheckpoints(size_t bytes);
  // Transcript lengths at which a checkpoint was made, ascending.
  std::vector<size_t> CheckpointLengths() const;
  // Truncate(0), and unbinds.
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

  // First position that the next step must compute. length() if nothing is
  // pending. Const: planning never changes a cache.
  size_t next_position() const;
  // Like next_position(), but never length(): at least the last token is
  // computed, so that logits exist. Requires: length() > 0.
  size_t next_position_for_logits() const;

  // Copies token ids [begin, begin + out.size()) of the transcript.
  void CopyTokens(size_t begin, std::span<int32_t> out) const;

  // Makes positions [begin, end) computable: allocates blocks, copies shared
  // ones that will be written, starts a replay if begin lies before what
  // sliding layers hold. Positions from length() on are of tokens that only the
  // step knows, as drafts. Recurrent layers copy their states where the step
  // comes to the positions `keep`: it can be committed up to there, and
  // checkpoints be taken. `before`: what was exported to go back to and is not
  // used otherwise; it alone does not make a block that the step goes on in a
  // shared one. Requires: begin is next_position() or
  // next_position_for_logits(), or continues the step before it;
  // begin < length(); begin < end <= capacity_tokens(); `keep` ascending,
  // within (begin, end). Throws CacheFull, changing nothing observable.
  KvStepView Prepare(const RunLock& lock, size_t begin, size_t end,
                     std::span<const size_t> keep = {},
                     const KvContent* before = nullptr);
  // The step's keys and values of [step.begin, end) are complete: they are held
  // from now on, the rest is dropped. Then releases sliding blocks that no row
  // from `end` on can see. An uncommitted step leaves no trace. Takes the
  // step's references over. Requires: begin < end <= step.end; end <= length(),
  // the tokens there being those of the step; with recurrent layers, `end` is
  // step.end or was to be kept.
  //
  // Returns checkpoints, of no copies, at the positions `at` within (begin,
  // end], taken before anything is released: a point inside a long step is
  // kept without cutting the step. Those that computing cannot go on from are
  // left out (in a warm-up, or a recurrent state that was not kept). Throws
  // std::bad_alloc: nothing is committed then, and a replay may be due.
  std::vector<Checkpoint> Commit(const RunLock& lock, KvStepView& step,
                                 size_t end,
                                 std::span<const size_t> at = {});
  void Commit(const RunLock& lock, KvStepView& step) {
    Commit(lock, step, step.end);
  }
  // What is held, for reading: positions up to `end`, which is computed(). Only
  // attention layers have blocks there. Nullopt where a replay is due first.
  // Valid until the conversation is changed.
  std::optional<KvStepView> View(const RunLock& lock) const;
  // Adds a checkpoint that Commit returned to those of the conversation. False
  // if the budget does not allow it. Requires: the transcript was not cut
  // before its position since.
  bool AddCheckpoint(const RunLock& lock, Checkpoint checkpoint);

  // ---- Snapshots ----

  // The conversation as bytes, piece by piece or at once; format in
  // docs/snapshot-format.md. Saves what Export gives, so a running request is
  // not held up. SnapshotWriter tells the size before.
  void Save(const ByteSink& sink, bool checkpoints = false) const;
  std::vector<uint8_t> ToBytes(bool checkpoints = false) const;
  // Throws CorruptFile if the bytes are not a whole, sound snapshot, Mismatch
  // if they are of a format version from the future, CacheFull if the pool
  // is full. Never reads outside `bytes`, whatever they are. Of the options,
  // block_tokens and pool count, capacity_tokens and checkpoint_bytes where
  // they are set; the rest is as it was saved.
  static std::unique_ptr<KVCache> FromBytes(std::span<const uint8_t> bytes,
                                            CacheOptions options = {});

  // ---- Inspection ----

  // Positions [begin, end) whose keys and values a layer holds; empty for a
  // recurrent layer, whose state is that of position `end`.
  std::pair<size_t, size_t> HeldRange(size_t layer) const;
  // Bytes of a layer's part of the blocks, shared ones included; none if it
  // reads another layer's keys and values. Over all layers: nbytes() +
  // shared_nbytes(), less what checkpoints alone hold and the padding between
  // recurrent states.
  size_t LayerBytes(size_t layer) const;
  // Dequantized copy, [tokens, kv_heads, head_dim], of the held range.
  // Requires: an attention layer.
  std::vector<float> CopyLayer(size_t layer, bool values) const;
  // Copy of a recurrent layer's state, [1 + conv_tail, lru_width].
  std::vector<float> CopyLayerState(size_t layer) const;
  // The full blocks of the computed part that begin at position `from` or
  // later, in order: what a prefix index or a lower tier stores. The references
  // keep the blocks as they are.
  std::vector<SealedBlock> SealedBlocks(size_t from = 0) const;

 private:
  // Where the next step begins, and on what.
  struct StartPoint {
    enum Source { kHeld, kCheckpoint, kCold };
    size_t position;
    size_t target;  // first row that must be right
    Source source = kHeld;
    const Checkpoint* checkpoint = nullptr;
  };
  class IdleCheckpoints;

  // The state's mutex, for whoever holds the run lock.
  Mutex& ToChange(const RunLock& run_lock) const
      GKV_ANALYSIS(lock_returned(state_mutex_));
  StartPoint Start(const KvContent& state, size_t target) const;
  StartPoint NextStart(const KvContent& state, bool for_logits) const;
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

#endif  // GEMMAKV_CACHE_KV_CACHE_H_
