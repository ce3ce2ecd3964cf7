#include "ops/machine_probe.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#ifndef GKV_KERNEL_BATCH
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/machine_probe.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#endif

#include "base/process.h"
#include "hwy/highway.h"
#include "ops/byte_dot-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

uint64_t XorSumOf(const uint8_t* data, size_t size) {
  const hn::ScalableTag<uint64_t> d;
  const size_t bytes = hn::Lanes(d) * sizeof(uint64_t);
  auto v0 = hn::Zero(d), v1 = hn::Zero(d), v2 = hn::Zero(d), v3 = hn::Zero(d);
  const auto load = [&](size_t at) HWY_ATTR {
    return hn::LoadU(d, reinterpret_cast<const uint64_t*>(data + at));
  };
  for (size_t i = 0; i < size; i += 4 * bytes) {
    v0 = hn::Xor(v0, load(i));
    v1 = hn::Xor(v1, load(i + bytes));
    v2 = hn::Xor(v2, load(i + 2 * bytes));
    v3 = hn::Xor(v3, load(i + 3 * bytes));
  }
  HWY_ALIGN uint64_t lanes[hn::MaxLanes(d)];
  hn::Store(hn::Xor(hn::Xor(v0, v1), hn::Xor(v2, v3)), d, lanes);
  uint64_t sum = 0;
  for (size_t i = 0; i < hn::Lanes(d); ++i) sum ^= lanes[i];
  return sum;
}

// Twelve independent chains, enough to hide the latency of each step. They
// start from different values, or the compiler would make them one.
template <class D, class Step>
hn::TFromD<D> Chains(D d, size_t steps, hn::TFromD<D> seed, const Step& step) {
  using T = hn::TFromD<D>;
  T start = seed;
  const auto next = [&]() HWY_ATTR { return hn::Set(d, start += T{1}); };
  auto v0 = next(), v1 = next(), v2 = next(), v3 = next(), v4 = next();
  auto v5 = next(), v6 = next(), v7 = next(), v8 = next(), v9 = next();
  auto v10 = next(), v11 = next();
  for (size_t i = 0; i < steps; ++i) {
    step(v0), step(v1), step(v2), step(v3), step(v4), step(v5);
    step(v6), step(v7), step(v8), step(v9), step(v10), step(v11);
  }
  const auto sum = hn::Add(hn::Add(hn::Add(hn::Add(v0, v1), hn::Add(v2, v3)),
                                   hn::Add(hn::Add(v4, v5), hn::Add(v6, v7))),
                           hn::Add(hn::Add(v8, v9), hn::Add(v10, v11)));
  return hn::ReduceSum(d, sum);
}

// Both give the operations done; `value` keeps the work from being left out.
double Int8Work(size_t steps, int32_t* value) {
  const hn::ScalableTag<int32_t> d;
  const hn::Repartition<uint8_t, decltype(d)> du8;
  const hn::Repartition<int8_t, decltype(d)> di8;
  const auto u = hn::Set(du8, static_cast<uint8_t>(*value & 1));
  const auto s = hn::Set(di8, static_cast<int8_t>(*value & 1));
  WithCurrentDot([&](auto dot) HWY_ATTR {
    *value = Chains(d, steps, *value & 1,
                    [&](auto& v) HWY_ATTR { v = dot.AddQuads(u, s, v); });
  });
  return static_cast<double>(steps * 12 * 2 * hn::Lanes(du8));
}

double FloatWork(size_t steps, float* value) {
  const hn::ScalableTag<float> d;
  const auto factor = hn::Set(d, *value);
  const auto add = hn::Set(d, *value + 1.0f);
  *value = Chains(d, steps, *value,
                  [&](auto& v) HWY_ATTR { v = hn::MulAdd(v, factor, add); });
  return static_cast<double>(steps * 12 * 2 * hn::Lanes(d));
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

HWY_EXPORT(XorSumOf);
HWY_EXPORT(Int8Work);
HWY_EXPORT(FloatWork);

namespace {

// Runs are short and repeated for a while: where other processes take part of
// the time, some run undisturbed.
constexpr size_t kMinRuns = 5;
constexpr std::chrono::duration<double> kBudget{0.04};
constexpr size_t kPieceBytes = size_t{1} << 20;
constexpr size_t kSteps = 50000;

size_t BufferBytes() {
  return std::clamp(4 * ProcessorCacheBytes(3), size_t{128} << 20,
                    size_t{1} << 30) /
         kPieceBytes * kPieceBytes;
}

// fn() does work and says how much; the best rate of a few runs, a second.
template <typename Fn>
double BestRate(const Fn& fn) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  double best = 0;
  for (size_t run = 0; run < kMinRuns || Clock::now() - start < kBudget;
       ++run) {
    const auto begin = Clock::now();
    const double work = fn();
    const std::chrono::duration<double> seconds = Clock::now() - begin;
    best = std::max(best, work / std::max(seconds.count(), 1e-9));
  }
  return best;
}

// Threads' results, on cache lines of their own.
template <typename T>
struct alignas(kAlignment) Slot {
  T value{};
  double work = 0;
};

}  // namespace

uint64_t XorSum(std::span<const uint8_t> bytes) {
  return HWY_DYNAMIC_DISPATCH(XorSumOf)(bytes.data(), bytes.size());
}

MachineProbe::MachineProbe(size_t num_threads)
    : pool_(num_threads), buffer_(BufferBytes()) {
  // Writing gives every page memory of its own.
  pool_.Run(buffer_.size() / kPieceBytes, [&](size_t task, size_t) {
    std::memset(buffer_.data() + task * kPieceBytes, 1, kPieceBytes);
  });
}

double MachineProbe::ReadBytesPerSecond() {
  std::vector<Slot<uint64_t>> slots(pool_.num_threads());
  return BestRate([&] {
    pool_.Run(buffer_.size() / kPieceBytes, [&](size_t task, size_t thread) {
      slots[thread].value ^=
          XorSum({buffer_.data() + task * kPieceBytes, kPieceBytes});
    });
    return static_cast<double>(buffer_.size());
  });
}

double MachineProbe::Int8OpsPerSecond() {
  std::vector<Slot<int32_t>> slots(pool_.num_threads());
  return BestRate([&] {
    double work = 0;
    pool_.Run(slots.size(), [&](size_t task, size_t) {
      slots[task].work =
          HWY_DYNAMIC_DISPATCH(Int8Work)(kSteps, &slots[task].value);
    });
    for (const auto& slot : slots) work += slot.work;
    return work;
  });
}

double MachineProbe::FloatOpsPerSecond() {
  std::vector<Slot<float>> slots(pool_.num_threads());
  return BestRate([&] {
    double work = 0;
    pool_.Run(slots.size(), [&](size_t task, size_t) {
      // Every value stays a normal number: x <- x / 2 + 3 / 2.
      slots[task].value = 0.5f;
      slots[task].work =
          HWY_DYNAMIC_DISPATCH(FloatWork)(kSteps, &slots[task].value);
    });
    for (const auto& slot : slots) work += slot.work;
    return work;
  });
}

}  // namespace gkv

#endif  // HWY_ONCE
