#ifndef GEMMAKV_ENGINE_DRAFT_MODEL_H_
#define GEMMAKV_ENGINE_DRAFT_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "cache/kv_cache.h"
#include "engine/model_drafter.h"
#include "engine/output_buffer.h"
#include "engine/row_consumer.h"
#include "model/forward.h"
#include "store/address.h"

namespace gkv {

// A draft model's own keys and values of one conversation of the target.
struct DraftConversation {
  explicit DraftConversation(std::shared_ptr<KVCache> own)
      : cache(std::move(own)), lock(cache->Lock()) {}
  DraftConversation(const DraftConversation&) = delete;

  std::shared_ptr<KVCache> cache;
  RunLock lock;  // destroyed before what it locks
  // The cache's transcript begins with so many tokens of the target's; guesses
  // follow.
  size_t known = 0;
  size_t next = 0;     // position that is to be computed
  bool moved = false;  // the cache says which
  // As it was before the guesses, while there are some.
  std::optional<KvContent> before_guesses;
  Address tenant = {};
  bool catching_up = false;
  bool ended = false;    // a request did, at `known`; the next is to mark that
  bool gave_up = false;  // for want of memory
  uint64_t used = 0;     // when it was used last
};

// A draft model: one with keys and values of its own.
//
// What it has computed of conversations is kept: one that begins takes over
// what shares the longest beginning with its transcript. So it follows forks,
// rewinds and restored conversations without being told of them. Memory for
// this is bounded: those that were used least recently give way.
class DraftModel : public ModelDrafter {
 public:
  // Conversations that nobody uses and that are kept at most.
  static constexpr size_t kMaxKept = 64;

  // `pool` is not owned. `target` says how long a round may take before one was
  // measured. `cache_bytes`: of keys and values.
  DraftModel(std::shared_ptr<const Model> model, const Model& target,
             ThreadPool& pool, size_t cache_bytes, DraftWork& work);

 private:
  using Conversation = DraftConversation;

  // A conversation's part of one step.
  struct Slice {
    Candidate* candidate = nullptr;
    Conversation* conversation = nullptr;
    size_t left = 0;  // guesses to make
    std::vector<int32_t> ids = {};
    KvStepView view = {};
    RowOutput output = {};
    RowConsumer::Guess guess = {};
    size_t seen = 0, right = 0;  // rows whose next token was known
  };

  void Offer(std::span<Candidate* const> requests,
             const GuessCosts& costs) override;
  void MakeGuesses(const GuessCosts& costs) override;

  void Begin(Candidate& candidate);
  std::shared_ptr<Conversation> MostAlike(const Candidate& candidate,
                                          size_t& common) const;
  static size_t Common(const KVCache& a, const KVCache& b, size_t begin);
  void Follow(Candidate& candidate);
  void GiveUp(Conversation& conversation) noexcept;
  bool DropOldest() noexcept;
  void DropBeyond(size_t kept) noexcept;
  bool WorthCatchingUp(Candidate& candidate, const GuessCosts& costs) const;
  void CatchUp(Candidate& candidate, size_t rows);
  void Rounds(std::vector<Slice> slices);
  bool Prepare(Slice& slice, size_t begin, size_t end, size_t outputs);
  bool Run(std::span<Slice> slices);
  void Sample(std::span<Slice> slices);
  double RowSeconds(double step_s) const;
  double CatchUpSeconds(const Conversation& c, double step_s) const;
  static size_t Lag(const Conversation& conversation);

  ThreadPool& pool_;
  const std::shared_ptr<BlockPool> cache_pool_;
  ForwardPass forward_;
  OutputBuffer rows_;
  std::list<std::shared_ptr<Conversation>> known_;
  std::vector<Candidate*> offered_;  // in the step
  LearnedTime row_s_;                // of one row among many
  uint64_t uses_ = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_DRAFT_MODEL_H_
