#ifndef GEMMAKV_ENGINE_TARGET_DRAFTER_H_
#define GEMMAKV_ENGINE_TARGET_DRAFTER_H_

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "engine/model_drafter.h"
#include "engine/output_buffer.h"
#include "model/draft_pass.h"

namespace gkv {

// A drafter that reads the target's keys and values (model/draft_pass.h). It
// keeps nothing of a conversation: what it needs is in the target's cache and
// in the DraftState that comes with a request.
class TargetDrafter : public ModelDrafter {
 public:
  // `target` and `pool` are not owned. Requires: RequireDrafterFor passes.
  TargetDrafter(std::shared_ptr<const Model> model, const Model& target,
                ThreadPool& pool);

  void Guess(std::span<Request> requests, const Price& price) override;

 private:
  // A conversation that takes part.
  struct Member {
    Request* request;
    KvStepView view;
    size_t left = 0;     // guesses to make
    bool shown = false;  // whether they are the request's
    int32_t last = 0;    // token, guessed or not
    RowConsumer::Guess guess = {};
  };

  void Learn(const Request& request);
  bool Ready(const Request& request, KvStepView& view) const;
  void GuessAll(std::span<Request> requests, const Price& price);
  void Rounds(std::vector<Member>& members);
  void Round(std::span<Member> members);

  ThreadPool& pool_;
  DraftPass pass_;
  OutputBuffer rows_;
  AlignedBuffer<float> states_;  // [members, target_hidden]
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_TARGET_DRAFTER_H_
