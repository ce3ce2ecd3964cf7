#include "base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/error.h"
#include "base/fp_environment.h"
#include "base/mutex.h"
#include "base/own_process.h"
#include "base/processors.h"

namespace gkv {
namespace {

// How long a thread looks for work before it parks: longer than the serial work
// between two loops of a decode step, shorter than anyone notices.
constexpr std::chrono::microseconds kSpinTime{150};
constexpr int kPausesPerClockRead = 32;

// A task number above every count: with it nothing can be claimed.
constexpr uint64_t kClosed = 0xFFFFFFFFu;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Calls `done` until it is true or the spin time is over.
template <typename Done>
bool Spin(bool may_spin, const Done& done) {
  if (!may_spin) {
    std::this_thread::yield();
    return done();
  }
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (done()) return true;
      Pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return done();
}

}  // namespace

// One loop is one epoch. The word `claim` packs (epoch, next task). A worker
// that is late from one loop cannot claim a task of another, because its
// compare-and-swap carries the epoch whose function it read.
struct ThreadPool::Shared {
  Shared(size_t num_threads, bool pinned)
      : may_spin(pinned || num_threads <= AvailableProcessors()) {}

  const bool may_spin;
  const OwnProcess process;
  std::atomic<uint64_t> claim{0};  // epoch << 32 | next task
  std::atomic<uint32_t> num_tasks{0};
  std::atomic<uint32_t> unfinished{0};
  std::atomic<const void*> fn{nullptr};
  std::atomic<ErasedFn> call{nullptr};
  std::atomic<bool> stopping{false};
  std::atomic<size_t> parallel_loops{0};
  Mutex mutex{AtFork::kLeaves};  // for parking only
  Condition wake_workers{mutex};
  Condition wake_caller{mutex};
  std::atomic<uint32_t> parked{0};
  std::atomic<bool> caller_parked{false};
  std::vector<std::thread> threads;
  std::vector<AlignedBuffer<uint8_t>> scratch;  // by thread, the caller's first

  static uint32_t Epoch(uint64_t claim) {
    return static_cast<uint32_t>(claim >> 32);
  }

  // Runs tasks of the loop `epoch` until none is left to claim.
  void RunTasks(uint32_t epoch, size_t thread) {
    const void* const f = fn.load(std::memory_order_acquire);
    const ErasedFn c = call.load(std::memory_order_acquire);
    const uint32_t count = num_tasks.load();
    // The number is subtracted once, not for each task, because threads that
    // write to one place wait for each other. The loop, and with it the epoch,
    // lasts until then.
    uint32_t done = 0;
    uint64_t current = claim.load(std::memory_order_acquire);
    while (Epoch(current) == epoch) {
      const uint32_t task = static_cast<uint32_t>(current);
      if (task >= count) break;
      if (!claim.compare_exchange_weak(current, current + 1,
                                       std::memory_order_acq_rel)) {
        continue;
      }
      c(f, task, thread);
      ++done;
      current = claim.load(std::memory_order_acquire);
    }
    if (done != 0 && unfinished.fetch_sub(done) == done &&
        caller_parked.load()) {
      const MutexLock lock(mutex);
      wake_caller.NotifyOne();
    }
  }

  void Work(size_t thread) {
    const ScopedFpEnvironment fp_environment;
    uint32_t seen = 0;
    while (true) {
      const auto news = [&] {
        return Epoch(claim.load()) != seen || stopping.load();
      };
      if (!Spin(may_spin, news)) {
        MutexLock lock(mutex);
        ++parked;
        wake_workers.Wait(lock, news);
        --parked;
      }
      if (stopping.load(std::memory_order_acquire)) return;
      seen = Epoch(claim.load(std::memory_order_acquire));
      RunTasks(seen, thread);
    }
  }

