"""What conversations of one model share of what they begin with."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv import (
    ArgumentError,
    Gemma,
    PrefixCache,
    _core,
    create_kv_cache,
)
from gemmakv._support.sizes import parse_bytes

TEXT = "the cat sat on the mat and " * 14


@pytest.fixture
def model(tiny_path: Path) -> Gemma:
    return Gemma.load(tiny_path)


def usage(model: Gemma, prompt: str, tokens: int = 4) -> gemmakv.Usage:
    cache = create_kv_cache(model.config)
    return model.generate(cache, prompt, max_tokens=tokens).usage


def test_what_is_known_is_not_computed_again(
    model: Gemma, tiny: Gemma
) -> None:
    first = usage(model, TEXT)
    assert (first.cached_tokens, first.cached) == (0, {})
    assert first.miss_reason == "divergent"
    second = usage(model, TEXT)
    assert second.cached == {"ram": second.cached_tokens}
    assert second.cached_tokens > 200
    longer = TEXT + "and a dog " * 9
    for _ in range(3):
        third = usage(model, longer)
    assert third.cached_tokens == third.prompt_tokens - 1
    assert third.miss_reason is None
    for text in (TEXT, TEXT + "now", TEXT[:200]):
        cache, cold = create_kv_cache(model.config), create_kv_cache(
            tiny.config
        )
        found = model.generate(cache, text, max_tokens=9, logprobs=True)
        expected = tiny.generate(cold, text, max_tokens=9, logprobs=True)
        assert found.token_ids == expected.token_ids
        assert np.array_equal(found.logprobs, expected.logprobs)
        assert cache.tokens.tolist() == cold.tokens.tolist()
        assert np.array_equal(
            model.logits(cache, [5, 6], True), tiny.logits(cold, [5, 6], True)
        )


def test_a_short_prompt_is_known_the_second_time(model: Gemma) -> None:
    """It took a third one."""
    text = TEXT[:150]
    first, second = usage(model, text, 40), usage(model, text, 40)
    assert 66 < first.prompt_tokens < 256
    assert first.cached_tokens == 0
    assert second.cached_tokens == second.prompt_tokens - 1
    assert second.miss_reason is None


def test_a_request_says_what_it_may_do(model: Gemma) -> None:
    def cached(mode: str) -> int:
        cache = create_kv_cache(model.config)
        return model.generate(
            cache, TEXT, max_tokens=1, prefix_cache=mode
        ).usage.cached_tokens

    assert cached("read") == cached("on") == 0
    assert cached("off") == cached("write") == 0
    assert cached("read") > 200


def test_every_way_to_ask_uses_it(model: Gemma) -> None:
    usage(model, TEXT)
    usage(model, TEXT)
    caches = [create_kv_cache(model.config) for _ in range(3)]
    rows = model.generate_batch(caches, [TEXT] * 3, max_tokens=2)
    assert all(row.usage.cached_tokens > 200 for row in rows)
    stream = model.stream(create_kv_cache(model.config), TEXT, max_tokens=2)
    for _ in stream:
        pass
    ids = model.prefix_cache.match(TEXT).tokens  # type: ignore[union-attr]
    assert len(ids) > 200
    before = model.prefix_cache.stats()  # type: ignore[union-attr]
    model.logits(create_kv_cache(model.config), [*ids, 7])
    after = model.prefix_cache.stats()  # type: ignore[union-attr]
    assert after.cached["ram"] - before.cached["ram"] == len(ids)
    model.logits(create_kv_cache(model.config), [*ids, 7], all_positions=True)
    last = model.prefix_cache.stats()  # type: ignore[union-attr]
    assert last.cached == after.cached


def test_threads_with_one_prompt_read_it_once(model: Gemma) -> None:
    found: list[gemmakv.Usage] = []
    threads = [
        threading.Thread(target=lambda: found.append(usage(model, TEXT, 8)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    computed = [one.prompt_tokens - one.cached_tokens for one in found]
    assert sum(computed) <= found[0].prompt_tokens + 7 * 100


def test_models_share_one_and_find_their_own_only(
    tiny_path: Path, tmp_path: Path
) -> None:
    prefix = PrefixCache(ram="64MiB")
    a = Gemma.load(tiny_path, prefix_cache=prefix)
    b = Gemma.load(tiny_path, prefix_cache=prefix)
    other = Gemma.load(
        tiny_path, prefix_cache=prefix, quantize=None, threads=1
    ).with_salt("other")
    usage(a, TEXT)
    usage(b, TEXT)
    assert usage(b, TEXT).cached_tokens > 200
    assert usage(other, TEXT).cached_tokens == 0
    assert usage(other.with_salt(None), TEXT).cached_tokens > 200
    stats = prefix.stats()
    assert stats.requests == 5 and stats.misses["divergent"] == 2
    assert stats.bytes["ram"] > 0 and stats.as_dict()["writes"]["ram"] > 0
    prefix.clear()
    assert prefix.stats().bytes == {"ram": 0}
    assert usage(a, TEXT).cached_tokens == 0


@pytest.mark.parametrize("salt", ["", b"", 5])
def test_an_empty_salt_is_nobodys(tiny: Gemma, salt: Any) -> None:
    """It shared with everybody."""
    with pytest.raises(ArgumentError, match="salt: .*not empty") as error:
        tiny.with_salt(salt)
    assert error.value.found is salt
    with pytest.raises(ValueError, match="salt: expected .*not empty"):
        PrefixCache(ram="1MiB", salt=salt)


def test_none_and_nothing(tiny_path: Path) -> None:
    without = Gemma.load(tiny_path, prefix_cache=False)
    assert without.prefix_cache is None
    assert without.with_salt("x").prefix_cache is None
    usage(without, TEXT)
    assert usage(without, TEXT).cached == {}
    empty = Gemma.load(tiny_path, prefix_cache=PrefixCache(ram=0))
    usage(empty, TEXT)
    assert usage(empty, TEXT).cached == {}
    assert empty.prefix_cache is not None
    assert empty.prefix_cache.stats().bytes == {"ram": 0}


def test_a_conversation_is_published_and_found(
    model: Gemma, tiny: Gemma
) -> None:
    view = model.prefix_cache
    assert view is not None
    assert len(view.match(TEXT)) == 0
    cache = create_kv_cache(tiny.config)
    tiny.generate(cache, TEXT, max_tokens=5)
    view.publish(cache)
    found = view.match([*cache.tokens, 5])
    assert found.tokens.tolist() == cache.tokens.tolist()[:-1]
    assert np.array_equal(
        model.logits(found, [8]),
        tiny.logits(create_kv_cache(tiny.config), [*found.tokens[:-1], 8]),
    )
    with pytest.raises(ValueError, match="cache: expected a KVCache"):
        view.publish("none")  # type: ignore[arg-type]


def test_memory_goes_back_to_the_conversations(tiny_path: Path) -> None:
    model = Gemma.load(tiny_path)
    pool = gemmakv.BlockPool(bytes=3 << 20)
    for i in range(40):
        cache = create_kv_cache(model.config, pool=pool)
        model.generate(cache, f"{i} " * 150, max_tokens=4)
        assert cache.nbytes > 0
    assert pool.used_bytes <= 3 << 20
    view = model.prefix_cache
    assert view is not None and view.stats().evictions["ram"] > 0
    del cache
    view.cache.clear()
    assert pool.used_bytes == 0


def test_without_tiers_there_is_ram_alone(tiny_path: Path) -> None:
    with PrefixCache(ram="64MiB") as prefix:
        model = Gemma.load(tiny_path, prefix_cache=prefix)
        usage(model, TEXT)
        view = model.prefix_cache
        assert view is not None and view.prefetch(TEXT) > 200
        assert set(usage(model, TEXT).cached) == {"ram"}
        prefix.flush()
        stats = prefix.stats()
        assert stats.queued == stats.dropped == 0
        assert stats.latency_s == stats.timeouts == {}
        for tier in ("disk", "tape"):
            with pytest.raises(ValueError, match="tier"):
                prefix.clear(tier)
        prefix.clear("ram")
        assert prefix.stats().entries == {"ram": 0}
    usage(model, TEXT)  # it may go on behind the end
    assert usage(model, TEXT).cached["ram"] > 200


def test_bad_arguments(tiny_path: Path, tmp_path: Path) -> None:
    for name in ("shared_bytes", "disk_bytes"):
        with pytest.raises(ValueError, match=f"{name}: expected bytes"):
            PrefixCache(**{name: "much"})
    with pytest.raises(ValueError, match="remote_secret: expected none"):
        PrefixCache(remote_secret="x")
    for place in (5, True, "", "a\0b"):
        with pytest.raises(ValueError, match="disk: expected a folder"):
            PrefixCache(disk=place)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="disk_bytes: expected at least 1"):
        PrefixCache(disk=tmp_path / "x", disk_bytes=0)
    for size in (1 << 64, "999999999999TiB", "9" * 5000):
        with pytest.raises(ValueError, match="ram: expected at most 9223372"):
            PrefixCache(ram=size)
    for size in ("1 Gig", "-1", "", -1, 1.5, True, "1e9"):
        with pytest.raises(ValueError, match="ram: expected bytes"):
            PrefixCache(ram=size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="salt: expected a str or bytes"):
        PrefixCache(salt=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefix_cache: expected a gemmakv"):
        Gemma.load(tiny_path, prefix_cache="yes")  # type: ignore[arg-type]
    model = Gemma.load(tiny_path)
    with pytest.raises(ValueError, match="prefix_cache: expected 'off', 'rea"):
        model.generate(
            create_kv_cache(model.config), "a", prefix_cache="yes"
        )
    options = _core.GenerateOptions()
    assert options.prefix_cache == "on"
    with pytest.raises(ValueError, match="expected 'off', 'read'"):
        options.prefix_cache = "yes"


def test_sizes() -> None:
    assert parse_bytes("x", "1GiB") == 1 << 30
    assert parse_bytes("x", "1.5 kB") == 1500
    assert parse_bytes("x", "12") == parse_bytes("x", 12) == 12
    assert parse_bytes("x", "2m") == 2_000_000
    assert PrefixCache().ram == min(1 << 30, _core.memory_limit() // 16)
    assert PrefixCache("64MiB").ram == 64 << 20
