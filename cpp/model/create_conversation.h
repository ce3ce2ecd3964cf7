#ifndef GEMMAKV_MODEL_CREATE_CONVERSATION_H_
#define GEMMAKV_MODEL_CREATE_CONVERSATION_H_

#include <memory>

#include "cache/conversation.h"
#include "gemmakv/config.h"

namespace gkv {

// Makes an empty conversation of a model of this shape. Needs no weights and
// allocates no key or value storage before the first token.
// Throws InvalidArgument if the capacity exceeds the model's context length or
// an option is out of range, and what RequireConversations throws.
std::shared_ptr<Conversation> CreateConversation(
    ModelType type, const CacheOptions& options = {});
std::shared_ptr<Conversation> CreateConversation(
    const ModelConfig& config, const CacheOptions& options = {});

// Whether a model continues text on its own. Models of embeddings and drafters
// do not.
bool HoldsConversations(const ModelConfig& config);
// Throws InvalidArgument, which says what to do, for a model that does not.
void RequireConversations(const ModelConfig& config);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_CREATE_CONVERSATION_H_
