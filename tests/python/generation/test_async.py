"""asyncio: nothing blocks the loop, and caches keep what readers got."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemmakv import (
    CacheFullError,
    Gemma,
    GemmaKVError,
    KVCache,
    Session,
    create_kv_cache,
)
from gemmakv.generation import _stream
from gemmakv.generation._requests import requests_of
from support import tiny_gguf
from support.forks import output_of
from support.waits import wait_in_loop, wait_until

BOS = 2
NO_END: Any = {"logit_bias": {1: -np.inf, tiny_gguf.EOT: -np.inf}}
LONG: Any = {"max_tokens": 400, **NO_END}
ENDLESS: Any = {"max_tokens": 1 << 19, **NO_END}
PROMPT = [BOS, *range(20, 60)]


async def pause(seconds: float) -> None:
    """So long at least, also of the time in which this process can run: one
    that is frozen meanwhile loses a part of it.
    """
    for _ in range(round(seconds / 0.01)):
        await asyncio.sleep(0.01)  # for what must not happen meanwhile


def same(cache: KVCache, other: KVCache) -> bool:
    return cache.to_bytes(True) == other.to_bytes(True)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Gemma:
    """A model that can talk until someone stops it."""
    meta = tiny_gguf.metadata()
    meta["gemma3.context_length"] = (tiny_gguf.U32, 1 << 20)
    path = tmp_path_factory.mktemp("slow") / "slow.gguf"
    return Gemma.load(tiny_gguf.write(path, meta), prefix_cache=False)


# ---- The same results ----


def test_agenerate_is_generate(tiny: Gemma, cache: KVCache) -> None:
    # How many guesses were made depends on what was said before.
    options: Any = {
        "max_tokens": 20, "temperature": 1.0, "seed": 3, "speculate": "off",
        **NO_END,
    }  # fmt: skip
    other = create_kv_cache(tiny.config)
    expected = tiny.generate(other, "the", logprobs=True, **options)
    found = asyncio.run(tiny.agenerate(cache, "the", logprobs=True, **options))
    assert found.token_ids == expected.token_ids
    assert found.text == expected.text and found.usage == expected.usage
    assert np.array_equal(found.logprobs, expected.logprobs)
    assert same(cache, other)
    samples = asyncio.run(tiny.agenerate(cache, "a", n=3, **options))
    expected_samples = tiny.generate(other, "a", n=3, **options)
    assert [s.token_ids for s in samples] == [
        s.token_ids for s in expected_samples
    ]
    assert same(cache, other)
    for bad in ({"temperature": -1}, {"nonsense": 1}):
        with pytest.raises((ValueError, TypeError)):
            asyncio.run(tiny.agenerate(cache, "a", **bad))
    with pytest.raises(CacheFullError):
        asyncio.run(tiny.agenerate(cache, [5] * 600))
    assert same(cache, other)


def test_prefill(tiny: Gemma, cache: KVCache) -> None:
    other = create_kv_cache(tiny.config)
    tiny.generate(other, PROMPT, max_tokens=0)
    told: list[tuple[int, int]] = []
    done = tiny.prefill(
        cache, PROMPT, progress=lambda *numbers: told.append(numbers)
    )
    assert told[-1] == (len(PROMPT), len(PROMPT))
    assert done.usage.prompt_tokens == len(PROMPT)
    assert done.usage.completion_tokens == done.usage.cached_tokens == 0
    assert done.timings.prefill_s > 0
    assert same(cache, other)
    tiny.generate(cache, "", max_tokens=1, **NO_END)  # a token that is pending
    more = asyncio.run(tiny.aprefill(cache, "the"))
    assert more.usage.cached_tokens == len(PROMPT)
    with pytest.raises(ValueError, match="prompt"):
        tiny.prefill(create_kv_cache(tiny.config), [])


def test_asend_is_send(tiny: Gemma) -> None:
    options: Any = {"max_tokens": 12, "seed": 3, **NO_END}
    one, other = Session(tiny, "be kind"), Session(tiny, "be kind")
    expected = one.send("hello", **options)
    assert asyncio.run(other.asend("hello", **options)).text == expected.text
    assert other.messages == one.messages
    assert same(other.cache, one.cache)

    async def read() -> str:
        async with await other.astream("more", **options) as stream:
            return "".join([piece.text async for piece in stream])

    assert asyncio.run(read()) == one.send("more", **options).text


def test_both_streams_have_one_base(tiny: Gemma, cache: KVCache) -> None:
    for stream in (
        tiny.stream(cache, "the", max_tokens=3, **NO_END),
        Session(tiny).stream("the", max_tokens=3, **NO_END),
    ):
        assert isinstance(stream, _stream.PieceStream)
        assert stream.result().finish_reason == "length"
        assert stream.result() is stream.result()


def test_how_much_of_a_prompt_was_cached(tiny: Gemma) -> None:
    prompt = [BOS, *range(20, 360)]

    async def main() -> None:
        async with await tiny.astream(prompt, max_tokens=4, **NO_END) as stream:
            _ = [piece async for piece in stream]
            usage = stream.result().usage
            assert stream.cached_tokens == usage.cached_tokens

    asyncio.run(main())
    asyncio.run(main())


# ---- What stays when a task is cancelled ----


@pytest.mark.parametrize("how", ["task", "timeout", "wait_for", "exit"])
def test_a_cancelled_reader_keeps_what_it_got(slow: Gemma, how: str) -> None:
    async def main(delay: float) -> None:
        cache = create_kv_cache(slow.config, 4096)
        shown: list[int] = []

        async def read() -> None:
            async for piece in stream:
                shown.append(piece.token_id)

        stream = slow.stream(cache, [BOS, 20], max_tokens=4000, **NO_END)
        if how == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(delay):
                    await read()
        elif how == "wait_for":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read(), delay)
        elif how == "exit":
            async with stream:
                for _ in range(int(delay * 1000)):
                    shown.append((await anext(stream)).token_id)
        else:
            task = asyncio.create_task(read())
            await asyncio.sleep(delay)  # any moment
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        kept = [BOS, 20, *shown] if shown else []
        assert cache.tokens.tolist() == kept
        assert stream.result().token_ids == shown
        if shown:
            other = create_kv_cache(slow.config, 4096)
            whole = slow.generate(
                other, [BOS, 20], max_tokens=len(shown) + 3, **NO_END
            )
            more = slow.generate(cache, "", max_tokens=3, **NO_END)
            assert shown + more.token_ids == whole.token_ids

    for i in range(1, 16):
        asyncio.run(main(0.001 * i))


def test_a_cancelled_call_leaves_all_as_it_was(slow: Gemma) -> None:
    cache = create_kv_cache(slow.config)
    session = Session(slow)
    slow.generate(cache, PROMPT, max_tokens=3, **NO_END)
    session.send("one", max_tokens=3, **NO_END)
    before = cache.to_bytes(True), session.to_bytes(), session.messages

    # None ends while the loop does not run for some seconds.
    calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
        lambda: slow.agenerate(cache, "the", **ENDLESS),
        lambda: slow.agenerate(cache, "the", n=2, **ENDLESS),
        lambda: slow.aprefill(cache, [20] * 200_000),
        lambda: session.asend("two", **ENDLESS),
    ]

    async def main() -> None:
        for call in calls:
            for delay in (0, 0.001, 0.005, 0.01):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(delay):
                        await call()
                assert cache.to_bytes(True) == before[0]
                assert session.to_bytes() == before[1]
            coroutine = call()
            with pytest.raises(GeneratorExit):
                coroutine.send(None)
                coroutine.throw(GeneratorExit)
            await wait_in_loop(  # the step that runs may undo it later
                lambda: (cache.to_bytes(True), session.to_bytes()) == before[:2]
            )

    asyncio.run(main())
    slow.generate(cache.fork(), "a", max_tokens=1)
    assert session.messages == before[2]
    assert cache.to_bytes(True) == before[0]
    assert session.to_bytes() == before[1]


@pytest.mark.parametrize("kind", ["cache", "asend", "send", "astream"])
def test_a_deadline_counts_what_was_waited_for(
    slow: Gemma, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(slow, template="plain")
    options: Any = {"max_tokens": 10, "deadline": 0.01, **NO_END}
    waits = threading.Event()
    acquire = session._calls.acquire

    def acquiring() -> None:
        waits.set()  # the deadline counts by now
        acquire()

    monkeypatch.setattr(session._calls, "acquire", acquiring)

    async def second() -> Any:
        if kind == "cache":
            return await slow.agenerate(session.cache, "b", **options)
        if kind == "asend":
            return await session.asend("b", **options)
        if kind == "send":
            return await asyncio.to_thread(session.send, "b", **options)
        async with await session.astream("b", **options) as stream:
            async for _ in stream:
                pass
        return stream.result()

    async def main() -> None:
        step = HeldStep()
        first = asyncio.create_task(
            slow.agenerate(session.cache, "a", **step.options)
            if kind == "cache"
            else session.asend("a", **step.options)
        )
        await step.begun.wait()
        task = asyncio.ensure_future(second())
        if kind == "send":  # a thread may take its time to begin
            await wait_in_loop(waits.is_set)
        # It is over long before the first call is.
        found = await step.during(task, seconds=0.1)
        assert (await first).finish_reason == "length"
        assert found.finish_reason == "deadline" and found.token_ids == []

    asyncio.run(main())


def test_progress_that_raises_undoes(slow: Gemma) -> None:
    cache = create_kv_cache(slow.config, 4096)
    slow.generate(cache, PROMPT, max_tokens=3, **NO_END)
    before = cache.to_bytes(True)

    for at in (0, 1000):

        def fail(done: int, total: int, at: int = at) -> None:
            if done >= at:
                raise RuntimeError("from the callback")

        call = slow.agenerate(
            cache, [20] * 500, max_tokens=900, progress=fail, **NO_END
        )
        with pytest.raises(RuntimeError, match="from the callback"):
            asyncio.run(call)
        assert cache.to_bytes(True) == before


@pytest.mark.parametrize("chat", [False, True])
def test_ctrl_c_anywhere_keeps_what_was_returned(
    tiny: Gemma, chat: bool
) -> None:
    """Ctrl-C at every line that a read takes, also behind the core's."""
    places = 0
    for place in range(200):
        cache = create_kv_cache(tiny.config)
        session = Session(tiny, template="plain")
        stream: Any = (
            session.stream("a", **LONG)
            if chat
            else tiny.stream(cache, [BOS, 20], **LONG)
        )
        shown = [next(stream).token_id for _ in range(2)]
        seen = 0

        def trace(frame: Any, event: str, _: object, place: int = place) -> Any:
            nonlocal seen
            name = frame.f_code.co_name
            if name in UNREAD:
                return None
            if "gemmakv" in frame.f_code.co_filename and event == "line":
                if name == "__next__" and line_of(frame).endswith(NOT_YET):
                    return trace
                seen += 1
                if seen == place + 1:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            shown.append(next(stream).token_id)
        except KeyboardInterrupt:
            places += 1
        else:
            break
        finally:
            sys.settrace(None)
        generation = stream.result()
        assert generation.token_ids == shown, place
        assert generation.finish_reason == "cancelled"
        if not chat:
            assert cache.tokens.tolist() == [BOS, 20, *shown]
        assert generation.text == tiny.tokenizer.decode(shown).strip() or (
            not chat and generation.text == tiny.tokenizer.decode(shown)
        )
    assert places > 10


