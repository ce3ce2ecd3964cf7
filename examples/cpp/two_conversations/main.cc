// Two conversations on one set of weights: the second is a fork of the first,
// and neither sees what the other says from there on.
//
// Usage: two_conversations MODEL.gguf
// Without a model it runs on a tiny one with random weights, to show the calls.

#include <gemmakv/gemma.h>

#include <cstdio>
#include <vector>

#include "random_model.h"

namespace {

void Print(const char* name, const gkv::KVCache& cache) {
  std::printf("%-7s %3zu tokens, %8zu bytes of its own, %8zu shared:", name,
              cache.length(), cache.nbytes(), cache.shared_nbytes());
  for (const int32_t token : cache.tokens()) std::printf(" %d", token);
  std::printf("\n");
}

int Run(const char* path) {
  const gkv::Gemma gemma =
      path != nullptr ? gkv::Gemma::Load(path) : RandomModel();

  // A cache needs a shape, not weights, and grows as the conversation does.
  gkv::KVCache parent =
      gkv::CreateKVCache(gemma.config(), {.capacity_tokens = 512});
  gkv::GenerateOptions options;
  options.max_tokens = 8;
  const std::vector<int32_t> prompt = {2, 10, 20, 30};
  gemma.Generate(parent, prompt, options, [](const gkv::TokenEvent& event) {
    if (event.token_id >= 0) std::printf("sampled %d\n", event.token_id);
    return true;  // false would cancel
  });

  // The fork shares every block; each copies a block before writing to it.
  gkv::KVCache fork = parent.Fork();
  const std::vector<int32_t> one = {40}, other = {50};
  gemma.Generate(parent, one, options);
  gemma.Generate(fork, other, options);
  Print("parent", parent);
  Print("fork", fork);

  // Bytes go to any medium and come back as a conversation.
  gkv::KVCache restored = gkv::KVCache::FromBytes(fork.ToBytes());
  const auto a = gemma.Generate(restored, {}, options).token_ids;
  const auto b = gemma.Generate(fork, {}, options).token_ids;
  std::printf("restored and original continue %s\n",
              a == b ? "alike" : "differently");
  return a == b ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Run(argc > 1 ? argv[1] : nullptr);
  } catch (const gkv::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
