#ifndef GEMMAKV_TESTS_FUZZ_FUZZER_H_
#define GEMMAKV_TESTS_FUZZ_FUZZER_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

// What the fuzzers of byte formats share: mutations, a pool of inputs that do
// something new, and the command line
//
//   NAME_fuzz [--seconds N] [--seed N] PATH...
//
// which runs the seeds (files, or folders of files) and then mutates them for
// N seconds. The seed fixes the order of mutations, so that a finding can be
// repeated; the input is also written to NAME_fuzz_finding.

// Present in programs that are built with a sanitizer.
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(
    void (*callback)());

namespace gkv::fuzz {

using Bytes = std::vector<uint8_t>;

// What reading one input led to.
struct Outcome {
  bool accepted = false;
  std::string message;    // why it was refused
  std::string violation;  // what broke the reader's contract; empty if nothing
};

inline constexpr size_t kMaxInputBytes = 16384;
inline constexpr size_t kMaxPool = 2000;

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : rng_(seed) {}

  size_t Below(size_t limit) { return limit == 0 ? 0 : rng_() % limit; }

  // One to six changes, some of them parts of `other`.
  Bytes Mutate(Bytes bytes, const Bytes& other) {
    for (size_t changes = 1 + Below(6); changes > 0; --changes) {
      Change(bytes, other);
    }
    if (bytes.size() > kMaxInputBytes) bytes.resize(kMaxInputBytes);
    return bytes;
  }

 private:
  void Change(Bytes& bytes, const Bytes& other) {
    if (bytes.empty()) bytes.push_back(0);
    const size_t at = Below(bytes.size());
    const auto here = bytes.begin() + static_cast<ptrdiff_t>(at);
    const size_t length = 1 + Below(std::min<size_t>(64, bytes.size() - at));
    switch (Below(10)) {
      case 0:
        bytes[at] ^= static_cast<uint8_t>(1 << Below(8));
        break;
      case 1:
        bytes[at] = static_cast<uint8_t>(rng_());
        break;
      case 2:
      case 3:
        Overwrite(bytes, at, Number(bytes, at), 8);
        break;
      case 4:
        Overwrite(bytes, at, Number(bytes, at), 4);
        break;
      case 5:
        Overwrite(bytes, at, Below(16), 4);  // another type, dimension, ...
        break;
      case 6:
        bytes.erase(here, here + static_cast<ptrdiff_t>(length));
        break;
      case 7: {
        const Bytes part(here, here + static_cast<ptrdiff_t>(length));
        bytes.insert(here, part.begin(), part.end());
        break;
      }
      case 8: {  // the start of this one, the end of another
        const size_t from = Below(other.size());
        bytes.resize(at);
        bytes.insert(bytes.end(), other.begin() + static_cast<ptrdiff_t>(from),
                     other.end());
        break;
      }
      default:
        bytes.resize(at);
        break;
    }
  }

  // Little-endian, as much of it as fits.
  static void Overwrite(Bytes& bytes, size_t at, uint64_t value, size_t size) {
    std::memcpy(&bytes[at], &value, std::min(size, bytes.size() - at));
  }

  // Numbers at which length arithmetic goes wrong.
  uint64_t Number(const Bytes& bytes, size_t at) {
    const uint64_t left = bytes.size() - at;
    const uint64_t numbers[] = {0,
                                1,
                                Below(300),
                                bytes.size(),
                                left,
                                left - std::min<uint64_t>(left, 8),
                                left / 8,
                                at,
                                uint64_t{1} << Below(64),
                                (uint64_t{1} << Below(64)) - 1,
                                ~uint64_t{0} - Below(64),
                                ~uint64_t{0} << Below(64),
                                ~uint64_t{0} / (1 + Below(256)),
                                rng_()};
    return numbers[Below(std::size(numbers))];
  }

  std::mt19937_64 rng_;
};

// One format.
struct Target {
  std::string name;
  Outcome (*run)(std::span<const uint8_t> input);
  // A changed `input`, perhaps with parts of `other`.
  Bytes (*mutate)(Mutator& mutator, const Bytes& input, const Bytes& other);
};

