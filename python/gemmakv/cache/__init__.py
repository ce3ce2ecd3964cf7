"""Conversations: KV caches, their block pools, padded caches."""
