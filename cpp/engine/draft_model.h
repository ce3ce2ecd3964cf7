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
#include "cache/conversation.h"
#include "engine/model_drafter.h"
#include "engine/output_buffer.h"
#include "engine/row_consumer.h"
#include "model/forward.h"
#include "store/address.h"

namespace gkv {

// A draft model's own keys and values of one conversation of the target.
struct DraftConversation {
  explicit DraftConversation(std::shared_ptr<Conversation> own)
      : cache(std::move(own)), lock(cache->Lock()) {}
  DraftConversation(const DraftConversation&) = delete;

  std::shared_ptr<Conversation> cache;
  RunLock lock;  // destroyed before what it locks
  // The cache's transcript begins with so many tokens of the target's
  // transcript; guesses follow.
  size_t known = 0;
  size_t next = 0;     // the next position to compute
  bool moved = false;  // `next` is out of date: ask the cache
  // The content from before the guesses, while there are some.
  std::optional<KvContent> before_guesses;
  Address tenant = {};
  bool catching_up = false;
  bool ended = false;    // a request ended at `known`: checkpoint there
  bool gave_up = false;  // there was no memory
  uint64_t used = 0;     // when it was last used
};

// A draft model, which has keys and values of its own.
//
// The keys and values of conversations are kept after their requests end. A
// request takes over those of the conversation that shares the longest prefix
// with its transcript. So the draft model follows forks, rewinds and restored
// conversations without being told of them. The memory for this is bounded: the
// least recently used conversations are dropped.
class DraftModel : public ModelDrafter {
 public:
  // The number of idle conversations that are kept at most.
  static constexpr size_t kMaxKept = 64;

  // `pool` is not owned. `target` gives an estimate of the time of a round
  // before one was measured. `cache_bytes`: the budget of keys and values.
  DraftModel(std::shared_ptr<const Model> model, const Model& target,
             ThreadPool& pool, size_t cache_bytes, DraftWork& work);

 private:
  // A conversation's part of one step.
  struct Slice {
    Candidate* candidate = nullptr;
    DraftConversation* conversation = nullptr;
    size_t left = 0;  // guesses to make
    std::vector<int32_t> ids = {};
    KvStepView view = {};
    RowOutput output = {};
    RowConsumer::Guess guess = {};
    size_t seen = 0, right = 0;  // known next tokens: all, right
  };

  void Offer(std::span<Candidate* const> requests,
             const GuessCosts& costs) override;
  void MakeGuesses(const GuessCosts& costs) override;

  void Begin(Candidate& candidate);
  std::shared_ptr<DraftConversation> FindMostAlike(const Candidate& candidate,
                                                   size_t& common) const;
  static size_t CountCommon(const Conversation& a, const Conversation& b,
                            size_t begin);
  void Follow(Candidate& candidate);
  void GiveUp(DraftConversation& conversation) noexcept;
  bool DropOldest() noexcept;
  void DropBeyond(size_t kept) noexcept;
  bool WorthCatchingUp(Candidate& candidate, const GuessCosts& costs) const;
  void CatchUp(Candidate& candidate, size_t rows);
  void RunRounds(std::vector<Slice> slices);
  bool Prepare(Slice& slice, size_t begin, size_t end, size_t outputs);
  bool Run(std::span<Slice> slices);
  void Sample(std::span<Slice> slices);
  double RowSeconds(double step_s) const;
  double CatchUpSeconds(const DraftConversation& c, double step_s) const;
  static size_t Lag(const DraftConversation& conversation);

  ThreadPool& pool_;
  const std::shared_ptr<BlockPool> cache_pool_;
  ForwardPass forward_;
  OutputBuffer rows_;
  std::list<std::shared_ptr<DraftConversation>> known_;
  std::vector<Candidate*> offered_;  // of this step
  LearnedTime row_s_;                // of one row of many
  uint64_t uses_ = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_DRAFT_MODEL_H_
