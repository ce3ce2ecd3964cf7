"""What is pinned stays in RAM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gemmakv
from gemmakv import Gemma, PrefixCache, create_kv_cache

TEXT = "the cat sat on the mat and " * 14


def cached(model: Gemma, prompt: str) -> int:
    cache = create_kv_cache(model.config)
    return model.generate(cache, prompt, max_tokens=1).usage.cached_tokens


def test_pinned_is_found_whatever_comes(tiny_path: Path, tiny: Gemma) -> None:
    prefix = PrefixCache(ram="2MiB")
    model = Gemma.load(tiny_path, prefix_cache=prefix)
    view = model.prefix_cache
    assert view is not None
    with view.pin(TEXT) as pinned:
        tokens = pinned.tokens
        assert tokens > 200
        assert 0 < pinned.nbytes == prefix.stats().pinned_bytes
        for i in range(30):
            cached(model, f"{i} " * 150)
        assert prefix.stats().evictions["ram"] > 0
        # What goes on behind it, and the prompt itself.
        for prompt in (TEXT + "and a dog", TEXT):
            cache, cold = (create_kv_cache(model.config) for _ in range(2))
            found = model.generate(cache, prompt, max_tokens=5, logprobs=True)
            expected = tiny.generate(cold, prompt, max_tokens=5, logprobs=True)
            assert found.usage.cached["ram"] >= tokens
            assert np.array_equal(found.logprobs, expected.logprobs)
        again = view.pin(TEXT)
        assert prefix.stats().pinned_bytes == pinned.nbytes
    assert pinned.nbytes == 0 and again.nbytes > 0
    assert "PinnedPrefix" in repr(again)
    pinned.close()
    assert prefix.stats().pinned_bytes == again.nbytes
    again.unpin()
    assert prefix.stats().pinned_bytes == 0
    assert prefix.stats().bytes["ram"] > 0


def test_it_stays_without_the_object_and_goes_with_clear(
    tiny_path: Path,
) -> None:
    model = Gemma.load(tiny_path)
    view = model.prefix_cache
    assert view is not None
    view.pin(TEXT)
    assert view.stats().pinned_bytes > 0
    kept = view.pin([5, 6, 7])
    assert kept.tokens == 2
    other = model.with_salt("other")
    assert other.prefix_cache is not None
    assert cached(other, TEXT) == 0
    view.cache.clear()
    assert view.stats().pinned_bytes == kept.nbytes == 0
    kept.unpin()


def test_errors(tiny_path: Path) -> None:
    model = Gemma.load(tiny_path, prefix_cache=PrefixCache(ram="64KiB"))
    view = model.prefix_cache
    assert view is not None
    with pytest.raises(gemmakv.CacheFullError, match="pin: .* at most 65536"):
        view.pin(TEXT)
    assert view.stats().pinned_bytes == 0
    with pytest.raises(ValueError, match="prompt: expected at least 2 tokens"):
        view.pin([5])
    with pytest.raises(ValueError, match="prompt: expected"):
        view.pin(5)  # type: ignore[arg-type]


def test_a_pool_that_is_full_of_it_says_so(tiny_path: Path) -> None:
    """Conversations of that pool, which the index took over."""
    model = Gemma.load(tiny_path)
    view = model.prefix_cache
    assert view is not None
    pool = gemmakv.BlockPool(bytes=1 << 20)
    cache = create_kv_cache(model.config, pool=pool)
    model.prefill(cache, TEXT)
    ids = cache.tokens
    del cache
    pinned = view.pin(ids)
    assert pinned.nbytes > 0 and pool.used_bytes > 0
    held = []
    with pytest.raises(gemmakv.CacheFullError, match="of them pinned,"):
        for i in range(60):
            held.append(create_kv_cache(model.config, pool=pool))
            model.prefill(held[-1], f"{i} " * 150)
    assert len(held) > 1
    assert view.match(ids).tokens.tolist() == ids[:-1].tolist()
