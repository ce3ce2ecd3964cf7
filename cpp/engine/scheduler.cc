#include "engine/scheduler.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/fp_environment.h"

namespace gkv {

std::vector<PlannedSlice> PlanStep(std::span<const PlanInput> requests,
                                   size_t rotation) {
  std::vector<PlannedSlice> plan;
  if (requests.empty()) return plan;
  size_t rows_left = kMaxStepRows;
  size_t logits_left = kMaxLogitsRows;
  std::vector<size_t> prefilling;
  for (size_t i = 0; i < requests.size(); ++i) {
    const size_t at = (i + rotation) % requests.size();
    const PlanInput& request = requests[at];
    if (!request.decoding) {
      prefilling.push_back(at);
    } else if (request.next < request.target && rows_left > 0 &&
               logits_left > 0) {
      plan.push_back({at, request.next, request.target});
      --rows_left;
      --logits_left;
    }
  }
  if (!plan.empty()) {
    rows_left = std::min(rows_left, kPrefillRowsWhileDecoding);
  }
  // Shortest first: what a short prompt leaves of its share goes to the rest.
  std::stable_sort(prefilling.begin(), prefilling.end(),
                   [&](size_t a, size_t b) {
                     return requests[a].target - requests[a].next <
                            requests[b].target - requests[b].next;
                   });
  for (size_t i = 0; i < prefilling.size(); ++i) {
    const PlanInput& request = requests[prefilling[i]];
    const size_t waiting = prefilling.size() - i;
    const size_t share = (rows_left + waiting - 1) / waiting;
    const size_t end =
        std::min({request.target, request.next + share,
                  std::max(request.next, request.logits_begin) + logits_left});
    if (end == request.next) continue;
    plan.push_back({prefilling[i], request.next, end});
    rows_left -= end - request.next;
    logits_left -= LogitsRows(request.logits_begin, request.next, end);
  }
  return plan;
}

Scheduler::Scheduler(std::shared_ptr<const Model> model, size_t num_threads)
    : model_(std::move(model)), num_threads_(num_threads) {
  pool_ = std::make_unique<ThreadPool>(num_threads);
  forward_ = std::make_unique<ForwardPass>(*model_, *pool_);
  thread_ = std::thread([this] { Loop(); });
}

Scheduler::~Scheduler() {
  {
    std::unique_lock lock(wake_up_->mutex);
    stopping_ = true;
  }
  wake_up_->changed.notify_all();
  thread_.join();
}

void Scheduler::Submit(std::span<const std::shared_ptr<Request>> requests) {
  for (const auto& request : requests) request->set_wake_up(wake_up_);
  {
    std::unique_lock lock(wake_up_->mutex);
    incoming_.insert(incoming_.end(), requests.begin(), requests.end());
  }
  wake_up_->changed.notify_all();
}

bool Scheduler::HasWork() const {
  return stopping_ || !incoming_.empty() ||
         std::any_of(active_.begin(), active_.end(),
                     [](const auto& request) { return !request->paused(); });
}

void Scheduler::Loop() {
  const ScopedFpEnvironment fp_environment;
  while (true) {
    bool stopping;
    {
      std::unique_lock lock(wake_up_->mutex);
      wake_up_->changed.wait(lock, [&] { return HasWork(); });
      for (std::shared_ptr<Request>& request : incoming_) {
        active_.push_back(std::move(request));
      }
      incoming_.clear();
      stopping = stopping_;
    }
    if (stopping) {
      for (const auto& request : active_) {
        request->Stop(Request::Interrupt::kCancel);
      }
    }
    DropEnded();
    RunStep();
    DropEnded();
    std::unique_lock lock(wake_up_->mutex);
    if (stopping_ && incoming_.empty() && active_.empty()) return;
  }
}

// Ends interrupted requests and forgets all that have ended.
void Scheduler::DropEnded() {
  for (const auto& request : active_) {
    if (!request->done() && request->interrupt() != Request::Interrupt::kNone) {
      request->Finish(FinishReason::kCancelled);
    }
  }
  std::erase_if(active_, [](const auto& request) { return request->done(); });
}

std::vector<PlannedSlice> Scheduler::Plan() {
  std::vector<PlanInput> inputs;
  for (const auto& request : active_) {
    // A paused one takes part with nothing to do.
    const size_t target =
        request->paused() ? request->next() : request->target();
    inputs.push_back({request->next(), target, request->logits_begin(),
                      request->decoding()});
  }
  return PlanStep(inputs, rotation_++);
}

void Scheduler::RunStep() {
  const std::vector<PlannedSlice> plan = Plan();
  // A request whose blocks cannot be had fails alone, before anything runs.
  std::vector<KvStepView> views;
  std::vector<PlannedSlice> prepared;
  std::vector<std::vector<int32_t>> tokens;
  for (const PlannedSlice& slice : plan) {
    Request& request = *active_[slice.request];
    try {
      std::vector<int32_t> ids(slice.end - slice.begin);
      request.cache().CopyTokens(slice.begin, ids);
      views.push_back(request.cache().Prepare(request.lock(), slice.begin, slice.end));
      tokens.push_back(std::move(ids));
      prepared.push_back(slice);
    } catch (...) {
      request.Fail(std::current_exception());
    }
  }
  if (prepared.empty()) return;

  try {
    std::vector<SequenceSlice> slices;
    size_t logits_rows = 0;
    for (size_t i = 0; i < prepared.size(); ++i) {
      const Request& request = *active_[prepared[i].request];
      const size_t rows = LogitsRows(request.logits_begin(), prepared[i].begin,
                                     prepared[i].end);
      const auto kind =
          request.argmax_only() ? RowOutput::kLargest : RowOutput::kLogits;
      slices.push_back({tokens[i], &views[i], &request.cache().layout(),
                        {.kind = kind, .rows = rows}});
      logits_rows += rows;
    }
    logits_.EnsureSize(logits_rows * model_->config.vocab_size);
    float* logits = logits_.data();
    for (SequenceSlice& slice : slices) {
      slice.output.data = logits;
      logits += slice.output.rows * model_->config.vocab_size;
    }
    forward_->Step(slices);
    ++steps_;
  } catch (...) {
    for (const PlannedSlice& slice : prepared) {
      active_[slice.request]->Fail(std::current_exception());
    }
    return;
  }
  Deliver(prepared, views);
}

void Scheduler::Deliver(std::span<const PlannedSlice> plan,
                        std::span<KvStepView> views) {
  const size_t vocab_size = model_->config.vocab_size;
  std::vector<size_t> first_row(plan.size());
  size_t rows = 0;
  for (size_t i = 0; i < plan.size(); ++i) {
    first_row[i] = rows;
    rows += LogitsRows(active_[plan[i].request]->logits_begin(), plan[i].begin,
                       plan[i].end);
  }
  // A loop of one task runs here, and leaves the pool to the task.
  ThreadPool* const free_pool = plan.size() == 1 ? pool_.get() : nullptr;
  pool_->Run(plan.size(), [&](size_t i, size_t) {
    Request& request = *active_[plan[i].request];
    try {
      request.cache().Commit(request.lock(), views[i]);
      const size_t end = i + 1 < plan.size() ? first_row[i + 1] : rows;
      request.Advance(plan[i].end,
                      {logits_.data() + first_row[i] * vocab_size,
                       (end - first_row[i]) * vocab_size},
                      free_pool);
    } catch (...) {
      request.Fail(std::current_exception());
    }
  });
}

}  // namespace gkv
