#ifndef GEMMAKV_TESTS_CPP_IO_GGUF_EXERCISE_H_
#define GEMMAKV_TESTS_CPP_IO_GGUF_EXERCISE_H_

#include <cstdint>
#include <exception>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/error.h"
#include "io/gguf.h"

// Reads a GGUF file of unknown origin as thoroughly as anyone can: what tests
// of broken files and the fuzzer share.

namespace gkv {

struct GgufOutcome {
  bool accepted = false;  // the constructor took the file
  std::string message;    // of the last CorruptFile
  std::string violation;  // what broke the reader's contract; empty if nothing
};

namespace gguf_exercise {

inline constexpr std::string_view kPath = "some.gguf";

// A message is one line of printable ASCII that begins with path and offset.
inline std::string CheckMessage(std::string_view message) {
  for (const char c : message) {
    if (c < 0x20 || c > 0x7E) return "a message has unprintable bytes";
  }
  const std::string start = std::string(kPath) + ": offset ";
  if (!message.starts_with(start) ||
      message.find(", expected ") == std::string_view::npos ||
      message.find("found ") == std::string_view::npos) {
    return "a message lacks path, offset, found or expected: " +
           std::string(message);
  }
  return {};
}

// Runs `read`, which may throw CorruptFile and nothing else.
template <typename Read>
void Try(GgufOutcome& outcome, const Read& read) {
  std::string problem;
  try {
    read();
  } catch (const CorruptFile& error) {
    outcome.message = error.what();
    problem = CheckMessage(outcome.message);
  } catch (const std::exception& error) {
    problem = std::string("threw something else: ") + error.what();
  }
  if (outcome.violation.empty()) outcome.violation = problem;
}

template <typename Bytes>
uint64_t Sum(const Bytes& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), uint64_t{0});
}

// Touches every byte that a value refers to.
inline uint64_t Touch(const GgufValue& value) {
  if (const auto* text = std::get_if<std::string_view>(&value)) {
    return Sum(*text);
  }
  uint64_t sum = 1;
  if (const auto* array = std::get_if<GgufArray>(&value)) {
    using Strings = std::vector<std::string_view>;
    if (const auto* strings = std::get_if<Strings>(&array->values)) {
      for (const std::string_view text : *strings) sum += Sum(text);
    }
  }
  return sum;
}

inline void ReadMetadata(const GgufFile& file, GgufOutcome& outcome,
                         volatile uint64_t* sink) {
  for (const std::string& key : file.Keys()) {
    Try(outcome, [&] { *sink = *sink + Touch(file.Get(key).value()); });
    Try(outcome, [&] { (void)file.GetUint(key); });
    Try(outcome, [&] { (void)file.GetFloat(key); });
    Try(outcome, [&] { (void)file.GetBool(key); });
    Try(outcome, [&] { *sink = *sink + Sum(*file.GetString(key)); });
    Try(outcome, [&] { (void)file.GetStrings(key); });
    Try(outcome, [&] { (void)file.GetFloats(key); });
    Try(outcome, [&] { (void)file.GetInts(key); });
  }
}

inline void ReadTensors(GgufFile& file, std::span<const uint8_t> bytes,
                        GgufOutcome& outcome, volatile uint64_t* sink) {
  for (const GgufFile::TensorInfo& info : file.tensors()) {
    if (info.offset > bytes.size() ||
        info.size_bytes > bytes.size() - info.offset) {
      outcome.violation = "a tensor lies outside the file";
      return;
    }
  }
  for (const std::string& name : file.Names()) {
    Try(outcome, [&] {
      const TensorView view = file.Find(name).value();
      *sink = *sink + Sum(std::span(view.data, view.size_bytes()));
      file.Release(view, 0, view.size_bytes());
    });
  }
}

}  // namespace gguf_exercise

inline GgufOutcome ExerciseGguf(std::span<const uint8_t> bytes) {
  volatile uint64_t sink = 0;  // keeps the reads from being optimized away
  GgufOutcome outcome;
  gguf_exercise::Try(outcome, [&] {
    GgufFile file(bytes, std::string(gguf_exercise::kPath));
    outcome.accepted = true;
    gguf_exercise::ReadMetadata(file, outcome, &sink);
    gguf_exercise::ReadTensors(file, bytes, outcome, &sink);
  });
  return outcome;
}

}  // namespace gkv

#endif  // GEMMAKV_TESTS_CPP_IO_GGUF_EXERCISE_H_