# What does not read, with what it calls.
UNREAD = (
    "_restore", "restore", "cancel", "_save", "state", "_settle", "_over",
)  # fmt: skip
# Before the read begins.
NOT_YET = ("before = self._save()", "try:")


def line_of(frame: Any) -> str:
    lines, first = inspect.getsourcelines(frame.f_code)
    return lines[frame.f_lineno - first].strip()


def test_cancelled_in_its_prompt_keeps_nothing(slow: Gemma) -> None:
    cache = create_kv_cache(slow.config, 8192)
    slow.generate(cache, PROMPT, max_tokens=3, **NO_END)
    before = cache.to_bytes(True)
    stream = slow.stream(cache, [20] * 7000, **LONG)
    stream.cancel()
    assert list(stream) == []
    generation = stream.result()
    assert generation.finish_reason == "cancelled"
    assert generation.token_ids == [] and generation.text == ""
    assert cache.to_bytes(True) == before
    # The same for one that has ended, of which nothing was read.
    stream = slow.stream(cache, [20], max_tokens=1, **NO_END)
    wait_until(lambda: stream._handle.done)
    stream.cancel()
    assert stream.result().token_ids == []
    assert cache.to_bytes(True) == before


# ---- The loop ----


def test_texts_are_encoded_beside_the_loop(
    tiny: Gemma, cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(tiny)
    encode, threads = requests.encode, []

    def encoding(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return encode(*arguments)

    async def main() -> None:
        await tiny.ascore("a", ["b", "c"])
        await tiny.alogits(cache, "a")
        await tiny.aembed(["a", "b"], pooling="mean")
        with pytest.raises(ValueError, match=r"choices\[1\]"):
            await tiny.ascore("a", ["b", ""])
        with pytest.raises(ValueError, match=r"texts\[1\]"):
            await tiny.aembed(["a", ""], pooling="mean")

    monkeypatch.setattr(requests, "encode", encoding)
    asyncio.run(main())
    assert len(threads) == 9 and threading.get_ident() not in threads


def test_waiting_for_a_cache_does_not_block(slow: Gemma) -> None:
    cache = create_kv_cache(slow.config, 4096)
    session = Session(slow, capacity_tokens=4096)

    async def all_of(*calls: Any) -> list[Any]:
        return await asyncio.gather(*calls)

    async def main() -> None:
        calls: list[Callable[..., Coroutine[Any, Any, Any]]] = [
            partial(slow.agenerate, cache, "the"),
            partial(session.asend, "a"),
        ]
        for call in calls:
            step = HeldStep()
            first = asyncio.ensure_future(call(**step.options))
            waiting = [call(max_tokens=400, **NO_END) for _ in range(2)]
            await step.during(all_of(first, *waiting))
        step = HeldStep()
        stream = await slow.astream(cache, "", **step.options)
        other = slow.agenerate(cache, "", max_tokens=5, **NO_END)
        pieces, _ = await step.during(all_of(pieces_of(stream), other))
        assert len(pieces) == 400

    asyncio.run(main())
    assert session.turns == 3
    assert len(cache) >= 3 * 400 + 405


async def pieces_of(stream: Any) -> list[Any]:
    return [piece async for piece in stream]


def test_nobody_waits_for_a_reader_who_stalls(slow: Gemma) -> None:
    cache = create_kv_cache(slow.config, 4096)
    session = Session(slow, capacity_tokens=4096)

    async def main() -> None:
        streams = [
            slow.stream(cache, "a", **LONG),
            session.stream("a", **LONG),
        ]
        for stream in streams:
            await anext(stream)
        for call in (
            slow.agenerate(cache, "b"),
            slow.astream(cache, "b"),
            session.asend("b"),
            session.astream("b"),
        ):
            with pytest.raises(GemmaKVError, match=r"cancel\(\)"):
                await call
        for stream in streams:
            stream.cancel()

    asyncio.run(main())


def test_a_loop_that_stood_still_is_no_reader_who_stalls(slow: Gemma) -> None:
    cache = create_kv_cache(slow.config, 4096)

    async def main() -> None:
        stream = await slow.astream(cache, "a", **LONG)
        await anext(stream)
        other = asyncio.ensure_future(
            slow.agenerate(cache, "b", max_tokens=3, **NO_END)
        )
        await asyncio.sleep(0)  # it waits
        # As where the process is frozen; then it looks before the reader reads.
        for _ in range(6):
            asyncio.get_running_loop().call_soon(time.sleep, 0.15)
            await asyncio.sleep(0.01)  # it is over first: the loop stands still
            await anext(stream)
        assert len(await pieces_of(stream)) == 393
        assert len((await other).token_ids) == 3

    asyncio.run(main())


def test_a_waiting_task_may_be_cancelled(slow: Gemma) -> None:
    cache = create_kv_cache(slow.config, 8192)

    async def main() -> None:
        step = HeldStep()
        first = asyncio.create_task(
            slow.agenerate(cache, "a", **step.options)
        )
        await step.begun.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await slow.agenerate(cache, "b", max_tokens=5, **NO_END)
        step.end()
        assert len((await first).token_ids) == 400

    asyncio.run(main())
    assert len(cache) == 402


def test_two_loops_in_two_threads(tiny: Gemma) -> None:
    expected = tiny.generate(
        create_kv_cache(tiny.config), "the", max_tokens=60, **NO_END
    ).token_ids
    found: list[list[int]] = []

    async def read(cache: KVCache) -> list[int]:
        stream = tiny.stream(cache, "the", max_tokens=60, **NO_END)
        return [piece.token_id async for piece in stream]

    async def main() -> None:
        caches = [create_kv_cache(tiny.config) for _ in range(8)]
        found.extend(await asyncio.gather(*map(read, caches)))

    threads = [
        threading.Thread(target=asyncio.run, args=(main(),)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [expected] * 16


def test_a_stream_may_move_to_another_loop(tiny: Gemma, cache: KVCache) -> None:
    stream = tiny.stream(cache, "the", max_tokens=30, **NO_END)

    async def some(count: int) -> list[int]:
        return [(await anext(stream)).token_id for _ in range(count)]

    ids = asyncio.run(some(10)) + asyncio.run(some(10))
    ids += [piece.token_id for piece in stream]
    other = create_kv_cache(tiny.config)
    g = tiny.generate(other, "the", max_tokens=30, **NO_END)
    assert ids == g.token_ids


@pytest.mark.slow
def test_a_loop_that_is_closed_while_calls_run(slow: Gemma) -> None:
    cache = create_kv_cache(slow.config)
    other = create_kv_cache(slow.config)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        loop = asyncio.new_event_loop()

        read_ones: list[int] = []

        async def read(read_ones: list[int] = read_ones) -> None:
            async for piece in slow.stream(cache, "a", **ENDLESS):
                read_ones.append(piece.token_id)

        tasks = [
            loop.create_task(read()),
            loop.create_task(slow.agenerate(other, "a", **ENDLESS)),
        ]
        loop.run_until_complete(wait_in_loop(read_ones.__len__))
        loop.close()
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        del tasks, task, loop, read
        gc.collect()
        slow.generate(cache, "b", max_tokens=1)
        slow.generate(other, "b", max_tokens=1)
        assert len(other) <= 5 * 4
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2


def test_no_threads_wait(tiny: Gemma) -> None:
    tiny.generate(create_kv_cache(tiny.config), "a", max_tokens=1)
    before = len(os.listdir("/proc/self/task"))
    most = 0

    async def read() -> None:
        nonlocal most
        cache = create_kv_cache(tiny.config)
        async for _ in tiny.stream(cache, "the", max_tokens=20, **NO_END):
            most = max(most, len(os.listdir("/proc/self/task")))

    async def main() -> None:
        await asyncio.gather(*(read() for _ in range(32)))

    asyncio.run(main())
    assert most <= before


class Over(Exception):
    """The end of a call that talks beside others."""


def talk_beside(
    gemma: Gemma, told: list[int], middle: range, over: threading.Event
) -> None:
    """Talks until it is over. A call that tells its progress shares the steps:
    these wait until it tells something, and, a few later, until it tells
    something in the middle.
    """
    left = 3

    def process(ids: Any, logits: Any) -> None:
        nonlocal left
        wait_until(lambda: told or over.is_set())
        if over.is_set():
            raise Over
        left -= 1
        if left < 0:
            wait_until(
                lambda: over.is_set() or any(one in middle for one in told)
            )

    with pytest.raises(Over):
        gemma.generate(
            create_kv_cache(gemma.config), [BOS],
            logits_processor=process, **ENDLESS,
        )  # fmt: skip


@pytest.mark.slow
def test_async_progress_counts_what_is_computed(slow: Gemma) -> None:
    cache = create_kv_cache(slow.config, 8192)
    for call in ("generate", "agenerate"):
        cache.reset()
        told: list[int] = []
        over = threading.Event()
        beside = threading.Thread(
            target=talk_beside, args=(slow, told, range(1, 8001), over)
        )
        steps = requests_of(slow).engine.steps
        beside.start()
        wait_until(lambda steps=steps: requests_of(slow).engine.steps > steps)
        try:
            run = getattr(slow, call)(
                cache,
                [BOS, *[20] * 8000],
                max_tokens=2,
                progress=lambda done, total, told=told: told.append(done),
                **NO_END,
            )
            if call == "agenerate":
                asyncio.run(run)
        finally:
            over.set()
            beside.join()
        assert told == sorted(set(told)) and told[-1] == 8003
        # Appended it was at once.
        assert [done for done in told if 0 < done < 8001]


def test_streams_of_a_loop_share_their_steps(tiny_path: Path) -> None:
    gemma = Gemma.load(tiny_path, threads=1)

    async def read() -> None:
        cache = create_kv_cache(gemma.config)
        async for _ in gemma.stream(cache, PROMPT, max_tokens=200, **NO_END):
            pass

    async def read_all() -> None:
        await asyncio.gather(*[read() for _ in range(32)])

    asyncio.run(read_all())
    assert requests_of(gemma).engine.steps < 1000


# ---- Processes ----


# Without text: a tokenizer may let go of the interpreter's lock, too, and end
# the process when it does not get it back.
EXIT = """
import sys, threading, time, gemmakv
gemma = gemmakv.Gemma.load(sys.argv[1])
how = sys.argv[2]
begun = threading.Semaphore(0)
def called(*_):
    begun.release()
    time.sleep(0.001)  # without the interpreter's lock, as the end comes
def work():
    cache = gemmakv.create_kv_cache(gemma.config, 500)
    while True:
        cache.reset()
        begun.release()
        if how == "generate":
            gemma.generate(cache, [2, 5], max_tokens=450)
        elif how == "progress":
            gemma.generate(cache, [2, 5], max_tokens=450,
                           progress=called)
        elif how == "processor":
            gemma.generate(cache, [2, 5], max_tokens=450,
                           logits_processor=called)
        elif how == "save":
            class File:
                def write(self, data):
                    called()
                    return len(data)
            gemma.generate(cache, [2, 5], max_tokens=5)
            cache.save(File())
        else:
            for _ in gemma.stream(cache, [2, 5], max_tokens=450):
                begun.release()
threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
for thread in threads: thread.start()
for _ in range(int(sys.argv[3])): begun.acquire()
print("end")
"""


@pytest.mark.parametrize(
    "how", ["generate", "progress", "processor", "save", "stream"]
)
def test_exit_while_daemon_threads_call(tiny_path: Path, how: str) -> None:
    for calls in (1, 4, 6, 9):
        assert output_of(EXIT, tiny_path, how, calls) == "end\n"


FORK = """
import os, sys, time, gemmakv
gemma = gemmakv.Gemma.load(sys.argv[1])
def new():
    return gemmakv.create_kv_cache(gemma.config)
cache, idle = new(), new()
gemma.generate(idle, "a", max_tokens=2)
expected = gemma.generate(idle.fork(), "b", max_tokens=5).token_ids
stream = gemma.stream(cache, "a", max_tokens=400)
next(stream)
child = os.fork()
if child == 0:
    try:
        for call in (
            lambda: gemma.generate(cache, "b"),
            lambda: cache.truncate(0),
            lambda: list(stream),
            lambda: stream.result(),
        ):
            try:
                call()
            except gemmakv.GemmaKVError as error:
                assert "forked" in str(error), error
            else:
                raise AssertionError("no error")
        stream.cancel()
        del stream
        found = gemma.generate(idle, "b", max_tokens=5).token_ids
        assert found == expected
        own = new()
        assert len(gemma.generate(own, "a", max_tokens=3).token_ids) > 0
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
for _ in range(24000):
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        break
    time.sleep(0.005)  # the pause of a poll
else:
    os.kill(child, 9)
    raise SystemExit("the child hangs")
assert status == 0, status
stream.cancel()
print(gemma.generate(idle, "b", max_tokens=5).token_ids == expected)
"""


def test_a_forked_child_says_what_it_cannot_use(tiny_path: Path) -> None:
    assert output_of(FORK, tiny_path) == "True\n"


def test_samples_that_fail_leave_the_pending_token(tiny: Gemma) -> None:
    cache = create_kv_cache(tiny.config)
    tiny.generate(cache, PROMPT, max_tokens=3, **NO_END)
    before = cache.to_bytes(True)

    def fail(done: int, total: int) -> None:
        raise RuntimeError("from the callback")

    for prompt in ("the", ""):
        with pytest.raises(RuntimeError, match="from the callback"):
            tiny.generate(cache, prompt, n=2, max_tokens=5, progress=fail)
        assert cache.to_bytes(True) == before
    said = tiny.generate(cache.fork(), "the", n=2, max_tokens=2, **NO_END)
    # The pending token and the prompt were computed, the rest was held.
    assert said[0].usage.cached_tokens == len(PROMPT) + 2
    assert said[0].timings.prefill_s > 0


# ---- Ends that wait for the step that runs ----


class HeldStep:
    """The model's second step, or its first, that lasts until `end`."""

    def __init__(self, number: int = 2) -> None:
        self._left = number
        self._loop = asyncio.get_running_loop()
        self.begun = asyncio.Event()
        self._ended = threading.Event()
        self._overdue = False
        self.options: Any = {**LONG, "logits_processor": self._process}

    def _process(self, ids: object, logits: object) -> None:
        self._left -= 1
        if self._left == 0:
            self._loop.call_soon_threadsafe(self.begun.set)
            self._overdue = not self._ended.wait(120)

    def end(self) -> None:
        self._ended.set()

    async def during(self, work: Awaitable[Any], seconds: float = 0.05) -> Any:
        """Does it while the step runs, for so long at least: the loop is free
        all the time, and the work is not done before the step has ended.
        """
        await self.begun.wait()
        task = asyncio.ensure_future(work)
        await pause(seconds)
        done, overdue = task.done(), self._overdue
        self.end()
        result = await task
        assert not done and not overdue
        return result


@pytest.mark.parametrize("how", ["acancel", "aclose", "exit", "both"])
def test_ending_a_reply_does_not_block(slow: Gemma, how: str) -> None:
    async def main() -> None:
        step = HeldStep()
        session = Session(slow, capacity_tokens=4096)
        stream = session.stream("hello", **step.options)
        reader = asyncio.ensure_future(asyncio.wait_for(read_all(stream), 60))
        if how == "exit":
            await step.during(stream.__aexit__())
        elif how == "acancel":
            await step.during(stream.acancel())
        elif how == "aclose":
            await step.during(session.aclose())
        else:
            await step.during(both(session, stream))
        assert stream.result().finish_reason == "cancelled"
        assert stream.result().usage.completion_tokens <= 2
        assert session.messages[-1].text == (await reader).strip()
        assert session.cache.closed is (how in ("aclose", "both"))

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["chat", "session"])
def test_letting_go_of_a_reply_does_not_block(slow: Gemma, kind: str) -> None:
    async def main() -> None:
        step = HeldStep()
        session = Session(slow, capacity_tokens=4096)
        cache = create_kv_cache(slow.config)
        if kind == "chat":
            stream = await slow.achat(
                [{"role": "user", "content": "hello"}], stream=True,
                cache=cache, **step.options,
            )  # fmt: skip
        else:
            stream = await session.astream("hello", **step.options)
        await anext(stream)
        await step.begun.wait()
        del stream
        assert not step._overdue  # the step still runs
        step.end()
        # What was read of it is kept then.
        if kind == "chat":
            await wait_in_loop(lambda: len(cache))
        else:
            await session.asend("more", max_tokens=1)
            assert session.turns == 2 and session.messages[1].incomplete

    asyncio.run(main())


async def both(session: Session, stream: Any) -> None:
    await asyncio.gather(session.aclose(), stream.acancel())


async def read_all(stream: Any) -> str:
    return "".join([piece.text async for piece in stream])


@pytest.mark.parametrize("kind", ["stream", "chat"])
def test_progress_that_raises_does_not_block(slow: Gemma, kind: str) -> None:
    def fail(done: int, total: int) -> None:
        raise RuntimeError("no more")

    async def main() -> None:
        step = HeldStep()
        session = Session(slow, capacity_tokens=4096)
        options = {**step.options, "progress": fail}
        stream: Any
        if kind == "chat":
            stream = session.stream("hello", **options)
        else:
            stream = slow.stream(session.cache, PROMPT, **options)
        with pytest.raises(RuntimeError, match="no more"):
            await step.during(read_all(stream))
        with pytest.raises(RuntimeError, match="no more"):
            stream.result()
        if kind == "chat":
            assert session.messages[-1].incomplete
            await session.asend("more", max_tokens=1)
        else:
            assert len(session.cache) == len(PROMPT) + 1

    asyncio.run(main())


def test_a_callback_that_cancels_does_not_block(slow: Gemma) -> None:
    async def main() -> None:
        step = HeldStep()
        session = Session(slow, capacity_tokens=4096)
        options = {**step.options, "progress": lambda *_: stream.cancel()}
        stream = session.stream("hello", **options)
        text = await step.during(read_all(stream))
        assert session.messages[-1].text == text.strip()
        assert stream.result().finish_reason == "cancelled"

    asyncio.run(main())


def test_a_session_is_closed_by_its_block(tiny: Gemma) -> None:
    async def main() -> Session:
        async with Session(tiny) as session:
            await session.asend("hello", max_tokens=2)
            assert not session.cache.closed
        await session.aclose()
        return session

    assert asyncio.run(main()).cache.closed


def test_afork_is_fork_that_does_not_block(slow: Gemma) -> None:
    def session() -> Session:
        return Session(slow, "be kind " * 200, capacity_tokens=4096)

    async def main() -> None:
        expected = session().fork()
        own = session()
        # Its beginning is computed after the step that runs.
        step = HeldStep()
        other = asyncio.ensure_future(
            slow.agenerate(
                create_kv_cache(slow.config), PROMPT,
                **{**step.options, "max_tokens": 3},
            )
        )  # fmt: skip
        found = await step.during(own.afork())
        await other
        assert same(found.cache, expected.cache) and len(found.cache) > 200
        assert found.cache.shared_nbytes and same(own.cache, found.cache)
        reply = await found.asend("hello", max_tokens=8, **NO_END)
        assert reply.text == expected.send("hello", max_tokens=8, **NO_END).text
        # It takes its turn.
        step = HeldStep()
        task = asyncio.ensure_future(own.asend("hello", **step.options))
        fork = await step.during(aforked_after(own, task))
        assert fork.messages == own.messages

    asyncio.run(main())


async def aforked_after(session: Session, task: asyncio.Task[Any]) -> Session:
    fork = await session.afork()
    assert task.done()
    return fork
