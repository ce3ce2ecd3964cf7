// Fuzzer of the GGUF reader. Reads each input as thoroughly as the interface
// allows; anything but a sound file or a well-formed CorruptFile is a finding.
// Build it with sanitizers (preset dev); the command line is fuzzer.h's.
//
// With clang, as a libFuzzer target:
//   clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined
//     -DGEMMAKV_LIBFUZZER -Icpp -Itests/cpp tests/fuzz/gguf_fuzz.cc
//     cpp/io/*.cc -o gguf_libfuzzer

#include "io/gguf_exercise.h"

#ifdef GEMMAKV_LIBFUZZER

#include <cstdio>
#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const gkv::GgufOutcome outcome = gkv::ExerciseGguf({data, size});
  if (!outcome.violation.empty()) {
    std::fprintf(stderr, "gguf_fuzz: %s\n", outcome.violation.c_str());
    std::abort();
  }
  return 0;
}

#else

#include "fuzzer.h"

namespace {

gkv::fuzz::Outcome Run(std::span<const uint8_t> input) {
  const gkv::GgufOutcome outcome = gkv::ExerciseGguf(input);
  return {outcome.accepted, outcome.message, outcome.violation};
}

gkv::fuzz::Bytes Mutate(gkv::fuzz::Mutator& mutator,
                        const gkv::fuzz::Bytes& input,
                        const gkv::fuzz::Bytes& other) {
  return mutator.Mutate(input, other);
}

}  // namespace

int main(int argc, char** argv) {
  return gkv::fuzz::Main({"gguf", &Run, &Mutate}, argc, argv);
}

#endif  // GEMMAKV_LIBFUZZER