  void StopAndJoin() {
    {
      const MutexLock lock(mutex);
      stopping = true;
      wake_workers.NotifyAll();
    }
    for (std::thread& worker : threads) worker.join();
  }
};

ThreadPool::ThreadPool(size_t num_threads,
                       std::span<const Processor> processors)
    : num_threads_(num_threads) {
  CheckRange(num_threads, 1, kMaxThreads, "number of threads");
  shared_ = std::make_unique<Shared>(num_threads, !processors.empty());
  shared_->threads.reserve(num_threads - 1);
  shared_->scratch.reserve(num_threads);
  shared_->scratch.emplace_back(kScratchBytes);
  try {
    for (size_t thread = 1; thread < num_threads; ++thread) {
      shared_->scratch.emplace_back(kScratchBytes);
      const auto work = [shared = shared_.get(), thread] {
        shared->Work(thread);
      };
      if (processors.empty()) {
        shared_->threads.emplace_back(Unpinned(work));
        continue;
      }
      shared_->threads.emplace_back(work);
      const int processor = processors[thread].id;
      const int refused =
          PinThread(shared_->threads.back().native_handle(), processor);
      if (refused == 0) continue;
      shared_->StopAndJoin();
      throw PinError(processor, refused);
    }
  } catch (const std::system_error& error) {
    const size_t started = shared_->threads.size() + 1;
    shared_->StopAndJoin();
    throw Refused(started, num_threads, error);
  } catch (const std::bad_alloc&) {
    shared_->StopAndJoin();
    throw;
  }
}

IoError ThreadPool::Refused(size_t started, size_t num_threads,
                            const std::system_error& error) {
  return {StrCat("started ", started, " of ", num_threads,
                 " threads: ", error.code().message()),
          error.code().value(), ""};
}

ThreadPool::~ThreadPool() {
  if (shared_->process.InChild()) {
    // In a child of fork() the threads do not exist and cannot be joined.
    (void)shared_.release();
    return;
  }
  shared_->StopAndJoin();
}

void ThreadPool::RunErased(size_t num_tasks, const void* fn, ErasedFn call) {
  Shared& s = *shared_;
  if (num_threads_ == 1 || num_tasks <= 1 || s.process.InChild()) {
    for (size_t task = 0; task < num_tasks; ++task) call(fn, task, 0);
    return;
  }
  if (clock_ != nullptr) clock_->Fork();
  s.parallel_loops.store(s.parallel_loops.load(std::memory_order_relaxed) + 1,
                         std::memory_order_relaxed);
  // First the old epoch is closed. A late worker of the last loop may read the
  // new number of tasks, but finds no task below it, and its compare-and-swap
  // on an older claim fails.
  const uint32_t epoch = Shared::Epoch(s.claim.load());
  s.claim.store(uint64_t{epoch} << 32 | kClosed);
  s.fn.store(fn);
  s.call.store(call);
  s.unfinished.store(static_cast<uint32_t>(num_tasks));
  s.num_tasks.store(static_cast<uint32_t>(num_tasks));
  s.claim.store(static_cast<uint64_t>(epoch + 1) << 32);
  if (s.parked.load() > 0) {
    const MutexLock lock(s.mutex);
    s.wake_workers.NotifyAll();
  }
  if (clock_ != nullptr) clock_->Work();
  s.RunTasks(epoch + 1, 0);
  if (clock_ != nullptr) clock_->Wait();
  const auto finished = [&] { return s.unfinished.load() == 0; };
  if (!Spin(s.may_spin, finished)) {
    MutexLock lock(s.mutex);
    s.caller_parked = true;
    s.wake_caller.Wait(lock, finished);
    s.caller_parked = false;
  }
  if (clock_ != nullptr) clock_->Join();
}

uint8_t* ThreadPool::scratch(size_t thread) {
  return shared_->scratch[thread].data();
}

size_t ThreadPool::parallel_loops() const {
  return shared_->parallel_loops.load(std::memory_order_relaxed);
}

size_t ThreadPool::AvailableProcessors() {
  return std::clamp<size_t>(AllowedProcessors().size(), 1, kMaxThreads);
}

}  // namespace gkv
