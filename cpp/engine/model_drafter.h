#ifndef GEMMAKV_ENGINE_MODEL_DRAFTER_H_
#define GEMMAKV_ENGINE_MODEL_DRAFTER_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cache/kv_cache.h"
#include "engine/row_consumer.h"
#include "model/forward.h"
#include "store/address.h"

namespace gkv {

class DraftConversation;

// How often guesses were right. A mean that forgets: what came last counts
// most.
struct RightShare {
  double value = 0;
  double weight = 0;
  void Note(bool was_right, double most_weight);
};

// What a sequence keeps for a drafter that reads its keys and values.
struct DraftState {
  // What the model's head read to sample the last token of the transcript when
  // that had this length; empty: not known.
  std::vector<float> hidden;
  size_t length = 0;

  // The drafter's own.
  bool begun = false;
  RightShare right;
  std::vector<int32_t> guesses;  // of tokens from `guessed_at` on
  size_t guessed_at = 0;
  double decoded_s = 0;  // time of the sequence's steps
  double tried_s = 0;    // that it took to see whether guesses would be right
};

// A mean in which the last one counts most, and one that was interrupted no
// more than it should: nothing is believed of the first alone, which would
// never be measured again were it too high.
class LearnedTime {
 public:
  void Note(double seconds);
  double seconds() const { return known_ ? mean_ : 0; }  // 0: not known

 private:
  double mean_ = 0;
  bool known_ = false;
};

// A model that guesses what another one, the target, says next. It runs on the
// target's scheduler thread, between two steps, for all of its conversations at
// once.
//
// Lack of memory ends guesses, and throws nothing. What else a step of the model
// throws goes through, and leaves every conversation sound.
class ModelDrafter {
 public:
  virtual ~ModelDrafter() = default;
  ModelDrafter(const ModelDrafter&) = delete;

  const Model* model() const { return model_.get(); }
  // Nobody else holds the model: no request will ever name it again.
  bool orphaned() const { return model_.use_count() == 1; }

  // A conversation that decodes.
  struct Request {
    // Null before the first time; the same one each time for one request.
    std::shared_ptr<DraftConversation>* conversation = nullptr;
    const KVCache* target = nullptr;  // its transcript only grows meanwhile
    Address tenant = {};  // finds what requests of the same one left
    size_t sampled_from = 0;          // tokens from here on are `consumer`'s
    RowConsumer* consumer = nullptr;
    size_t most = 0;  // guesses
    std::vector<int32_t> guesses = {};
    // For those that read the target's keys and values.
    DraftState* state = nullptr;
    const RunLock* lock = nullptr;  // of the target
  };
  // What the target's next step costs without the guesses of these requests.
  struct Price {
    size_t tokens = 1;  // that it brings
    double step_s = 0;
    std::span<const double> extra = {};  // as DraftPrice has it
    size_t rows = 128;  // of what is new to it that it may read at a time
    bool always = false;  // guess whether it pays or not
  };
  // Sets the guesses of each request, none where they do not pay.
  virtual void Guess(std::span<Request> requests, const Price& price) = 0;

  // Rows computed so far.
  size_t rows() const { return computed_rows_; }

 protected:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kMaxConversations = 32;  // of one round

  // `size_share`: of the target's size, which says how long a round may take
  // before one was measured.
  ModelDrafter(std::shared_ptr<const Model> model, double size_share);

  // Time of a round of so many conversations.
  double RoundSeconds(size_t conversations, double step_s) const;
  void NoteRound(size_t conversations, double seconds);
  void CountRows(size_t rows) { computed_rows_ += rows; }
  static double SecondsSince(Clock::time_point time);

  // Share of the time that goes to see whether guesses would be right.
  static constexpr double kTryShare = 0.01;
  // What shares of right guesses are learned from: of late, as many guesses.
  static constexpr double kLately = 40, kLatelyInAll = 400;
  // Weight of what other conversations say in one that begins.
  static constexpr double kOthersWeight = 6;

  const std::shared_ptr<const Model> model_;
  RightShare right_;  // of all conversations

 private:
  const double size_share_;
  // [i]: of a round of i + 1 conversations.
  std::array<LearnedTime, kMaxConversations> rounds_ = {};
  size_t computed_rows_ = 0;
};

// Bytes of all matrices of a model.
double MatrixBytes(const Model& model);

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_MODEL_DRAFTER_H_
