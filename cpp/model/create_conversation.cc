#include "model/create_conversation.h"

#include "base/error.h"

namespace gkv {

bool HoldsConversations(const ModelConfig& config) {
  return !config.bidirectional && config.target_hidden == 0;
}

void RequireConversations(const ModelConfig& config) {
  if (HoldsConversations(config)) return;
  const std::string& name =
      config.name.empty() ? config.architecture : config.name;
  if (config.target_hidden != 0) {
    throw InvalidArgument(
        StrCat(name,
               " is a drafter: it guesses for a Gemma 4 of hidden_size ",
               config.target_hidden,
               " and generates nothing alone; expected that model, with this "
               "one as its draft="));
  }
  throw InvalidArgument(
      StrCat(name,
             " makes embeddings of texts and holds no conversation: expected "
             "embed (a method, and a command of gemmakv), which needs none"));
}

std::shared_ptr<Conversation> CreateConversation(ModelType type,
                                                 const CacheOptions& options) {
  return CreateConversation(ConfigOf(type), options);
}

std::shared_ptr<Conversation> CreateConversation(const ModelConfig& config,
                                                 const CacheOptions& options) {
  config.Validate();
  RequireConversations(config);
  CacheOptions full = options;
  if (full.capacity_tokens == 0) full.capacity_tokens = config.context_length;
  if (full.capacity_tokens > config.context_length) {
    throw InvalidArgument(Unexpected(
        "capacity_tokens",
        StrCat("at most the model's context of ", config.context_length),
        full.capacity_tokens));
  }
  return std::make_shared<Conversation>(
      config.MakeKvLayout(full.kv_dtype, full.block_tokens), full, config.name);
}

}  // namespace gkv
