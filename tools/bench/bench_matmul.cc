// Measures matrix products per weight type and number of activation rows (M),
// beside what the machine can do (MachineProbe).
//
//   bench_matmul [threads] [type] [target]
//
// "memory" rows stream a matrix far larger than the caches; "cache" rows repeat
// one of 2048 x 640. GOP/s counts a multiplication and an addition for each
// weight and row. The limit is the time to read the weights once (memory rows)
// or to do the operations on registers, whichever is longer, measured right
// before; the share is the limit's time divided by the best of repeated runs.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/error.h"
#include "base/fp_environment.h"
#include "base/thread_pool.h"
#include "gemmakv/tensor_type.h"
#include "ops/machine_probe.h"
#include "ops/matmul.h"
#include "ops/quantize.h"
#include "ops/target.h"

namespace gkv {
namespace {

double Now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Seconds {
  double median, best;
};

// Repeats fn() for about `budget` seconds.
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

struct Limits {
  double read, int8, floats;  // bytes or operations a second
};

Limits Measure(MachineProbe& probe) {
  return {probe.ReadBytesPerSecond(), probe.Int8OpsPerSecond(),
          probe.FloatOpsPerSecond()};
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

void Measure(MachineProbe& probe, ThreadPool& pool, Problem& p, size_t rows,
             bool in_memory) {
  const Limits limits = Measure(probe);
  const MatMulInput input = {p.floats.data(),
                             p.weights.cols,
                             {p.values.data(), p.scales.data(), p.sums.data()},
                             rows};
  const size_t groups = NumGroups(p.weights.rows), per_task = 16;
  const Seconds seconds = Time(0.4, [&] {
    pool.Run((groups + per_task - 1) / per_task, [&](size_t task, size_t thread) {
      const ScopedFpEnvironment environment;
      MatMul(p.weights, input, task * per_task,
             std::min(groups, (task + 1) * per_task), pool.scratch(thread),
             p.out.data(), p.weights.rows);
    });
  });
  const auto bytes = static_cast<double>(p.packed.size());
  const double operations = 2.0 * static_cast<double>(p.weights.rows) *
                            static_cast<double>(p.weights.cols * rows);
  const double peak =
      UsesQuantizedActivations(p.weights.type) ? limits.int8 : limits.floats;
  const double limit =
      std::max(in_memory ? bytes / limits.read : 0, operations / peak);
  std::printf(
      "%-5s %-6s M %3zu  median %8.3f ms  best %8.3f ms  %6.1f GB/s  %5.0f "
      "GOP/s  %3.0f %% of the limit\n",
      std::string(Info(p.weights.type).name).c_str(),
      in_memory ? "memory" : "cache", rows, seconds.median * 1e3,
      seconds.best * 1e3, bytes / seconds.best / 1e9,
      operations / seconds.best / 1e9, 100 * limit / seconds.best);
}

void Run(size_t threads, std::string_view type, std::string_view target) {
  if (!target.empty()) ForceTarget(target);
  ThreadPool pool(threads);
  MachineProbe probe(threads);
  const Limits limits = Measure(probe);
  std::printf(
      "%s, %zu threads: read %.1f GB/s, 8-bit dot %.0f GOP/s, float "
      "multiply-add %.0f GFLOP/s\n",
      CurrentTarget().c_str(), threads, limits.read / 1e9, limits.int8 / 1e9,
      limits.floats / 1e9);
  for (const TensorTypeInfo& info : kTensorTypes) {
    if (!type.empty() && type != "all" && type != info.name) continue;
    // K types need a multiple of 256 columns.
    const size_t cols = info.values == 256 ? 768 : 640;
    {
      Problem p(info.type, info.values == 1 ? 65536 : 262144, cols, 8);
      for (const size_t rows : {1, 4, 8}) {
        Measure(probe, pool, p, rows, true);
      }
    }
    Problem p(info.type, 2048, cols, 512);
    for (const size_t rows : {1, 4, 8, 32, 512}) {
      Measure(probe, pool, p, rows, false);
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
