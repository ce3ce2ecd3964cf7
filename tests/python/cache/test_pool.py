"""A byte budget over many conversations."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import gemmakv
from gemmakv import BlockPool, CacheFullError, Gemma, KVCache, create_kv_cache

TOKENS = [2, *(20 + (13 * i) % 250 for i in range(99))]


def test_counts_what_caches_hold(tiny: Gemma) -> None:
    pool = BlockPool()
    assert pool.bytes is None and pool.used_bytes == pool.blocks_in_use == 0
    a = create_kv_cache(tiny.config, pool=pool)
    b = create_kv_cache(tiny.config, kv_dtype="f32", pool=pool)
    tiny.logits(a, TOKENS)
    tiny.logits(b, TOKENS)
    assert pool.used_bytes == a.nbytes + b.nbytes > 0
    before = pool.used_bytes
    forks = [a.fork() for _ in range(100)]
    assert pool.used_bytes == before, "a hundred forks cost the prefix once"
    tiny.logits(forks[0], [5])
    assert pool.used_bytes == before + forks[0].nbytes
    del a, b, forks
    gc.collect()
    assert pool.used_bytes == pool.blocks_in_use == 0


@pytest.mark.slow
def test_a_call_that_has_returned_holds_nothing(tiny: Gemma) -> None:
    pool = BlockPool()
    a, b = (create_kv_cache(tiny.config, pool=pool) for _ in range(2))
    calls = [
        lambda: tiny.logits(a, [7]),
        lambda: tiny.generate(a, [7], max_tokens=1),
        lambda: tiny.generate_batch([a, b], [[7], [7]], max_tokens=1),
        lambda: tiny.stream(a, [7], max_tokens=0).result(),
    ]
    # What there was before the call was let go of a moment later, now and then.
    for i in range(1600):
        for cache in (a, b):
            tiny.logits(cache, TOKENS[:3])
        calls[i % len(calls)]()
        for cache in (a, b):
            cache.reset()
        assert pool.blocks_in_use == 0, i


def test_exceeding_it_changes_nothing(tiny: Gemma) -> None:
    measure = create_kv_cache(tiny.config)
    tiny.logits(measure, TOKENS)
    pool = BlockPool(bytes=3 * measure.nbytes)
    assert pool.bytes == 3 * measure.nbytes
    caches = [create_kv_cache(tiny.config, pool=pool) for _ in range(3)]
    tiny.logits(caches[0], TOKENS)
    tiny.logits(caches[1], TOKENS[:50])
    caches[1].checkpoint()
    before = [c.to_bytes(checkpoints=True) for c in caches]
    used = pool.used_bytes
    with pytest.raises(CacheFullError) as error:
        tiny.generate(caches[1], TOKENS * 4, max_tokens=5)
    # Both figures: what is used, and what may be.
    assert f"{pool.bytes} in total" in str(error.value)
    assert "bytes are in use" in str(error.value)
    with pytest.raises(CacheFullError):
        tiny.logits(caches[2], TOKENS * 5)
    assert [c.to_bytes(checkpoints=True) for c in caches] == before
    assert pool.used_bytes == used
    caches[0].reset()
    expected = tiny.logits(create_kv_cache(tiny.config), TOKENS)
    assert np.array_equal(tiny.logits(caches[2], TOKENS), expected)


def test_restoring_into_a_pool(tiny: Gemma) -> None:
    cache = create_kv_cache(tiny.config)
    tiny.logits(cache, TOKENS)
    data = cache.to_bytes()
    pool = BlockPool(bytes=cache.nbytes + 1)
    restored = KVCache.from_bytes(data, pool=pool)
    assert pool.used_bytes == restored.nbytes
    with pytest.raises(CacheFullError):
        KVCache.from_bytes(data, pool=pool)
    assert pool.used_bytes == restored.nbytes


def test_idle_checkpoints_make_room(tiny: Gemma) -> None:
    """Conversations at rest lose checkpoints before another one fails."""

    def marked(pool: BlockPool) -> KVCache:
        cache = create_kv_cache(
            tiny.config, checkpoint_bytes=1 << 30, pool=pool
        )
        for _ in range(4):
            tiny.logits(cache, TOKENS)
            assert cache.checkpoint()
        return cache

    kept = marked(BlockPool())
    # Not enough for what a request takes beside all checkpoints of two.
    pool = BlockPool(bytes=2 * kept.nbytes)
    idle, working = marked(pool), marked(pool)
    assert len(working.checkpoints) == 4
    assert set(idle.checkpoints) < set(kept.checkpoints)
    for cache in (idle, working):
        for keep in (396, 297, 250, 99):
            fork = KVCache.from_bytes(cache.to_bytes(checkpoints=True))
            fork.truncate(keep)
            expected = tiny.logits(
                create_kv_cache(tiny.config), (TOKENS * 4)[:keep] + [7, 8, 9]
            )
            assert np.array_equal(tiny.logits(fork, [7, 8, 9]), expected)
    assert idle.mapped_nbytes == 0


@pytest.mark.parametrize("value", [0, -1, 1.5, "1 GB", 1 << 70])
def test_bad_budget(value: object) -> None:
    with pytest.raises(ValueError, match="bytes"):
        BlockPool(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("pool", [1, "pool", object()])
def test_bad_pool(tiny: Gemma, pool: object) -> None:
    with pytest.raises(ValueError, match="pool"):
        create_kv_cache(tiny.config, pool=pool)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pool"):
        KVCache.from_bytes(b"", pool=pool)  # type: ignore[arg-type]


def test_repr_and_error_type() -> None:
    assert "no limit" in repr(BlockPool())
    assert "1000" in repr(BlockPool(1000))
    assert issubclass(CacheFullError, gemmakv.GemmaKVError)
