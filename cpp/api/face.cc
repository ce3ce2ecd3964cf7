// Implements include/gemmakv/kv_cache.h and gemma.h by the core's Conversation
// and Engine.

#include <chrono>
#include <memory>
#include <utility>

#include "engine/engine.h"
#include "gemmakv/gemma.h"
#include "gemmakv/kv_cache.h"
#include "model/create_conversation.h"
#include "model/embedding.h"

namespace gkv {
inline namespace v0 {

struct KVCache::Core {
  std::shared_ptr<Conversation> cache;
};

KVCache::KVCache(std::unique_ptr<Core> core) : core_(std::move(core)) {}
KVCache::KVCache(KVCache&&) noexcept = default;
KVCache& KVCache::operator=(KVCache&&) noexcept = default;
KVCache::~KVCache() = default;

const std::string& KVCache::model_type() const {
  return core_->cache->model_type();
}
size_t KVCache::capacity_tokens() const {
  return core_->cache->capacity_tokens();
}
size_t KVCache::length() const { return core_->cache->length(); }
std::vector<int32_t> KVCache::tokens() const { return core_->cache->tokens(); }
size_t KVCache::nbytes() const { return core_->cache->nbytes(); }
size_t KVCache::shared_nbytes() const { return core_->cache->shared_nbytes(); }
Hash128 KVCache::fingerprint() const { return core_->cache->fingerprint(); }

KVCache KVCache::Fork() const {
  return KVCache(std::make_unique<Core>(core_->cache->Fork()));
}
Truncation KVCache::Truncate(size_t length) {
  return core_->cache->Truncate(length);
}
bool KVCache::MakeCheckpoint() { return core_->cache->MakeCheckpoint(); }
void KVCache::Reset() { core_->cache->Reset(); }

std::vector<uint8_t> KVCache::ToBytes(bool checkpoints) const {
  return core_->cache->ToBytes(checkpoints);
}
KVCache KVCache::FromBytes(std::span<const uint8_t> bytes,
                           const CacheOptions& options) {
  return KVCache(
      std::make_unique<Core>(Conversation::FromBytes(bytes, options)));
}

KVCache CreateKVCache(ModelType type, const CacheOptions& options) {
  return v0::CreateKVCache(ConfigOf(type), options);
}
KVCache CreateKVCache(const ModelConfig& config, const CacheOptions& options) {
  return KVCache(
      std::make_unique<KVCache::Core>(CreateConversation(config, options)));
}

std::shared_ptr<BlockPool> CreateBlockPool(size_t budget_bytes) {
  return BlockPool::Create(budget_bytes);
}

struct Gemma::Core {
  std::shared_ptr<Engine> gemma;
};

Gemma::Gemma(std::unique_ptr<Core> core) : core_(std::move(core)) {}
Gemma::Gemma(Gemma&&) noexcept = default;
Gemma& Gemma::operator=(Gemma&&) noexcept = default;
Gemma::~Gemma() = default;

Gemma Gemma::Load(const std::string& gguf_path, const LoadOptions& options) {
  return Gemma(std::make_unique<Core>(Engine::Load(gguf_path, options)));
}
Gemma Gemma::FromTensors(const ModelConfig& config, TensorSource& source,
                         const LoadOptions& options) {
  return Gemma(
      std::make_unique<Core>(Engine::FromTensors(config, source, options)));
}

Gemma Gemma::WithDraft(const Gemma& draft) const {
  return Gemma(std::make_unique<Core>(
      core_->gemma->WithDraft(draft.core_->gemma)));
}

const ModelConfig& Gemma::config() const { return core_->gemma->config(); }
Hash128 Gemma::fingerprint() const { return core_->gemma->fingerprint(); }

GenerateResult Gemma::Generate(
    KVCache& cache, std::span<const int32_t> prompt,
    const GenerateOptions& options,
    const std::function<bool(const TokenEvent&)>& on_token) const {
  return core_->gemma->Generate(cache.core_->cache, prompt, options, on_token);
}

std::vector<float> Gemma::Logits(KVCache& cache,
                                 std::span<const int32_t> tokens,
                                 bool all_positions) const {
  std::vector<float> logits((all_positions ? tokens.size() : 1) *
                            config().vocab_size);
  const auto request = core_->gemma->StartLogits(
      cache.core_->cache, tokens, all_positions, logits.data());
  while (!request->WaitDone(std::chrono::hours(1))) continue;
  (void)request->Result();  // throws if it failed
  return logits;
}

std::vector<size_t> Gemma::EmbeddingDims() const {
  return gkv::EmbeddingDims(config());
}

std::vector<float> Gemma::Embed(std::span<const std::vector<int32_t>> texts,
                                const EmbedOptions& options,
                                const std::function<void()>& poll) const {
  const std::vector<std::span<const int32_t>> spans(texts.begin(),
                                                    texts.end());
  return core_->gemma->Embed(spans, options, poll);
}

ThreadPlacement Gemma::placement() const { return core_->gemma->placement(); }

StepProfile Gemma::profile() const { return core_->gemma->profile(); }

}  // namespace v0
}  // namespace gkv
