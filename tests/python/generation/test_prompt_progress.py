"""`prompt_progress`: how much of a prompt was read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gemmakv import ArgumentError, Gemma, Session

PROMPT = list(range(20, 320))
SHORT: dict[str, Any] = {"max_tokens": 4}


class Told(list[tuple[int, int]]):
    """Notes what it is told."""

    def __call__(self, done: int, total: int) -> None:
        self.append((done, total))

    def check(self, total: int) -> None:
        """Rises to the total, each number once."""
        done = [one for one, _ in self]
        assert done == sorted(set(done)) and done[-1] == total
        assert {of for _, of in self} == {total}


def test_a_stream_tells_all_before_its_first_piece(tiny: Gemma) -> None:
    told = Told()
    stream = tiny.stream(PROMPT, prompt_progress=told, **SHORT)
    next(stream)
    told.check(len(PROMPT))
    before = list(told)
    list(stream)
    assert told == before  # no more behind it
    cache = tiny.new_cache()
    tiny.prefill(cache, "ab")
    told = Told()
    list(tiny.stream(cache, "cd", prompt_progress=told, **SHORT))
    told.check(2)  # no BOS goes behind


def test_so_does_one_on_a_loop(tiny: Gemma) -> None:
    told = Told()

    async def main() -> None:
        stream = tiny.stream(PROMPT, prompt_progress=told, **SHORT)
        await stream.__anext__()
        told.check(len(PROMPT))
        async for _ in stream:
            pass

    asyncio.run(main())
    told.check(len(PROMPT))


def test_calls_that_wait_tell_too(tiny: Gemma) -> None:
    for n in (None, 2):
        told = Told()
        tiny.generate(PROMPT, n=n, prompt_progress=told, **SHORT)  # type: ignore[call-overload]
        told.check(len(PROMPT))
    told = Told()
    asyncio.run(tiny.agenerate(PROMPT, prompt_progress=told, **SHORT))
    told.check(len(PROMPT))


def test_both_reports_of_one_call(tiny: Gemma) -> None:
    told, whole = Told(), Told()
    for call in (tiny.generate, lambda *a, **k: list(tiny.stream(*a, **k))):
        options: Any = {"prompt_progress": told, "progress": whole, **SHORT}
        call(PROMPT, ignore_eos=True, **options)
        told.check(len(PROMPT))
        assert whole[-1][0] == whole[-1][1]
        told.clear()


def test_in_a_chat(talker: Gemma) -> None:
    told = Told()
    talk = [{"role": "user", "content": "ab " * 40}]
    stream = talker.chat(talk, stream=True, prompt_progress=told, **SHORT)
    list(stream)
    told.check(stream.result().usage.prompt_tokens)
    session = Session(talker, options={"prompt_progress": told, **SHORT})
    told.clear()
    reply = session.stream("ab " * 40)
    list(reply)
    assert told[-1][0] == told[-1][1] > 0
    again = Session.from_bytes(gemma=talker, data=session.to_bytes())
    assert again.options == SHORT


@pytest.mark.parametrize("last", [False, True])
def test_what_it_raises_ends_the_stream(tiny: Gemma, last: bool) -> None:
    cache = tiny.new_cache()

    def told(done: int, total: int) -> None:
        if done == total or not last:
            raise RuntimeError("enough")

    stream = tiny.stream(cache, PROMPT, prompt_progress=told, **SHORT)
    with pytest.raises(RuntimeError, match="enough"):
        next(stream)
    assert list(stream) == [] and len(cache) == 0
    with pytest.raises(RuntimeError, match="enough"):
        stream.result()
    with pytest.raises(RuntimeError, match="enough"):
        tiny.generate(cache, PROMPT, prompt_progress=told, **SHORT)
    assert len(cache) == 0


def test_bad_ones(tiny: Gemma) -> None:
    for call in (tiny.generate, tiny.stream):
        with pytest.raises(ArgumentError) as caught:
            call("ab", prompt_progress=True)  # type: ignore[operator]
        assert caught.value.argument == "prompt_progress"
    with pytest.raises(ArgumentError):
        Session(tiny, options={"prompt_progress": 3})
    with pytest.raises(ArgumentError, match="batch"):
        tiny.generate_batch([tiny.new_cache()], ["ab"], prompt_progress=Told())