namespace internal {

inline const Target* target = nullptr;
inline const Bytes* running = nullptr;  // the input that is being read

inline void SaveFinding() {
  if (running == nullptr) return;
  const std::string path = target->name + "_fuzz_finding";
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(running->data()),
             static_cast<std::streamsize>(running->size()));
  std::fprintf(stderr, "%s_fuzz: the input is in %s\n", target->name.c_str(),
               path.c_str());
}

inline Outcome Run(const Bytes& input) {
  // An allocation of exactly this size: reads past its end are seen.
  const Bytes exact(input.begin(), input.end());
  running = &exact;
  Outcome outcome = target->run(exact);
  if (!outcome.violation.empty()) {
    std::fprintf(stderr, "%s_fuzz: %s\n", target->name.c_str(),
                 outcome.violation.c_str());
    SaveFinding();
    std::exit(1);
  }
  running = nullptr;
  return outcome;
}

inline Bytes ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(file), {});
}

// In the order of their names, so that a seed means the same everywhere.
inline std::vector<Bytes> ReadSeeds(const std::vector<std::string>& paths) {
  std::vector<std::filesystem::path> files;
  for (const std::string& path : paths) {
    if (std::filesystem::is_directory(path)) {
      for (const auto& entry : std::filesystem::directory_iterator(path)) {
        files.push_back(entry.path());
      }
    } else {
      files.push_back(path);
    }
  }
  std::sort(files.begin(), files.end());
  std::vector<Bytes> seeds;
  for (const auto& file : files) seeds.push_back(ReadFile(file));
  return seeds;
}

// What an input does to the reader, without the numbers: inputs that do
// something new are worth mutating further.
inline std::string Kind(const Outcome& outcome) {
  std::string kind = outcome.accepted ? "accepted: " : "refused: ";
  for (const char c : outcome.message) {
    if (c < '0' || c > '9') kind += c;
  }
  return kind;
}

inline int Fuzz(double seconds, uint64_t seed,
                const std::vector<std::string>& paths) {
  using Clock = std::chrono::steady_clock;
  std::vector<Bytes> pool = ReadSeeds(paths);
  std::set<std::string> kinds;
  size_t accepted = 0;
  for (const Bytes& input : pool) kinds.insert(Kind(Run(input)));
  size_t executions = pool.size();
  const char* name = target->name.c_str();
  if (pool.empty()) {
    std::fprintf(stderr, "%s_fuzz: found no seeds, expected some\n", name);
    return 2;
  }
  Mutator mutator(seed);
  const auto start = Clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  while (elapsed() < seconds) {
    for (int i = 0; i < 100; ++i, ++executions) {
      const Bytes& parent = pool[mutator.Below(pool.size())];
      const Bytes& other = pool[mutator.Below(pool.size())];
      Bytes input = target->mutate(mutator, parent, other);
      const Outcome outcome = Run(input);
      accepted += outcome.accepted;
      if (kinds.insert(Kind(outcome)).second && pool.size() < kMaxPool) {
        pool.push_back(std::move(input));
      }
    }
  }
  std::printf(
      "%s_fuzz: %zu executions in %.0f s, %zu mutants accepted, %zu kinds "
      "of outcome, no finding\n",
      name, executions, elapsed(), accepted, kinds.size());
  return 0;
}

}  // namespace internal

// The program. Exits with 0, 1 for a finding, 2 for no seeds.
inline int Main(const Target& target, int argc, char** argv) {
  internal::target = &target;
  double seconds = 0;
  uint64_t seed = 1;
  std::vector<std::string> paths;
  const std::vector<std::string> args(argv + 1, argv + argc);
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i] == "--seconds" && i + 1 < args.size()) {
      seconds = std::strtod(args[++i].c_str(), nullptr);
    } else if (args[i] == "--seed" && i + 1 < args.size()) {
      seed = std::strtoull(args[++i].c_str(), nullptr, 10);
    } else {
      paths.push_back(args[i]);
    }
  }
  if (__sanitizer_set_death_callback != nullptr) {
    __sanitizer_set_death_callback(internal::SaveFinding);
  }
  return internal::Fuzz(seconds, seed, paths);
}

}  // namespace gkv::fuzz

#endif  // GEMMAKV_TESTS_FUZZ_FUZZER_H_
