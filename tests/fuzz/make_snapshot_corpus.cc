// Writes the seeds of the snapshot fuzzer in the format that is written today:
//
//   make_snapshot_corpus FOLDER
//
// Small conversations, each in another state. Same bytes every time. Seeds of
// earlier format versions (v1_*.kv) stay as they are.

#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cache/conversation.h"

namespace gkv {
namespace {

const KvLayerSpec kFullLayer{LayerKind::kFull, 1, 32, 0};
const KvLayerSpec kSlidingLayer{LayerKind::kSliding, 1, 32, 5};
const KvLayerSpec kRecurrentLayer{LayerKind::kRecurrent, 0, 0, 0, 16, 3};

std::unique_ptr<Conversation> Empty(std::vector<KvLayerSpec> layers,
                                    KvDtype dtype) {
  CacheOptions options;
  options.capacity_tokens = 100;
  options.block_tokens = 16;
  options.checkpoint_bytes = size_t{1} << 20;
  return std::make_unique<Conversation>(
      std::make_shared<KvLayout>(std::move(layers), dtype, 16), options,
      "corpus");
}

// Adds `count` tokens and computes all but the last `pending`, in steps of
// five, with keys, values and states that are no numbers of a model.
void Extend(Conversation& cache, size_t count, size_t pending = 0) {
  std::vector<int32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), static_cast<int32_t>(cache.length()));
  cache.Append(cache.Lock(), tokens);
  cache.Bind({1, 2});
  while (cache.next_position() + pending < cache.length()) {
    const size_t begin = cache.next_position();
    const size_t end = std::min(begin + 5, cache.length() - pending);
    KvStepView step = cache.Prepare(cache.Lock(), begin, end);
    for (GroupStep& group : step.groups) {
      for (auto& [index, block] : group.fresh) {
        std::memset(block.data(), static_cast<int>(0x30 + begin % 16),
                    block.size_bytes());
      }
    }
    cache.Commit(cache.Lock(), step);
  }
}

void Write(const std::string& folder, const char* name,
           const Conversation& cache) {
  const std::vector<uint8_t> bytes = cache.ToBytes(true);
  const std::string path = folder + "/" + name + ".kv";
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  std::printf("%s: %zu bytes\n", path.c_str(), bytes.size());
}

void WriteAll(const std::string& folder) {
  const auto write = [&](const char* name, std::vector<KvLayerSpec> layers,
                         KvDtype dtype, size_t count, size_t pending) {
    const auto cache = Empty(std::move(layers), dtype);
    if (count > 0) Extend(*cache, count, pending);
    Write(folder, name, *cache);
  };
  write("empty", {kSlidingLayer, kFullLayer}, KvDtype::kBF16, 0, 0);
  write("f32", {kSlidingLayer, kFullLayer}, KvDtype::kF32, 9, 0);
  write("bf16", {kSlidingLayer, kFullLayer}, KvDtype::kBF16, 33, 1);
  write("int8", {kSlidingLayer, kFullLayer}, KvDtype::kInt8, 40, 3);
  write("full", {kFullLayer}, KvDtype::kInt8, 30, 0);
  write("sliding", {kSlidingLayer}, KvDtype::kBF16, 60, 0);
  write("recurrent", {kRecurrentLayer}, KvDtype::kBF16, 20, 0);
  write("hybrid", {kRecurrentLayer, kSlidingLayer, kRecurrentLayer},
        KvDtype::kBF16, 20, 1);

  const auto lost = Empty({kSlidingLayer, kFullLayer}, KvDtype::kInt8);
  Extend(*lost, 60);
  lost->Truncate(24);
  Write(folder, "lost", *lost);

  KvLayerSpec wide = kSlidingLayer, shared = kSlidingLayer;
  wide.window = 12;
  shared.shares = 0;
  const std::pair<const char*, std::vector<KvLayerSpec>> kinds[] = {
      {"checkpoints_windows", {kSlidingLayer, kFullLayer, wide, shared}},
      {"checkpoints", {kSlidingLayer, kFullLayer}},
      {"checkpoints_hybrid", {kRecurrentLayer, kSlidingLayer}},
      {"checkpoints_recurrent", {kRecurrentLayer, kFullLayer}}};
  for (const auto& [name, layers] : kinds) {
    const auto cache = Empty(layers, KvDtype::kInt8);
    for (int turn = 0; turn < 4; ++turn) {
      Extend(*cache, 11, turn % 2);
      cache->MakeCheckpoint();
    }
    Extend(*cache, 3, 1);
    Write(folder, name, *cache);
  }
}

}  // namespace
}  // namespace gkv

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: make_snapshot_corpus FOLDER\n");
    return 2;
  }
  gkv::WriteAll(argv[1]);
  return 0;
}
