#ifndef GEMMAKV_ENGINE_TARGET_DRAFTER_H_
#define GEMMAKV_ENGINE_TARGET_DRAFTER_H_

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "engine/model_drafter.h"
#include "engine/output_buffer.h"
#include "model/draft_pass.h"

namespace gkv {

// A drafter that reads the target's keys and values (model/draft_pass.h). It
// keeps nothing of a conversation: all that it needs is the target's cache and
// the hidden state from the request's last step.
class TargetDrafter : public ModelDrafter {
 public:
  // `target` and `pool` are not owned. Requires: RequireDrafterFor passes.
  TargetDrafter(std::shared_ptr<const Model> model, const Model& target,
                ThreadPool& pool, DraftWork& work);

 private:
  // A request that takes part.
  struct Member {
    Candidate* candidate;
    KvStepView view;
    size_t left = 0;   // guesses to make
    int32_t last = 0;  // the last token, guessed or not
    RowConsumer::Guess guess = {};
  };

  void Offer(std::span<Candidate* const> requests,
             const GuessCosts& costs) override;
  void MakeGuesses(const GuessCosts& costs) override;

  static bool TryView(const Candidate& candidate, KvStepView& view);
  void RunRound(std::span<Member> members);

  ThreadPool& pool_;
  DraftPass pass_;
  std::vector<Member> offered_;  // of this step
  OutputBuffer rows_;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_TARGET_DRAFTER_H_
