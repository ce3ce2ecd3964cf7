#ifndef GEMMAKV_CACHE_KV_CACHE_H_
#define GEMMAKV_CACHE_KV_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <semaphore>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "cache/block_pool.h"
#include "cache/kv_layout.h"
#include "cache/token_log.h"

namespace gkv {

struct CacheOptions {
  size_t capacity_tokens = 0;  // 0: the model's context length
  KvDtype kv_dtype = KvDtype::kBF16;
  size_t block_tokens = 64;         // power of two, 16..128
  std::shared_ptr<BlockPool> pool = nullptr;  // null: BlockPool::Default()
};

struct Truncation {
  // Tokens that the next use recomputes before it can go on: 0 if everything
  // that the kept tokens need is still held.
  size_t replay_tokens = 0;
};

// What one step may read and write of one conversation: raw pointers into its
// blocks, valid until the step is committed or abandoned.
struct KvStepView {
  struct Group {
    std::vector<uint8_t*> blocks;  // table entries from first_block on
    size_t first_block = 0;
    // Positions below are not held: no row may read them.
    size_t readable_begin = 0;
    // Rows at positions below find their keys and values stored already and
    // must not write them (other conversations may share those blocks).
    size_t write_begin = 0;
    // Table entries that the step adds or replaces, by index into `blocks`:
    // they enter the cache when the step is committed.
    std::vector<std::pair<size_t, BlockRef>> fresh;
  };
  Group groups[kNumGroups];
  size_t begin = 0;  // first position of the step
  size_t end = 0;
  bool starts_replay = false;  // sliding layers are computed anew from here
};

// One conversation: its transcript, the keys and values of the transcript's
// positions, and nothing else. Weights, sampling and text live elsewhere.
//
//   transcript   token ids [0, length())
//   computed     positions [0, c) have been through the model; the rest, which
//                always includes the last sampled token, is pending
//   held         full layers hold keys and values of [0, c), sliding layers of
//                [b, c) with b at most a window before c
//
// The token ids are never lost, so anything else can be recomputed: after
// Truncate() past the sliding window, next_position() moves back and the
// engine replays. Full-layer keys and values are then only read. The number
// of positions to go back is derived in docs/cache.md.
//
// Blocks are shared between forks; a block that is shared is never written, it
// is copied first. Every method is safe from any thread: each holds the state
// lock for a short time. Steps on one cache are serialized by run_lock(),
// which the engine holds for a whole request; fork(), length() and snapshots
// during a request see the last committed step.
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

  size_t length() const;
  std::vector<int32_t> tokens() const;
  // Bytes of KV blocks that only this conversation refers to, and of those
  // that others refer to as well.
  size_t nbytes() const;
  size_t shared_nbytes() const;

  // Identity of the weights whose keys and values these are; all zero until
  // the first step. Bind throws Mismatch if another identity is bound already.
  Hash128 fingerprint() const;
  void Bind(const Hash128& fingerprint);

  // An independent conversation with the same content. O(blocks) reference
  // copies; no key or value is copied. Allowed during a request.
  std::unique_ptr<KVCache> Fork() const;
  // Keeps the first `length` tokens. Always exact; says what it costs at the
  // next use. Throws InvalidArgument if length > length().
  Truncation Truncate(size_t length);
  // Truncate(0), and unbinds.
  void Reset();
  // Exchanges the content (not the capacity) with `other`, which must have an
  // equal layout. The engine undoes a failed request with it.
  void Swap(KVCache& other) noexcept;

  // ---- Engine interface. Requires: run_lock() is held. ----

  // A semaphore, since a streamed request may end on another thread than the
  // one that began it.
  std::binary_semaphore& run_lock() { return run_lock_; }

  // Extends the transcript; the new positions are pending. Throws OutOfBlocks,
  // changing nothing, if the capacity does not allow it.
  void Append(std::span<const int32_t> tokens);

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
  // sliding layers hold. Requires: begin is next_position() or
  // next_position_for_logits(), or continues the step before it;
  // begin < end <= length(). Throws OutOfBlocks, changing nothing observable.
  KvStepView Prepare(size_t begin, size_t end);
  // The step's keys and values are complete: they are held from now on.
  // Seals full blocks and releases sliding blocks that no later row can see.
  // An uncommitted step leaves no trace. Takes the step's references over.
  void Commit(KvStepView& step);

  // ---- Snapshots ----

  // The whole conversation as bytes; format in docs/snapshot-format.md.
  // Takes a fork first, so a running request is not held up.
  std::vector<uint8_t> ToBytes() const;
  // Throws CorruptFile if the bytes are not a whole, sound snapshot, Mismatch
  // if they are of a format version from the future, OutOfBlocks if the pool
  // is full. Never reads outside `bytes`, whatever they are.
  static std::unique_ptr<KVCache> FromBytes(std::span<const uint8_t> bytes,
                                            CacheOptions options = {});

  // ---- Inspection ----

  // Positions [begin, end) whose keys and values a layer holds.
  std::pair<size_t, size_t> HeldRange(size_t layer) const;
  // Bytes of a layer's part of the blocks, shared ones included. Over all
  // layers: nbytes() + shared_nbytes().
  size_t LayerBytes(size_t layer) const;
  // Dequantized copy, [tokens, kv_heads, head_dim], of the held range.
  std::vector<float> CopyLayer(size_t layer, bool values) const;

 private:
  struct Group {
    std::vector<BlockRef> blocks;  // positions from first_block * block_tokens
    size_t first_block = 0;
  };
  // Copyable: that is what a fork is.
  struct State {
    explicit State(size_t block_tokens) : log(block_tokens) {}

    TokenLog log;
    size_t computed = 0;
    Group groups[kNumGroups];
    // Sliding layers: positions [sliding_begin, sliding_end) may be read.
    // sliding_end == computed unless they are lost (no blocks) or replaying.
    size_t sliding_begin = 0;
    size_t sliding_end = 0;
    // While replaying: rows from replay_target on are right, those before it
    // warm up. 0: not replaying.
    size_t replay_begin = 0;
    size_t replay_target = 0;
    Hash128 fingerprint;
  };
  struct StartPoint {
    size_t position;  // where the next step begins
    size_t target;    // first row that must be right
    bool replay;      // sliding layers start anew at `position`
  };
  friend class SnapshotEncoder;
  friend class SnapshotDecoder;

  StartPoint Start(const State& state, bool for_logits) const;
  size_t WindowBegin(size_t position) const;
  void DropSliding(State& state) const;
  KvStepView::Group PrepareGroup(GroupId id, size_t begin, size_t end,
                                 size_t held_end) const;
  BlockRef CopyBlock(GroupId id, const BlockRef& from, size_t tokens) const;
  State CopyState() const;

  std::shared_ptr<const KvLayout> layout_;
  std::shared_ptr<BlockPool> pool_;
  std::string model_type_;
  size_t capacity_tokens_;
  std::binary_semaphore run_lock_{1};
  mutable std::mutex state_mutex_;
  State state_;
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_KV_CACHE_H_
