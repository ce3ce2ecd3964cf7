// Measures the cost of a draw for combinations of options and rows of 262,144
// logits.
//
//   bench_sampler [file] [target]
//
// Rows are made up: "peaked" (one token has nearly all mass), "usual" (normal
// with the deviation of a real model's logits, 4.6) and "flat" (deviation 2:
// the nucleus has thousands of tokens). A file adds the rows in it, 262,144
// float32 each, of which it shows the median row, the row at nine tenths and
// the worst one. A row's time is that of the best of repeated draws, each from
// a fresh copy.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/fp_environment.h"
#include "engine/sampler.h"
#include "ops/target.h"

namespace gkv {
namespace {

constexpr size_t kVocabSize = 262144;
constexpr size_t kRepeats = 15;

struct Combination {
  const char* name;
  GenerateOptions options;
};

GenerateOptions Options(float temperature, size_t top_k = 0, float top_p = 1,
                        float min_p = 0) {
  GenerateOptions options;
  options.temperature = temperature;
  options.top_k = top_k;
  options.top_p = top_p;
  options.min_p = min_p;
  return options;
}

std::vector<Combination> Combinations() {
  std::vector<Combination> all = {
      {"temperature 1", Options(1)},
      {"top_k 40", Options(1, 40)},
      {"top_k 64, top_p .95", Options(1, 64, 0.95f)},
      {"top_k 2000, top_p .95", Options(1, 2000, 0.95f)},
      {"min_p .05", Options(1, 0, 1, 0.05f)},
      {"top_p .9", Options(1, 0, 0.9f)},
      {"top_p .95", Options(1, 0, 0.95f)},
      {"top_p .95, min_p .01", Options(1, 0, 0.95f, 0.01f)},
      {"top_p .99", Options(1, 0, 0.99f)},
      {"temperature .7, top_p .95", Options(0.7f, 0, 0.95f)},
      {"temperature 1.5, top_p .95", Options(1.5f, 0, 0.95f)},
  };
  GenerateOptions penalties = Options(1, 0, 0.95f);
  penalties.repetition_penalty = 1.1f;
  penalties.frequency_penalty = 0.1f;
  penalties.logit_bias = {{1, -100.0f}};
  all.push_back({"top_p .95, penalties", penalties});
  GenerateOptions logprobs = Options(1, 0, 0.95f);
  logprobs.logprobs = true;
  all.push_back({"top_p .95, logprobs", logprobs});
  return all;
}

std::vector<float> Normal(float deviation) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> row(kVocabSize);
  for (float& logit : row) logit = normal(rng);
  return row;
}

std::vector<float> ReadRows(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const std::streamoff bytes = file ? std::streamoff(file.tellg()) : 0;
  const size_t rows = static_cast<size_t>(bytes) / (kVocabSize * sizeof(float));
  std::vector<float> logits(rows * kVocabSize);
  file.seekg(0);
  file.read(reinterpret_cast<char*>(logits.data()),
            static_cast<std::streamsize>(logits.size() * sizeof(float)));
  return file ? logits : std::vector<float>();
}

// Returns the microseconds of the best draw from `row`.
double Best(const GenerateOptions& options, std::span<const float> row) {
  std::vector<int32_t> transcript(1000);  // a context for the penalties
  for (size_t i = 0; i < transcript.size(); ++i) {
    transcript[i] = static_cast<int32_t>(i * 211);
  }
  Sampler sampler(options, 1, transcript);
  std::vector<float> logits(row.size());
  double best = 1e30;
  for (size_t i = 0; i < kRepeats; ++i) {
    std::copy(row.begin(), row.end(), logits.begin());
    const auto begin = std::chrono::steady_clock::now();
    sampler.Next(logits, i);
    const std::chrono::duration<double, std::micro> spent =
        std::chrono::steady_clock::now() - begin;
    best = std::min(best, spent.count());
  }
  return best;
}

void Run(const std::string& path) {
  std::vector<std::vector<float>> made_up = {Normal(4.6f), Normal(4.6f),
                                             Normal(2)};
  made_up[0][1000] = 60;
  const std::vector<float> rows = ReadRows(path);
  if (!path.empty() && rows.empty()) {
    std::printf("no rows of %zu logits in %s\n", kVocabSize, path.c_str());
  }
  std::printf("microseconds a draw, %s\n%-28s %7s %7s %7s",
              CurrentTarget().c_str(), "", "peaked", "usual", "flat");
  if (!rows.empty()) std::printf(" | %7s %7s %7s", "median", "9/10", "worst");
  std::printf("\n");
  for (const Combination& combination : Combinations()) {
    std::printf("%-28s", combination.name);
    for (const std::vector<float>& row : made_up) {
      std::printf(" %7.1f", Best(combination.options, row));
    }
    std::vector<double> times;
    for (size_t i = 0; i < rows.size(); i += kVocabSize) {
      times.push_back(
          Best(combination.options, std::span(rows).subspan(i, kVocabSize)));
    }
    if (!times.empty()) {
      std::sort(times.begin(), times.end());
      std::printf(" | %7.1f %7.1f %7.1f", times[times.size() / 2],
                  times[times.size() * 9 / 10], times.back());
    }
    std::printf("\n");
  }
}

}  // namespace
}  // namespace gkv

int main(int argc, char** argv) {
  try {
    const gkv::ScopedFpEnvironment fp_environment;
    if (argc > 2) gkv::ForceTarget(argv[2]);
    gkv::Run(argc > 1 ? argv[1] : "");
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
