"""`chat` piece by piece."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv import ArgumentError, Gemma
from gemmakv.chat._stream import ChatStream
from gemmakv.generation._result import Generation

TALK = [{"role": "user", "content": "Hi"}]
OPTIONS: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 5}


def same(found: Generation, expected: Generation) -> bool:
    return (
        found.token_ids == expected.token_ids
        and found.text == expected.text
        and found.finish_reason == expected.finish_reason
    )


def test_pieces_are_the_reply(talker: Gemma) -> None:
    expected = talker.chat(TALK, **OPTIONS)
    stream = talker.chat(TALK, stream=True, **OPTIONS)
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == expected.text
    assert pieces[-1].finish_reason == expected.finish_reason
    assert same(stream.result(), expected)
    assert same(talker.chat(TALK, stream=False, **OPTIONS), expected)


def test_async_pieces_are_the_reply(talker: Gemma) -> None:
    expected = talker.chat(TALK, **OPTIONS)

    async def main() -> None:
        stream = await talker.achat(TALK, stream=True, **OPTIONS)
        text = "".join([piece.text async for piece in stream])
        assert text == expected.text and same(stream.result(), expected)

    asyncio.run(main())


def test_the_cache_has_the_reply_at_the_end(talker: Gemma) -> None:
    cache, other = talker.new_cache(), talker.new_cache()
    talker.prefill(cache, "something else")
    before = cache.tokens
    expected = talker.chat(TALK, cache=other, **OPTIONS)
    stream = talker.chat(TALK, cache=cache, stream=True, **OPTIONS)
    next(stream)
    assert np.array_equal(cache.tokens, before)
    assert same(stream.result(), expected)
    assert np.array_equal(cache.tokens, other.tokens)


def test_a_cancelled_stream_keeps_what_it_gave(talker: Gemma) -> None:
    cache = talker.new_cache()
    ids = talker.apply_chat_template(TALK)
    stream = talker.chat(TALK, cache=cache, stream=True, **OPTIONS)
    stream.cancel()
    assert list(stream) == [] and len(cache) == 0
    with talker.chat(TALK, cache=cache, stream=True, **OPTIONS) as stream:
        first = next(stream)
    assert stream.result().finish_reason == "cancelled"
    assert cache.tokens.tolist() == [*ids.tolist(), first.token_id]


def test_a_stream_that_fails_keeps_what_it_gave(talker: Gemma) -> None:
    cache = talker.new_cache()

    def progress(done: int, total: int) -> None:
        if done == 3:
            raise RuntimeError("enough")

    stream = talker.chat(
        TALK, cache=cache, stream=True, progress=progress, **OPTIONS
    )
    with pytest.raises(RuntimeError, match="enough"):
        list(stream)
    assert len(cache) == len(talker.apply_chat_template(TALK)) + 3


def test_bad_arguments_raise_at_once(talker: Gemma) -> None:
    with pytest.raises(ArgumentError, match="stream"):
        talker.chat(TALK, stream="yes")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="top_p"):
        talker.chat(TALK, stream=True, top_p=2.0)


def test_tools_are_in_the_result(talker: Gemma) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance")
    tools = [{
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "boolean"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }]  # fmt: skip
    options: dict[str, Any] = {
        "tools": tools, "tool_choice": "required", "template": "plain",
        "parallel_tool_calls": False, "max_tokens": 200,
    }  # fmt: skip
    expected = talker.chat(TALK, **options)
    stream = talker.chat(TALK, stream=True, **options)
    assert isinstance(stream, ChatStream)
    text = "".join(piece.text for piece in stream)
    found = stream.result()
    assert text == found.text == expected.text
    assert found.token_ids == expected.token_ids
    assert [call.name for call in found.tool_calls] == ["f"]
    assert found.tool_calls[0].arguments == expected.tool_calls[0].arguments
    assert isinstance(found, gemmakv.Generation)
