#include "engine/scheduler.h"

#include <system_error>
#include <utility>

#include "base/fp_environment.h"
#include "base/inside_step.h"
#include "base/processors.h"

namespace gkv {

Scheduler::Scheduler(std::shared_ptr<const Model> model, size_t num_threads,
                     const SchedulerOptions& options, bool profiled,
                     std::span<const Processor> processors)
    : model_(std::move(model)),
      num_threads_(num_threads),
      clock_(profiled ? std::make_unique<StepClock>() : nullptr),
      queue_(options) {
  pool_ = std::make_unique<ThreadPool>(num_threads, processors);
  pool_->set_clock(clock_.get());
  runner_ = std::make_unique<StepRunner>(*model_, *pool_, clock_.get(), options,
                                         queue_);
  std::promise<void> pinned;
  std::future<void> ready = pinned.get_future();
  try {
    thread_ = std::thread(
        Unpinned([this, processors, pinned = std::move(pinned)]() mutable {
          RunThread(processors, pinned);
        }));
  } catch (const std::system_error& error) {
    throw ThreadPool::Refused(num_threads - 1, num_threads, error);
  }
  try {
    ready.get();
  } catch (...) {
    thread_.join();
    throw;
  }
}

Scheduler::~Scheduler() {
  queue_.Stop();
  thread_.join();
}

// `pinned` is set when the thread is on its processors, or gets the error.
void Scheduler::RunThread(std::span<const Processor> processors,
                          std::promise<void>& pinned) {
  std::unique_ptr<ScopedPin> pin;
  try {
    pin = PinTo(processors);
  } catch (...) {
    pinned.set_exception(std::current_exception());
    return;
  }
  pinned.set_value();
  const InsideStep inside(queue_.wake_up().get());
  const ScopedFpEnvironment fp_environment;
  Loop();
}

void Scheduler::Loop() {
  while (queue_.WaitForWork()) {
    if (clock_) clock_->Begin();
    queue_.Interrupt();
    Retire();
    std::optional<StepPhase> phase;
    try {
      queue_.Admit();
      phase = runner_->Run(queue_.Runnable());
    } catch (...) {
      queue_.FailYoungest(std::current_exception());
    }
    Retire();
    if (clock_ && phase) clock_->AddRest(*phase);
  }
}

void Scheduler::Retire() {
  if (queue_.Retire()) runner_->ForgetEnded();
}

}  // namespace gkv
