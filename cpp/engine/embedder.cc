#include "engine/embedder.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "base/fp_environment.h"
#include "base/processors.h"

namespace gkv {
namespace {

// Rows of a step. A longer text is a step of its own.
constexpr size_t kStepRows = 512;
// The time between two polls of a waiting caller.
constexpr std::chrono::milliseconds kPollInterval{50};

}  // namespace

struct Embedder::Call {
  std::span<const Text> texts;
  float* out = nullptr;
  std::vector<size_t> order;  // of texts, the longest first
  // The waiting texts: [first, last) of `order`.
  size_t first = 0, last = 0;
  size_t running = 0;  // texts of the step that runs
  std::exception_ptr failure = nullptr;

  size_t length(size_t place) const { return texts[order[place]].size(); }
};

Embedder::Embedder(std::shared_ptr<const Model> model, size_t num_threads,
                   bool profiled, std::span<const Processor> processors)
    : model_(std::move(model)),
      clock_(profiled ? std::make_unique<StepClock>() : nullptr),
      processors_(processors.begin(), processors.end()),
      pool_(num_threads, processors_),
      pass_(*model_, pool_) {
  pool_.set_clock(clock_.get());
}

size_t Embedder::steps() const {
  const MutexLock lock(mutex_);
  return steps_;
}

void Embedder::Embed(std::span<const Text> texts, float* out,
                     const std::function<void()>& poll) {
  Call call;
  call.texts = texts;
  call.out = out;
  call.order.resize(call.last = texts.size());
  std::iota(call.order.begin(), call.order.end(), size_t{0});
  std::stable_sort(call.order.begin(), call.order.end(),
                   [&](size_t a, size_t b) {
                     return texts[a].size() > texts[b].size();
                   });
  MutexLock lock(mutex_);
  try {
    if (!texts.empty()) calls_.push_back(&call);
    while ((call.first != call.last || call.running != 0) && !call.failure) {
      if (running_) {
        (void)changed_.WaitFor(lock, kPollInterval);
      } else {
        const std::vector<Item> items = TakeStep();
        running_ = true;
        lock.Unlock();
        std::exception_ptr failure;
        try {
          RunStep(items);
        } catch (...) {
          failure = std::current_exception();
        }
        lock.Lock();
        running_ = false;
        ++steps_;
        for (const Item& item : items) {
          --item.call->running;
          if (failure) item.call->failure = failure;
        }
        changed_.NotifyAll();
      }
      if (!poll) continue;
      lock.Unlock();
      std::exception_ptr stop;
      try {
        poll();
      } catch (...) {
        stop = std::current_exception();
      }
      lock.Lock();
      if (stop) std::rethrow_exception(stop);
    }
  } catch (...) {
    Forget(call, lock);
    throw;
  }
  if (!call.failure) return;
  Forget(call, lock);
  std::rethrow_exception(call.failure);
}

// Ends a call: on return nothing uses it.
void Embedder::Forget(Call& call, MutexLock& lock) {
  std::erase(calls_, &call);
  call.first = call.last;
  while (call.running != 0) changed_.Wait(lock);
}

// Requires: there is a waiting text.
std::vector<Embedder::Item> Embedder::TakeStep() {
  std::vector<Item> items;
  items.reserve(kStepRows);
  std::vector<Call*> candidates(calls_.begin(), calls_.end());
  // From here on nothing fails.
  size_t rows = 0;
  while (!candidates.empty()) {
    std::erase_if(candidates, [&](Call* call) {
      if (call->first == call->last) return true;
      const auto fits = [&](size_t place) {
        return items.empty() || rows + call->length(place) <= kStepRows;
      };
      size_t place = call->first;
      if (fits(place)) {
        ++call->first;
      } else if (fits(call->last - 1)) {
        place = --call->last;
      } else {
        return true;
      }
      rows += call->length(place);
      ++call->running;
      items.push_back({call, call->order[place]});
      return false;
    });
  }
  // It is the next call's turn.
  std::rotate(calls_.begin(), calls_.begin() + 1, calls_.end());
  std::erase_if(calls_, [](Call* call) { return call->first == call->last; });
  return items;
}

void Embedder::RunStep(const std::vector<Item>& items) {
  const ScopedFpEnvironment fp_environment;
  const std::unique_ptr<ScopedPin> pin = PinTo(processors_);
  if (clock_) clock_->Begin();
  size_t rows = 0;
  const size_t size = VectorSize(model_->config);
  std::vector<EmbeddingPass::Text> texts;
  for (const Item& item : items) {
    texts.push_back({item.call->texts[item.index],
                     item.call->out + item.index * size});
    rows += texts.back().tokens.size();
  }
  pass_.Run(texts);
  if (clock_) clock_->End(StepPhase::kEmbedding, rows);
}

}  // namespace gkv
