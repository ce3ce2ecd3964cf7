"""A prefix cache as one model sees it."""

from __future__ import annotations

from gemmakv import _core
from gemmakv.cache._kv_cache import KVCache, create_kv_cache
from gemmakv.cache._prefix import PrefixCache, PrefixStats
from gemmakv.errors import brief
from gemmakv.generation._prompts import Prompt, TokenArray, prompt_ids
from gemmakv.models._config import ModelConfig
from gemmakv.tokenizers._tokenizer import Tokenizer


class ModelPrefixCache:
    """What a model, for one tenant, has of a prefix cache."""

    def __init__(
        self,
        cache: PrefixCache,
        engine: _core.Engine,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._cache = cache
        self._engine = engine
        self._config = config
        self._tokenizer = tokenizer

    def __repr__(self) -> str:
        return repr(self._cache)

    @property
    def cache(self) -> PrefixCache:
        """Give it to `Gemma.load` for other models."""
        return self._cache

    def stats(self) -> PrefixStats:
        """Those of the whole cache."""
        return self._cache.stats()

    def match(self, prompt: Prompt) -> KVCache:
        """A new conversation of the part of `prompt` that needs no computing:
        at most all but its last token. `cache.tokens` says which.

        A str gets BOS in front; token ids are taken as they are.
        """
        ids = prompt_ids("prompt", prompt, self._config, self._tokenizer, False)
        cache = create_kv_cache(self._config)
        _core.prefix_match(self._engine, cache._core, ids)
        return cache

    def prefetch(self, prompt: Prompt) -> int:
        """Brings what the tiers below RAM have of `prompt` into RAM, and
        waits for it. Returns how many of its tokens RAM has then: what a
        request that comes soon need not compute.
        """
        ids = prompt_ids("prompt", prompt, self._config, self._tokenizer, False)
        cache = create_kv_cache(self._config)
        return _core.prefix_prefetch(self._engine, cache._core, ids)

    def _remove(self, ids: TokenArray, shared: int, kv_dtype: str) -> int:
        """Removes from the tiers of files what begins as these token ids, and
        with more of them than the first `shared`. Returns the objects that
        went.
        """
        like = create_kv_cache(self._config, kv_dtype=kv_dtype)
        return _core.prefix_remove(self._engine, like._core, ids, shared)

    def publish(self, cache: KVCache) -> None:
        """Takes in what a conversation of this model has computed, as the end
        of each request does.

        Raises ValueError for what is no KVCache.
        """
        if not isinstance(cache, KVCache):
            raise ValueError(f"cache: expected a KVCache, found {brief(cache)}")
        _core.prefix_publish(self._engine, cache._core)
