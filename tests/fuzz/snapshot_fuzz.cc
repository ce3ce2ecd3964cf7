// Fuzzer of snapshot restore. Restores each input and uses what comes of it;
// anything but a sound conversation or a well-formed error is a finding, as is
// a conversation beside it that changes. Build it with sanitizers (preset
// dev); the command line is fuzzer.h's.
//
// Checksums would stop nearly every mutant at the door. So most mutations
// change one section and seal it again, as an attacker would: sections are
// found as runs of bytes that the hash of just these bytes follows. The seeds
// are of all format versions; make_snapshot_corpus writes those of the present.

#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>

#include "base/hash.h"
#include "cache/snapshot_exercise.h"
#include "fuzzer.h"

namespace gkv {
namespace {

using fuzz::Bytes;

constexpr size_t kSealBytes = sizeof(Hash128);

// A conversation in the same pool, which nothing may touch.
struct Bystander {
  Bystander() {
    pool->set_poison(true);
    const auto layout = std::make_shared<KvLayout>(
        std::vector<KvLayerSpec>{{LayerKind::kFull, 1, 32, 0}}, KvDtype::kF32,
        16);
    CacheOptions options = snapshot_exercise::Options(pool);
    options.capacity_tokens = 64;
    cache = std::make_unique<Conversation>(layout, options, "bystander");
    std::vector<int32_t> tokens(40);
    std::iota(tokens.begin(), tokens.end(), 1);
    cache->Append(cache->Lock(), tokens);
    KvStepView step = cache->Prepare(cache->Lock(), 0, 40);
    for (uint8_t* block : step.groups[0].blocks) {
      std::memset(block, 1, layout->groups()[0].block_bytes);
    }
    cache->Commit(cache->Lock(), step);
    bytes = cache->ToBytes();
  }

  std::shared_ptr<BlockPool> pool =
      BlockPool::Create(snapshot_exercise::kBudgetBytes);
  std::unique_ptr<Conversation> cache;
  std::vector<uint8_t> bytes;
};

fuzz::Outcome Run(std::span<const uint8_t> input) {
  static const Bystander bystander;
  const SnapshotOutcome outcome = ExerciseSnapshot(input, bystander.pool);
  fuzz::Outcome result{outcome.accepted, outcome.message, outcome.violation};
  if (result.violation.empty() &&
      bystander.cache->ToBytes() != bystander.bytes) {
    result.violation = "another conversation has changed";
  }
  return result;
}

struct Sections {
  std::vector<Bytes> sealed;
  Bytes rest;              // bytes behind the last seal
  ptrdiff_t size_at = -1;  // in the first section: where the total size stands
};

Sections Split(const Bytes& input) {
  Sections sections;
  size_t begin = 0;
  while (begin + kSealBytes <= input.size()) {
    Hasher hasher;
    size_t end = begin;
    bool found = false;
    for (; end + kSealBytes <= input.size(); ++end) {
      const Hash128 hash = hasher.Finish();
      uint8_t seal[kSealBytes];
      std::memcpy(seal, &hash.low, 8);
      std::memcpy(seal + 8, &hash.high, 8);
      found = std::memcmp(seal, &input[end], kSealBytes) == 0;
      if (found) break;
      hasher.Update({&input[end], 1});
    }
    if (!found) break;
    sections.sealed.emplace_back(input.begin() + static_cast<ptrdiff_t>(begin),
                                 input.begin() + static_cast<ptrdiff_t>(end));
    begin = end + kSealBytes;
  }
  sections.rest.assign(input.begin() + static_cast<ptrdiff_t>(begin),
                       input.end());
  if (sections.sealed.empty()) return sections;
  const Bytes& header = sections.sealed[0];
  for (size_t at = 0; at + 8 <= header.size(); ++at) {
    uint64_t size;
    std::memcpy(&size, &header[at], 8);
    if (size == input.size()) {
      sections.size_at = static_cast<ptrdiff_t>(at);
      break;
    }
  }
  return sections;
}

const Sections& SplitOnce(const Bytes& input) {
  static std::map<Hash128, Sections> known;
  const Hash128 key = HashBytes(input);
  const auto it = known.find(key);
  return it != known.end() ? it->second : known[key] = Split(input);
}

Bytes Join(Sections sections, bool fix_size) {
  size_t total = sections.rest.size();
  for (const Bytes& section : sections.sealed) {
    total += section.size() + kSealBytes;
  }
  const size_t at = static_cast<size_t>(sections.size_at);
  if (fix_size && sections.size_at >= 0 &&
      at + 8 <= sections.sealed[0].size()) {
    const uint64_t size = total;
    std::memcpy(&sections.sealed[0][at], &size, 8);
  }
  Bytes bytes;
  for (const Bytes& section : sections.sealed) {
    bytes.insert(bytes.end(), section.begin(), section.end());
    const Hash128 hash = HashBytes(section);
    const size_t seal = bytes.size();
    bytes.resize(seal + kSealBytes);
    std::memcpy(&bytes[seal], &hash.low, 8);
    std::memcpy(&bytes[seal + 8], &hash.high, 8);
  }
  bytes.insert(bytes.end(), sections.rest.begin(), sections.rest.end());
  return bytes;
}

Bytes Mutate(fuzz::Mutator& mutator, const Bytes& input, const Bytes& other) {
  Sections sections = SplitOnce(input);
  if (sections.sealed.empty() || mutator.Below(8) == 0) {
    return mutator.Mutate(input, other);
  }
  const std::vector<Bytes>& others = SplitOnce(other).sealed;
  // The header has most to say.
  const size_t at =
      mutator.Below(2) ? 0 : mutator.Below(sections.sealed.size());
  const Bytes& donor = at < others.size() ? others[at] : sections.sealed[at];
  if (mutator.Below(8) == 0) {
    sections.sealed[at] = donor;  // sections of two snapshots
  } else {
    sections.sealed[at] = mutator.Mutate(sections.sealed[at], donor);
  }
  return Join(std::move(sections), mutator.Below(8) != 0);
}

}  // namespace
}  // namespace gkv

int main(int argc, char** argv) {
  return gkv::fuzz::Main({"snapshot", &gkv::Run, &gkv::Mutate}, argc, argv);
}
