// Matrix products per weight type and number of activation rows, beside what
// the machine can do: the rate at which it reads memory, and the rate of 8-bit
// dot products on registers.
//
//   bench_matmul [threads] [type] [target]
//
// "memory" rows stream a matrix far larger than the caches; "cache" rows repeat
// one of 2048 x 640. GOP/s counts a multiplication and an addition for each
// weight and row. Rates are of the best of repeated runs.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/error.h"
#include "base/fp_environment.h"
#include "base/tensor_type.h"
#include "base/thread_pool.h"
#include "ops/matmul.h"
#include "ops/quantize.h"
#include "ops/target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench_matmul.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Reads `size` bytes; the result depends on all of them.
uint64_t ReadAll(const uint8_t* data, size_t size) {
  const hn::ScalableTag<uint64_t> d;
  const size_t bytes = hn::Lanes(d) * sizeof(uint64_t);
  auto a = hn::Zero(d), b = hn::Zero(d), c = hn::Zero(d), e = hn::Zero(d);
  const auto load = [&](size_t at) HWY_ATTR {
    return hn::LoadU(d, reinterpret_cast<const uint64_t*>(data + at));
  };
  for (size_t i = 0; i + 4 * bytes <= size; i += 4 * bytes) {
    a = hn::Xor(a, load(i));
    b = hn::Xor(b, load(i + bytes));
    c = hn::Xor(c, load(i + 2 * bytes));
    e = hn::Xor(e, load(i + 3 * bytes));
  }
  return hn::ReduceSum(d, hn::Add(hn::Add(a, b), hn::Add(c, e)));
}

