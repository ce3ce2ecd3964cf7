"""Calls that name no conversation, and other short forms of the same calls."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv import ArgumentError, Gemma, KVCache

SHORT: dict[str, Any] = {"max_tokens": 5}
PROMPT = "the in"


@pytest.fixture(scope="module")
def expected(tiny: Gemma) -> gemmakv.Generation:
    return tiny.generate(tiny.new_cache(), PROMPT, max_tokens=5)


def test_generate_takes_a_prompt_alone(
    tiny: Gemma, expected: gemmakv.Generation
) -> None:
    ids = expected.token_ids
    assert tiny.generate(PROMPT, **SHORT).token_ids == ids
    assert tiny.generate(prompt=PROMPT, **SHORT).token_ids == ids
    assert tiny.generate(None, PROMPT, **SHORT).token_ids == ids
    cache = tiny.new_cache()
    assert tiny.generate(prompt=PROMPT, cache=cache, **SHORT).token_ids == ids
    assert len(cache) > 5
    assert tiny.tokenizer is not None
    as_ids = tiny.tokenizer.encode(PROMPT, add_bos=True)
    assert tiny.generate(as_ids, **SHORT).token_ids == ids
    assert tiny.generate(np.array(as_ids), **SHORT).token_ids == ids
    both = tiny.generate(PROMPT, n=2, **SHORT)
    assert [one.token_ids for one in both] == [ids, ids]


def test_streams_take_a_prompt_alone(
    tiny: Gemma, expected: gemmakv.Generation
) -> None:
    pieces = list(tiny.stream(PROMPT, **SHORT))  # nobody else has the cache
    assert [piece.token_id for piece in pieces] == expected.token_ids
    assert tiny.stream(prompt=PROMPT, **SHORT).result().text == expected.text


def test_prefill_takes_a_prompt_alone(tiny: Gemma) -> None:
    assert tiny.tokenizer is not None
    count = len(tiny.tokenizer.encode(PROMPT, add_bos=True))
    assert tiny.prefill(PROMPT).usage.prompt_tokens == count


def test_async_calls_take_a_prompt_alone(
    tiny: Gemma, expected: gemmakv.Generation
) -> None:
    async def main() -> None:
        one = await tiny.agenerate(PROMPT, **SHORT)
        assert one.token_ids == expected.token_ids
        [two] = await tiny.agenerate(PROMPT, n=1, **SHORT)
        assert two.token_ids == expected.token_ids
        stream = await tiny.astream(PROMPT, **SHORT)
        pieces = [piece.token_id async for piece in stream]
        assert pieces == expected.token_ids
        assert (await tiny.aprefill(PROMPT)).usage.completion_tokens == 0

    asyncio.run(main())


@pytest.mark.parametrize("call", ["generate", "stream", "prefill"])
def test_a_call_without_a_prompt_is_refused(
    tiny: Gemma, cache: KVCache, call: str
) -> None:
    for arguments in ((), (cache,), (cache, None)):
        with pytest.raises(ArgumentError) as caught:
            getattr(tiny, call)(*arguments)
        assert caught.value.argument == "prompt"
    with pytest.raises(ArgumentError) as caught:
        getattr(tiny, call)("ab", "cd")
    assert caught.value.argument == "cache"


def test_new_cache_is_create_kv_cache(tiny: Gemma) -> None:
    cache = tiny.new_cache(64, "int8", block_tokens=32, checkpoint_bytes=0)
    assert cache.capacity_tokens == 64 and cache.kv_dtype == "int8"
    assert cache.checkpoint_bytes == 0 and len(cache) == 0
    pool = gemmakv.BlockPool(bytes=1 << 22)
    tiny.prefill(held := tiny.new_cache(pool=pool), "ab")
    assert pool.used_bytes > 0 and len(held) == 3
    with pytest.raises(ArgumentError, match="kv_dtype"):
        tiny.new_cache(kv_dtype="f16")  # type: ignore[arg-type]


def test_logits_take_a_text(tiny: Gemma) -> None:
    assert tiny.tokenizer is not None
    cache, other = tiny.new_cache(), tiny.new_cache()
    ids = tiny.tokenizer.encode("ab", add_bos=True)
    found = tiny.logits(cache, "ab", True)
    assert np.array_equal(found, tiny.logits(other, ids, True))
    # The conversation goes on without another BOS.
    found = tiny.logits(cache, "ab")
    assert np.array_equal(found, tiny.logits(other, ids[1:]))
    assert cache.tokens.tolist() == [*ids, *ids[1:]]
    for nothing in ("", []):
        with pytest.raises(ArgumentError) as caught:
            tiny.logits(cache, nothing)
        assert caught.value.argument == "tokens"


def test_async_forms_give_the_same(tiny: Gemma) -> None:
    choices = ["a", "the", [300, 301]]

    async def main() -> None:
        cache, other = tiny.new_cache(), tiny.new_cache()
        found = await tiny.alogits(cache, "ab", True)
        assert np.array_equal(found, tiny.logits(other, "ab", True))
        assert np.array_equal(cache.tokens, other.tokens)
        scores = await tiny.ascore("ab", choices, cache=cache)
        assert np.array_equal(scores, tiny.score("ab", choices, cache=cache))
        batch = await tiny.agenerate_batch(
            [cache.fork(), tiny.new_cache()], ["c", PROMPT], max_tokens=[2, 3]
        )
        again = tiny.generate_batch(
            [other, tiny.new_cache()], ["c", PROMPT], max_tokens=[2, 3]
        )
        assert [g.token_ids for g in batch] == [g.token_ids for g in again]
        with pytest.raises(ArgumentError):
            await tiny.alogits(cache, [-1])

    asyncio.run(main())


def test_alogits_that_is_cancelled_leaves_the_cache(tiny: Gemma) -> None:
    """It waits for a stream that holds the cache, and is cancelled there."""

    async def main() -> None:
        cache = tiny.new_cache()
        stream = tiny.stream(cache, PROMPT, max_tokens=200, ignore_eos=True)
        piece = await stream.__anext__()
        task = asyncio.create_task(tiny.alogits(cache, [300]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stream.aclose()
        assert tiny.tokenizer is not None
        ids = tiny.tokenizer.encode(PROMPT, add_bos=True)
        assert cache.tokens.tolist() == [*ids, piece.token_id]

    asyncio.run(main())


def test_close_ends_a_stream(tiny: Gemma) -> None:
    cache = tiny.new_cache()
    long: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
    with contextlib.closing(tiny.stream(cache, PROMPT, **long)) as stream:
        next(stream)
    assert stream.result().finish_reason == "cancelled"
    tiny.prefill(cache, "ab")  # it is free

    async def main() -> None:
        async with contextlib.aclosing(tiny.stream(cache, "", **long)) as one:
            await one.__anext__()
        assert one.result().finish_reason == "cancelled"

    asyncio.run(main())
