"""Streams: the same tokens one by one, text in whole characters, cancel."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

import gemmakv
from gemmakv import (
    CacheFullError,
    Gemma,
    GemmaKVError,
    KVCache,
    Stream,
    create_kv_cache,
)
from support import tiny_gguf
from support.waits import wait_in_loop, wait_until

BOS = 2
NO_END = {1: -np.inf, tiny_gguf.EOT: -np.inf}


def force(model: Gemma, cache: KVCache, ids: list[int]) -> Stream:
    """A stream that cannot but say `ids`, the last of them eos."""
    # The bias of a token holds for a whole call, so only sets of ids can be
    # forced: with one id at a time the order would not matter.
    bias = {i: 1e6 - 1000.0 * n for n, i in enumerate(ids)}
    return model.stream(
        cache,
        [BOS],
        max_tokens=len(ids),
        logit_bias=bias,
        presence_penalty=1e7,
    )


def test_pieces_are_those_of_generate(tiny: Gemma, cache: KVCache) -> None:
    other = create_kv_cache(tiny.config)
    g = tiny.generate(other, "the", max_tokens=25, logprobs=True, seed=1,
                      temperature=1.0)
    stream = tiny.stream(cache, "the", max_tokens=25, logprobs=True, seed=1,
                         temperature=1.0)
    pieces = list(stream)
    assert [p.token_id for p in pieces] == g.token_ids
    assert "".join(p.text for p in pieces) == g.text
    assert [p.logprob for p in pieces] == g.logprobs.tolist()
    assert pieces[-1].finish_reason == g.finish_reason
    assert all(p.finish_reason is None for p in pieces[:-1])
    assert stream.result().token_ids == g.token_ids
    assert stream.result().text == g.text
    assert cache.tokens.tolist() == other.tokens.tolist()
    assert list(stream) == []


def test_characters_of_several_tokens_arrive_whole(
    tiny: Gemma, cache: KVCache
) -> None:
    ids = [tiny_gguf.BYTE_0 + byte for byte in "\U0001f642".encode()]
    pieces = list(force(tiny, cache, ids))
    assert [p.token_id for p in pieces] == ids
    assert [p.text for p in pieces] == ["", "", "", "\U0001f642"]


def test_an_unfinished_character_is_replaced_at_the_end(
    tiny: Gemma, cache: KVCache
) -> None:
    ids = [tiny_gguf.BYTE_0 + byte for byte in "\u20ac".encode()[:2]]
    stream = force(tiny, cache, ids)
    assert "".join(p.text for p in stream) == "\ufffd"
    assert stream.result().text == "\ufffd"


def test_a_possible_stop_string_is_held_back(
    tiny: Gemma, cache: KVCache
) -> None:
    a, b, c = (tiny.tokenizer.id_of(letter) for letter in "QXZ")
    bias = {a: 3e6, b: 2e6, c: 1e6}
    pieces = list(
        tiny.stream(
            cache,
            [BOS],
            max_tokens=3,
            logit_bias=bias,
            presence_penalty=1e7,
            stop="QXY",
        )
    )
    assert [p.text for p in pieces] == ["", "", "QXZ"]


def test_real_model_streams_unicode(gemma: Gemma) -> None:
    cache = create_kv_cache(gemma.model_type)
    prompt = "Smileys: \U0001f600 \U0001f603 \U0001f604 \U0001f601"
    stream = gemma.stream(cache, prompt, max_tokens=24)
    text = "".join(piece.text for piece in stream)
    assert text == stream.result().text
    assert "\ufffd" not in text[:-1]


def test_async_for(tiny: Gemma) -> None:
    caches = [create_kv_cache(tiny.config) for _ in range(3)]
    expected = tiny.generate(
        create_kv_cache(tiny.config), "the", max_tokens=15
    ).token_ids

    async def read(cache: KVCache) -> list[int]:
        stream = tiny.stream(cache, "the", max_tokens=15)
        return [piece.token_id async for piece in stream]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*map(read, caches))

    assert asyncio.run(main()) == [expected] * 3


def test_async_cancellation_cancels(tiny: Gemma, cache: KVCache) -> None:
    async def main() -> None:
        stream = tiny.stream(
            cache, "the", max_tokens=400, logit_bias=NO_END
        )

        read_ones: list[int] = []

        async def read() -> None:
            async for piece in stream:
                read_ones.append(piece.token_id)
                await asyncio.sleep(0)  # others of the loop have their turn

        task = asyncio.create_task(read())
        await wait_in_loop(lambda: len(read_ones) >= 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    tiny.generate(cache, "", max_tokens=1)  # the cache is free and sound


def test_cancel_keeps_what_was_returned(tiny: Gemma, cache: KVCache) -> None:
    stream = tiny.stream(cache, [BOS, 20], max_tokens=400, logit_bias=NO_END)
    read = [next(stream).token_id for _ in range(5)]
    # What runs ahead meanwhile is not kept.
    wait_until(lambda: stream._handle.waits_for_reader)
    stream.cancel()
    stream.cancel()
    assert list(stream) == []
    g = stream.result()
    assert g.finish_reason == "cancelled"
    assert g.token_ids == read
    assert g.text == tiny.tokenizer.decode(read)
    assert cache.tokens.tolist() == [BOS, 20, *read]
    # Going on from here is what an uncancelled call would have said.
    other = create_kv_cache(tiny.config)
    whole = tiny.generate(
        other, [BOS, 20], max_tokens=len(read) + 5, logit_bias=NO_END
    )
    more = tiny.generate(cache, "", max_tokens=5, logit_bias=NO_END)
    assert read + more.token_ids == whole.token_ids


def test_cancel_gives_the_text_that_was_held_back(
    tiny: Gemma, cache: KVCache
) -> None:
    q = tiny.tokenizer.id_of("Q")
    stream = tiny.stream(
        cache, [BOS], max_tokens=400, logit_bias={q: 1e6}, stop="QQQX"
    )
    pieces = [next(stream) for _ in range(3)]
    stream.cancel()
    pieces += stream
    assert "".join(p.text for p in pieces) == "QQQ" == stream.result().text
    assert [p.token_id for p in pieces] == [q, q, q, -1]
    assert pieces[-1].finish_reason == "cancelled"
    assert cache.tokens.tolist() == [BOS, q, q, q]


def test_cancel_after_the_end_changes_nothing(
    tiny: Gemma, cache: KVCache
) -> None:
    with tiny.stream(cache, "the", max_tokens=4, logit_bias=NO_END) as stream:
        pieces = list(stream)
    stream.cancel()
    assert stream.result().finish_reason == "length"
    assert stream.result().token_ids == [p.token_id for p in pieces]
    assert cache.tokens[2:].tolist() == stream.result().token_ids


def test_with_block_cancels(tiny: Gemma, cache: KVCache) -> None:
    with tiny.stream(cache, "the", max_tokens=400, logit_bias=NO_END) as stream:
        piece = next(stream)
    assert stream.result().finish_reason == "cancelled"
    assert cache.tokens[2:].tolist() == [piece.token_id]


def test_a_forgotten_stream_is_cancelled(tiny: Gemma, cache: KVCache) -> None:
    stream = tiny.stream(cache, "the", max_tokens=500, logit_bias=NO_END)
    next(stream)
    del stream
    gc.collect()
    tiny.generate(cache, "", max_tokens=1)
    assert len(cache) <= 4, "it came to no end of its own"


def test_errors_come_before_the_first_piece(
    tiny: Gemma, cache: KVCache
) -> None:
    with pytest.raises(ValueError, match="temperature"):
        tiny.stream(cache, "the", temperature=-1)
    assert len(cache) == 0


def test_progress_that_raises_keeps_what_was_returned(
    tiny: Gemma, cache: KVCache
) -> None:
    for at in (1, 3):
        cache.reset()

        def fail(done: int, total: int, at: int = at) -> None:
            if done == at:
                raise RuntimeError("from the callback")

        stream = tiny.stream(
            cache, [BOS, 20], max_tokens=400, logit_bias=NO_END, progress=fail
        )
        read = [next(stream).token_id for _ in range(at)]
        with pytest.raises(RuntimeError, match="from the callback"):
            next(stream)
        assert cache.tokens.tolist() == [BOS, 20, *read]
        assert [piece for piece in stream if piece.token_id >= 0] == []
        with pytest.raises(RuntimeError, match="from the callback"):
            stream.result()
        assert cache.tokens.tolist() == [BOS, 20, *read]


def test_a_failing_stream_says_what_is_kept(tiny: Gemma) -> None:
    prompt = [BOS, *range(20, 70)]
    probe = create_kv_cache(tiny.config)
    tiny.generate(probe, prompt, max_tokens=0)
    room = gemmakv.BlockPool(bytes=probe.nbytes)  # until the block is full
    cache = create_kv_cache(tiny.config, pool=room)
    stream = tiny.stream(cache, prompt, max_tokens=60, logit_bias=NO_END)
    read: list[int] = []
    with pytest.raises(CacheFullError, match="keeps the") as caught:
        for piece in stream:
            read.append(piece.token_id)
    assert str(caught.value).endswith(
        f"; the conversation keeps the {len(read)} tokens that were delivered"
    )
    assert len(read) > 8
    assert cache.tokens.tolist() == prompt + read
    g = tiny.generate(probe, "", max_tokens=60, logit_bias=NO_END)
    assert g.token_ids[: len(read)] == read
    # The same call, not streamed, leaves nothing behind.
    cache.reset()
    with pytest.raises(CacheFullError):
        tiny.generate(cache, prompt, max_tokens=60, logit_bias=NO_END)
    assert len(cache) == 0


def test_progress(tiny: Gemma, cache: KVCache) -> None:
    calls: list[tuple[int, int]] = []
    pieces = list(
        tiny.stream(
            cache,
            "the",
            max_tokens=6,
            logit_bias=NO_END,
            progress=lambda done, total: calls.append((done, total)),
        )
    )
    assert calls == [(i + 1, 6) for i in range(len(pieces))]


def test_nobody_waits_for_the_reader(tiny: Gemma, cache: KVCache) -> None:
    stream = tiny.stream(cache, [BOS, 20], max_tokens=30, logit_bias=NO_END)
    read = [next(stream).token_id]
    calls = [
        lambda: cache.truncate(1),
        lambda: cache.reset(),
        lambda: cache.checkpoint(),
        lambda: tiny.generate(cache, "", max_tokens=1),
        lambda: tiny.stream(cache, ""),
        lambda: tiny.logits(cache, [BOS]),
    ]
    for call in calls:
        with pytest.raises(GemmaKVError, match=r"cancel\(\)") as caught:
            call()
        assert type(caught.value) is GemmaKVError
    assert len(cache.fork()) > 2  # what changes nothing never waits
    read += [piece.token_id for piece in stream]
    other = create_kv_cache(tiny.config)
    g = tiny.generate(other, [BOS, 20], max_tokens=30, logit_bias=NO_END)
    assert read == g.token_ids
    cache.truncate(1)