// 12 independent chains of `steps` dot products on registers; returns the
// multiplications and additions done.
double DotPeak(size_t steps, int32_t* out) {
  const hn::ScalableTag<int32_t> di;
  const hn::Repartition<uint8_t, decltype(di)> du8;
  const hn::Repartition<int8_t, decltype(di)> di8;
  auto u = hn::Set(du8, static_cast<uint8_t>(*out));
  auto s = hn::Set(di8, static_cast<int8_t>(*out));
  // Chains that start alike would be merged into one.
  int32_t start = *out;
  const auto next = [&]() HWY_ATTR { return hn::Set(di, ++start); };
  auto v0 = next(), v1 = next(), v2 = next(), v3 = next(), v4 = next();
  auto v5 = next(), v6 = next(), v7 = next(), v8 = next(), v9 = next();
  auto v10 = next(), v11 = next();
  const auto dot = [&](auto& v) HWY_ATTR {
    v = hn::SumOfMulQuadAccumulate(di, u, s, v);
  };
  for (size_t i = 0; i < steps; ++i) {
    dot(v0), dot(v1), dot(v2), dot(v3), dot(v4), dot(v5);
    dot(v6), dot(v7), dot(v8), dot(v9), dot(v10), dot(v11);
  }
  const auto sum = hn::Add(hn::Add(hn::Add(hn::Add(v0, v1), hn::Add(v2, v3)),
                                   hn::Add(hn::Add(v4, v5), hn::Add(v6, v7))),
                           hn::Add(hn::Add(v8, v9), hn::Add(v10, v11)));
  *out = hn::ReduceSum(di, sum);
  return static_cast<double>(steps) * 12 * 2 *
         static_cast<double>(hn::Lanes(du8));
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

HWY_EXPORT(ReadAll);
HWY_EXPORT(DotPeak);

namespace {

double Now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Seconds {
  double median, best;
};

// fn() repeated for about `budget` seconds.
template <typename Fn>
Seconds Time(double budget, const Fn& fn) {
  fn();
  std::vector<double> times;
  const double begin = Now();
  while (times.size() < 5 || Now() - begin < budget) {
    const double start = Now();
    fn();
    times.push_back(Now() - start);
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2,
                   times.end());
  return {times[times.size() / 2],
          *std::min_element(times.begin(), times.end())};
}

void MeasureMachine(ThreadPool& pool) {
  const size_t n = pool.num_threads(), size = size_t{256} << 20;
  AlignedBuffer<uint8_t> buffer(size);
  std::memset(buffer.data(), 1, size);
  std::vector<uint64_t> sums(n);
  constexpr size_t kPiece = size_t{1} << 20;
  const Seconds read = Time(0.5, [&] {
    pool.Run(size / kPiece, [&](size_t task, size_t thread) {
      sums[thread] +=
          HWY_DYNAMIC_DISPATCH(ReadAll)(buffer.data() + task * kPiece, kPiece);
    });
  });
  std::vector<double> operations(n);
  std::vector<int32_t> sink(n, 3);
  const Seconds peak = Time(0.3, [&] {
    pool.Run(n, [&](size_t task, size_t) {
      int32_t value = sink[task];
      operations[task] = HWY_DYNAMIC_DISPATCH(DotPeak)(100000, &value);
      sink[task] = value;
    });
  });
  std::printf("%s, %zu threads: read %.1f GB/s, 8-bit dot %.0f GOP/s\n",
              CurrentTarget().c_str(), n,
              static_cast<double>(size) / read.best / 1e9,
              static_cast<double>(n) * operations[0] / peak.best / 1e9);
}

// A packed matrix with small weights, and rows of activations.
struct Problem {
  PackedView weights;
  AlignedBuffer<uint8_t> packed;
  size_t max_rows;
  AlignedBuffer<float> floats, scales, out;
  AlignedBuffer<int8_t> values;
  AlignedBuffer<int32_t> sums;

  Problem(TensorType type, size_t rows, size_t cols, size_t max_rows)
      : packed(NumGroups(rows) * GroupBytes(type, cols)),
        max_rows(max_rows),
        floats(max_rows * cols),
        scales(max_rows * cols / kQuantBlock),
        out(max_rows * rows),
        values(max_rows * cols),
        sums(max_rows * cols / kQuantBlock) {
    weights = {type, rows, cols, packed.data()};
    // Speed does not depend on the values, as long as no number is subnormal.
    for (size_t i = 0; i < packed.size(); ++i) {
      packed[i] = static_cast<uint8_t>(0x30 | (i * 2654435761u >> 24 & 15));
    }
    for (size_t i = 0; i < floats.size(); ++i) {
      floats[i] = static_cast<float>(i % 97) - 48.0f;
    }
    QuantizeRows(floats.data(), cols, max_rows, cols,
                 {values.data(), scales.data(), sums.data()});
  }
};

void Measure(ThreadPool& pool, Problem& p, size_t rows, const char* where) {
  const MatMulInput input = {p.floats.data(),
                             p.weights.cols,
                             {p.values.data(), p.scales.data(), p.sums.data()},
                             rows};
  const size_t groups = NumGroups(p.weights.rows), per_task = 16;
  const Seconds seconds = Time(0.4, [&] {
    pool.Run((groups + per_task - 1) / per_task, [&](size_t task, size_t) {
      const ScopedFpEnvironment environment;
      MatMul(p.weights, input, task * per_task,
             std::min(groups, (task + 1) * per_task), p.out.data(),
             p.weights.rows);
    });
  });
  const auto bytes = static_cast<double>(p.packed.size());
  const double operations = 2.0 * static_cast<double>(p.weights.rows) *
                            static_cast<double>(p.weights.cols * rows);
  std::printf(
      "%-5s %-6s M %3zu  median %8.3f ms  best %8.3f ms  %6.1f GB/s  %5.0f "
      "GOP/s\n",
      std::string(Info(p.weights.type).name).c_str(), where, rows,
      seconds.median * 1e3, seconds.best * 1e3, bytes / seconds.best / 1e9,
      operations / seconds.best / 1e9);
}

void Run(size_t threads, std::string_view type, std::string_view target) {
  if (!target.empty()) ForceTarget(target);
  ThreadPool pool(threads);
  MeasureMachine(pool);
  for (const TensorTypeInfo& info : kTensorTypes) {
    if (!type.empty() && type != "all" && type != info.name) continue;
    // K types need a multiple of 256 columns.
    const size_t cols = info.values == 256 ? 768 : 640;
    {
      Problem p(info.type, info.values == 1 ? 65536 : 262144, cols, 8);
      for (const size_t rows : {1, 4, 8}) Measure(pool, p, rows, "memory");
    }
    Problem p(info.type, 2048, cols, 512);
    for (const size_t rows : {1, 4, 8, 32, 512}) {
      Measure(pool, p, rows, "cache");
    }
  }
}

}  // namespace
}  // namespace gkv

int main(int argc, char** argv) {
  try {
    gkv::Run(argc > 1 ? std::strtoul(argv[1], nullptr, 10)
                      : gkv::ThreadPool::AvailableProcessors(),
             argc > 2 ? argv[2] : "", argc > 3 ? argv[3] : "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_matmul: %s\n", error.what());
    return 1;
  }
  return 0;
}

#endif  // HWY_ONCE
