// The functions of Conversation that inspect its content: layers, sealed
// blocks, bytes.

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/fp_environment.h"
#include "base/rounding.h"
#include "cache/conversation.h"
#include "cache/snapshot.h"
#include "ops/kv_strip.h"

namespace gkv {
namespace {

constexpr size_t kAll = std::numeric_limits<size_t>::max();

}  // namespace

std::pair<size_t, size_t> Conversation::HeldRange(size_t layer) const {
  MutexLock lock(state_mutex_);
  return state_.groups[layout_->group_of(layer)]->Held();
}

size_t Conversation::LayerBytes(size_t layer) const {
  const KvLayerSpec& spec = layout_->layers()[layer];
  if (spec.shares) return 0;
  std::vector<const Block*> blocks;
  {
    MutexLock lock(state_mutex_);
    state_.groups[layout_->group_of(layer)]->AddBlocks(blocks);
  }
  const size_t bytes = spec.kind == LayerKind::kRecurrent
                           ? layout_->state_floats(layer) * sizeof(float)
                           : 2 * spec.kv_heads * layout_->strip_bytes(layer);
  return blocks.size() * bytes;
}

std::vector<float> Conversation::CopyLayer(size_t layer, bool values) const {
  const ScopedFpEnvironment fp_environment;
  const KvContent copy = Export();
  const KvLayerSpec& spec = layout_->layers()[layer];
  const size_t block_tokens = layout_->block_tokens();
  const auto load = values ? LoadValue : LoadKey;
  const GroupCache& group = *copy.groups[layout_->group_of(layer)];
  const auto [begin, end] = group.Held();
  std::vector<float> out;
  out.reserve((end - begin) * spec.kv_heads * spec.head_dim);
  for (const HeldBlock& held : group.Export(kAll)) {
    for (size_t position = held.begin; position < held.end; ++position) {
      for (size_t head = 0; head < spec.kv_heads; ++head) {
        const size_t strip = values ? layout_->value_offset(layer, head)
                                    : layout_->key_offset(layer, head);
        out.resize(out.size() + spec.head_dim);
        load(layout_->dtype(), held.block.data() + strip, spec.head_dim,
             position % block_tokens, block_tokens,
             out.data() + out.size() - spec.head_dim);
      }
    }
  }
  return out;
}

std::vector<float> Conversation::CopyLayerState(size_t layer) const {
  const KvContent copy = Export();
  const std::vector<HeldBlock> held =
      copy.groups[layout_->group_of(layer)]->Export(kAll);
  std::vector<float> out(layout_->state_floats(layer));
  if (!held.empty()) {
    std::memcpy(out.data(),
                held.back().block.data() + layout_->state_offset(layer),
                out.size() * sizeof(float));
  }
  return out;
}

std::vector<SealedBlock> Conversation::SealedBlocks(size_t from) const {
  const KvContent copy = Export();
  const size_t block_tokens = layout_->block_tokens();
  std::vector<SealedBlock> sealed;
  const size_t first = CeilDiv(from, block_tokens);
  for (size_t i = first; i < copy.computed / block_tokens; ++i) {
    sealed.push_back({i * block_tokens, copy.log.SealedPage(i),
                      std::vector<HeldBlock>(copy.groups.size())});
  }
  for (size_t g = 0; g < copy.groups.size(); ++g) {
    for (HeldBlock& held : copy.groups[g]->Export(copy.computed)) {
      const bool state = held.begin == held.end;
      const size_t block = (held.end - 1) / block_tokens;
      if (block < first || block - first >= sealed.size() ||
          (state && held.end % block_tokens != 0)) {
        continue;
      }
      sealed[block - first].held[g] = std::move(held);
    }
  }
  return sealed;
}

void Conversation::Save(const ByteSink& sink, bool checkpoints) const {
  SnapshotWriter(*this, checkpoints).Write(sink);
}

std::vector<uint8_t> Conversation::ToBytes(bool checkpoints) const {
  const SnapshotWriter writer(*this, checkpoints);
  std::vector<uint8_t> bytes;
  bytes.reserve(writer.size_bytes());
  writer.Write([&](std::span<const uint8_t> piece) {
    bytes.insert(bytes.end(), piece.begin(), piece.end());
  });
  return bytes;
}

}  // namespace gkv
