"""A prefix cache as one model sees it."""

from __future__ import annotations

from typing import Self

from gemmakv import _core
from gemmakv.cache._kv_cache import KVCache, KvDtype, create_kv_cache
from gemmakv.cache._pool import BlockPool
from gemmakv.cache._prefix import PrefixCache, PrefixStats
from gemmakv.errors import unexpected
from gemmakv.generation._prompts import Prompt, TokenArray, check_cache
from gemmakv.generation._requests import Requests


class PinnedPrefix:
    """A prompt that `pin` keeps in RAM; a context manager, which unpins it.

    The prompt stays pinned also where nobody has this object any more.

    Attributes:
      tokens: of the prompt, that no request need compute: all but the last,
        since a request computes one at least.
    """

    __slots__ = ("_cache", "_pin", "tokens")

    def __init__(self, cache: PrefixCache, pin: int, tokens: int) -> None:
        self._cache = cache
        self._pin = pin
        self.tokens = tokens

    def __repr__(self) -> str:
        return f"<PinnedPrefix: {self.tokens} tokens, {self.nbytes} bytes>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.unpin()

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states that it keeps; other pins may keep
        some of them, too. 0 once it is unpinned, or the cache was cleared."""
        return self._cache._core.pinned_bytes(self._pin)

    def unpin(self) -> None:
        """From now on it may go as anything else, unless another pin keeps
        it. May be called again."""
        self._cache._core.unpin(self._pin)

    def close(self) -> None:
        """Unpins it, as `unpin` does."""
        self.unpin()


class ModelPrefixCache:
    """The part of a prefix cache that one model has for one tenant."""

    def __init__(
        self,
        cache: PrefixCache,
        requests: Requests,
    ) -> None:
        self._cache = cache
        self._requests = requests
        self._engine = requests.engine  # also once the model is closed
        self._config = requests.config

    def __repr__(self) -> str:
        return repr(self._cache)

    @property
    def cache(self) -> PrefixCache:
        """Give it to `Gemma.load` for other models."""
        return self._cache

    def stats(self) -> PrefixStats:
        """Counts what the whole cache did."""
        return self._cache.stats()

    def match(self, prompt: Prompt) -> KVCache:
        """Makes a conversation of the part of `prompt` that needs no computing:
        at most all but its last token. `cache.tokens` says which.

        A str gets BOS in front; token ids are taken as they are.
        """
        return self._match(prompt, None)

    def _match(self, prompt: Prompt, pool: BlockPool | None) -> KVCache:
        """Does `match` in a pool; blocks of another one are copied."""
        ids = self._ids(prompt)
        cache = create_kv_cache(self._config, pool=pool)
        _core.prefix_match(self._engine, cache._core, ids)
        return cache

    def pin(self, prompt: Prompt) -> PinnedPrefix:
        """Keeps what is known of `prompt` in RAM until it is unpinned, or the
        cache is cleared; what is not known of it is computed first.

            with gemma.prefix_cache.pin(system_text):
                ...

        Requests that begin with the prompt, or are the prompt, find all but
        its last token. What is pinned counts in the budget of RAM, `ram`, and
        does not give way: neither to other entries, nor where a BlockPool is
        full. A prompt that is pinned twice is unpinned twice.

        Raises CacheFullError if all that is pinned would be more than the
        budget, ValueError for a prompt of less than two tokens.
        """
        ids = self._ids(prompt)
        if len(ids) < 2:
            raise unexpected(
                "prompt",
                "at least 2 tokens, since a request computes one at least",
                len(ids),
            )
        cache = create_kv_cache(self._config)
        requests = self._requests
        requests.done(requests.prefill(cache, ids[:-1], {}))
        pin = _core.prefix_pin(self._engine, cache._core)
        return PinnedPrefix(self._cache, pin, len(cache))

    def prefetch(self, prompt: Prompt) -> int:
        """Brings what the tiers below RAM have of `prompt` into RAM, and
        waits for it. Returns how many of its tokens RAM has then: what a
        request that comes soon need not compute.
        """
        ids = self._ids(prompt)
        cache = create_kv_cache(self._config)
        return _core.prefix_prefetch(self._engine, cache._core, ids)

    def _remove(self, ids: TokenArray, shared: int, kv_dtype: KvDtype) -> int:
        """Removes from the tiers of files what begins as these token ids, and
        with more of them than the first `shared`. Returns the objects that
        went.
        """
        like = create_kv_cache(self._config, kv_dtype=kv_dtype)
        return _core.prefix_remove(self._engine, like._core, ids, shared)

    def publish(self, cache: KVCache) -> None:
        """Takes in what a conversation of this model has computed, as the end
        of each request does.
        """
        check_cache("cache", cache)
        _core.prefix_publish(self._engine, cache._core)

    def _ids(self, prompt: Prompt) -> TokenArray:
        ids, _ = self._requests.encode("prompt", prompt)
        return ids
