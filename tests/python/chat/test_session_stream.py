"""Sessions under streams, cancellation, failures, threads and asyncio."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gemmakv import ChatStream, Gemma, GemmaKVError, Message, Session
from gemmakv.chat import _one_call
from gemmakv.generation._requests import requests_of
from support import tiny_gguf
from support.ctrl_c import ctrl_c_when
from support.sessions import NO_END, assert_same, assert_sound, said, state
from support.waits import LIMIT_S, wait_in_loop, wait_until

LONG: Any = {"max_tokens": 200, **NO_END}


@pytest.fixture(params=["plain", "gemma"])
def session(tiny: Gemma, request: pytest.FixtureRequest) -> Session:
    return said(Session(tiny, template=request.param), "one")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has calls wait for a reader that a busy machine keeps from reading."""
    monkeypatch.setattr(_one_call, "_GRACE_S", LIMIT_S)


def settled(session: Session, stream: ChatStream, shown: list[str]) -> None:
    """The cancelled reply stands in the session as it was shown."""
    message = session.messages[-1]
    assert message == Message(message.role, "".join(shown), incomplete=True)
    assert stream.result().text == "".join(shown)
    assert_sound(session)
    session.send("next", max_tokens=1)
    assert_sound(session)


def test_stream_is_send_in_pieces(session: Session) -> None:
    options: Any = {"max_tokens": 40, "seed": 7, **NO_END}
    other = session.fork()
    reply = other.send("two", **options)
    stream = session.stream("two", **options)
    pieces = list(stream)
    assert "".join(p.text for p in pieces) == reply.text
    assert [p.token_id for p in pieces if p.token_id >= 0] == reply.token_ids
    assert pieces[-1].finish_reason == "length"
    assert_same(stream.result(), reply)
    assert list(stream) == []
    stream.cancel()
    assert state(session) == state(other)
    assert session.stats.saved_prefill_tokens == (
        other.stats.saved_prefill_tokens
    )


def test_a_stream_that_ended_frees_the_session(session: Session) -> None:
    stream = session.stream("two", max_tokens=3, **NO_END)
    for piece in stream:
        if piece.finish_reason is not None:
            break
    assert session.turns == 2
    session.send("three", max_tokens=1)


def test_cancelled_reply_stays_as_far_as_it_came(session: Session) -> None:
    stream = session.stream("two", **LONG)
    shown = [next(stream).text for _ in range(5)]
    stream.cancel()
    stream.cancel()
    assert session.turns == 2  # nothing else needs to be called
    shown += [piece.text for piece in stream]
    assert stream.result().finish_reason == "cancelled"
    settled(session, stream, shown)


def test_cancelled_before_anything_came(session: Session) -> None:
    before = state(session)
    entered, go_on = threading.Event(), threading.Event()

    def hold(token_ids: object, logits: Any) -> Any:
        entered.set()
        assert go_on.wait(LIMIT_S)
        return logits

    busy = threading.Thread(
        target=lambda: session.gemma.generate(
            "one", max_tokens=1, logits_processor=hold
        )
    )
    busy.start()
    assert entered.wait(LIMIT_S)
    stream = session.stream("two", **LONG)  # it waits for that step
    canceller = threading.Thread(target=stream.cancel)
    canceller.start()
    wait_until(lambda: stream._inner._cancelled)
    go_on.set()
    canceller.join()
    busy.join()
    assert list(stream) == [] and stream.result().token_ids == []
    assert stream.result().finish_reason == "cancelled"
    assert state(session) == before
    assert_sound(session)
    session.send("three", max_tokens=1)


def test_cancelled_before_it_was_read(session: Session) -> None:
    before = state(session)
    stream = session.stream("two", **LONG)
    stream.cancel()
    said = "".join(piece.text for piece in stream)
    if stream.result().token_ids:  # the model was quicker
        assert session.messages[-2:] == [
            Message("user", "two"),
            Message("model", said, True),
        ]
    else:
        assert state(session) == before
    assert_sound(session)
    session.send("three", max_tokens=1)


def test_astream_prepares_nothing_on_the_loop(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocks(self: object, work: object) -> None:
        raise AssertionError("it would wait on this thread")

    async def run() -> str:
        stream = await session.astream("two", max_tokens=3, **NO_END)
        return "".join([piece.text async for piece in stream])

    monkeypatch.setattr(type(requests_of(session.gemma)), "done", blocks)
    assert asyncio.run(run()) == session.messages[-1].content


def test_cancel_from_another_thread(session: Session) -> None:
    stream = session.stream("two", **LONG)
    shown: list[str] = []

    def cancel() -> None:
        wait_until(lambda: len(shown) >= 5)
        stream.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    for piece in stream:
        shown.append(piece.text)
        if len(shown) == 20:  # before the reply is over
            thread.join()
    thread.join()
    assert stream.result().finish_reason == "cancelled"
    settled(session, stream, shown)


def test_with_block_and_letting_go_cancel(session: Session) -> None:
    with session.stream("two", **LONG) as stream:
        shown = [next(stream).text for _ in range(3)]
    assert session.turns == 2
    assert session.messages[-1].content.startswith("".join(shown))
    piece = next(session.stream("three", **LONG))
    gc.collect()
    assert session.turns == 3
    assert piece.finish_reason is None
    assert_sound(session)
    del stream
    session.send("four", max_tokens=1)


def test_nobody_waits_for_the_reader(session: Session) -> None:
    stream = session.stream("two", **LONG)
    shown = [next(stream).text for _ in range(3)]
    calls: list[Callable[[], object]] = [
        lambda: session.send("three", max_tokens=1),
        lambda: session.stream("three"),
        session.fork,
        session.undo,
        session.to_bytes,
        lambda: session.cache.truncate(1),
    ]
    errors: list[BaseException] = []

    def try_all() -> None:
        for call in calls:
            with pytest.raises(GemmaKVError, match=r"cancel\(\)") as caught:
                call()
            errors.append(caught.value)

    try_all()
    thread = threading.Thread(target=try_all)
    thread.start()
    thread.join(60)
    assert len(errors) == 2 * len(calls)
    shown.append(next(stream).text)  # the reply is none the worse
    stream.cancel()
    assert session.send("three", max_tokens=1).finish_reason == "length"
    shown += [piece.text for piece in stream]
    assert session.messages[3] == Message("model", "".join(shown), True)
    assert_sound(session)


def test_nobody_waits_for_the_reader_of_a_stream_that_begins(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    begin = session._talk.begin

    def slowly(*arguments: Any, **keywords: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return begin(*arguments, **keywords)

    monkeypatch.setattr(session._talk, "begin", slowly)

    async def asend() -> None:
        await asyncio.wait_for(session.asend("three"), 60)

    with ThreadPoolExecutor(4) as pool:
        stream = pool.submit(session.stream, "two", **LONG)
        assert begun.wait(60)
        waiting = [
            pool.submit(session.send, "three"),
            pool.submit(asyncio.run, asend()),
        ]
        # They wait, most often: otherwise they find it still begun.
        time.sleep(0.02)
        go.set()
        opened = stream.result(60)
        try:
            for one in waiting:
                with pytest.raises(GemmaKVError, match="still being streamed"):
                    one.result(60)
        finally:
            opened.cancel()


@pytest.mark.parametrize("kind", ["send", "stream", "asend"])
def test_close_in_a_call_of_ones_own(session: Session, kind: str) -> None:
    errors: list[BaseException] = []

    def progress(done: int, total: int) -> None:
        if not errors:
            try:
                session.close()
            except GemmaKVError as error:
                errors.append(error)

    def call() -> None:
        options: Any = {"max_tokens": 5, "progress": progress, **NO_END}
        if kind == "asend":
            asyncio.run(session.asend("two", **options))
        elif kind == "send":
            session.send("two", **options)
        else:
            session.stream("two", **options).result()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and len(errors) == 1
    assert session.turns == 2
    session.close()
    with pytest.raises(ValueError, match="closed"):
        session.send("three")


def test_close_takes_its_turn_among_others(tiny: Gemma) -> None:
    for _ in range(5):
        session = Session(tiny, overflow="drop_oldest_turns")
        turns: list[int] = []

        def talk(session: Session = session, turns: list[int] = turns) -> None:
            with pytest.raises(ValueError, match="closed"):
                while True:
                    for _ in session.stream("two", max_tokens=3, **NO_END):
                        turns.append(session.turns)

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        wait_until(turns.__len__)
        session.close()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.usefixtures("patient")
def test_other_threads_wait_while_a_reader_reads(session: Session) -> None:
    stream = session.stream("two", max_tokens=150, **NO_END)
    replies: list[str] = []
    next(stream)
    thread = threading.Thread(
        target=lambda: replies.append(session.send("three", max_tokens=2).text)
    )
    thread.start()
    assert len(list(stream)) >= 100
    thread.join(60)
    assert len(replies) == 1 and session.turns == 3
    assert session.messages[4].content == "three"
    assert_sound(session)


@pytest.mark.usefixtures("patient")
def test_a_pooled_thread_does_not_own_the_stream_that_it_read(
    tiny: Gemma,
) -> None:
    """Another client's call on it waits, and the reply comes to its end."""
    session = Session(tiny, template="plain")
    stream = session.stream("two", max_tokens=60, **NO_END)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(next, stream).result(60)
        other = pool.submit(session.send, "three", max_tokens=2)
        time.sleep(0.01)  # what must not end has the time to
        assert not other.done()
        assert len(list(stream)) >= 50
        assert len(other.result(60).token_ids) == 2
    assert [m.content for m in session.messages[::2]] == ["two", "three"]
    assert stream.result().finish_reason == "length"


@pytest.mark.parametrize("read", [0, 1, 2])
def test_a_cancelled_reply_keeps_no_half_stop(
    talker: Gemma, read: int
) -> None:
    """What was held back for a stop string is neither shown nor kept."""
    options: Any = {"max_tokens": 12, "seed": 4}
    options |= {"temperature": 1.0, "top_k": 4}
    session = Session(talker, template="plain")
    reply = session.fork().send("two", **options).text
    stop = reply[3:] + "never"
    stream = session.stream("two", stop=stop, **options)
    shown = []
    while len("".join(shown)) < 3:
        shown.append(next(stream).text)
    for _ in range(read):
        shown.append(next(stream).text)
    stream.cancel()
    shown += [piece.text for piece in stream]
    assert "".join(shown) == reply[:3]
    assert session.messages[-1].content == reply[:3]
    assert_sound(session)


@pytest.mark.usefixtures("patient")
def test_threads_take_turns(tiny: Gemma) -> None:
    session = Session(tiny, capacity_tokens=512)
    errors: list[BaseException] = []

    def work(name: int) -> None:
        try:
            for i in range(4):
                text = f"{name}.{i}"
                if i % 2:
                    session.send(text, max_tokens=4, **NO_END)
                else:
                    _ = session.stream(text, max_tokens=4, **NO_END).result()
                assert len(session.messages) % 2 == 0
                assert session.stats.tokens >= 0
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    said_by_users = [m.content for m in session.messages[::2]]
    assert sorted(said_by_users) == sorted(
        f"{n}.{i}" for n in range(4) for i in range(4)
    )
    assert_sound(session)


def test_sessions_of_one_model_at_once(tiny: Gemma) -> None:
    def talk(i: int) -> list[Message]:
        session = Session(tiny, f"sys {i}")
        for turn in range(4):
            session.send(f"t{turn}", max_tokens=8, seed=i, **NO_END)
        return session.messages

    expected = [talk(i) for i in range(4)]
    found: dict[int, list[Message]] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: talk(i)}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [found[i] for i in range(4)] == expected


# ---- Failures ----


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Gemma:
    """A model that can talk until someone stops it."""
    meta = tiny_gguf.metadata()
    meta["gemma3.context_length"] = (tiny_gguf.U32, 1 << 20)
    path = tmp_path_factory.mktemp("endless") / "endless.gguf"
    return Gemma.load(tiny_gguf.write(path, meta))


@pytest.mark.parametrize("template", ["plain", "gemma"])
def test_ctrl_c_in_send_changes_nothing(endless: Gemma, template: str) -> None:
    session = said(Session(endless, template=template), "one")
    before = state(session)
    expected = session.fork().send("three", max_tokens=9, seed=1, **NO_END)
    engine = requests_of(endless).engine
    for _ in range(2):
        steps = engine.steps
        with (
            pytest.raises(KeyboardInterrupt),
            ctrl_c_when(lambda n=steps: engine.steps > n + 3),
        ):
            session.send("two", max_tokens=1_000_000, **NO_END)
        assert state(session) == before
    reply = session.send("three", max_tokens=9, seed=1, **NO_END)
    assert_same(reply, expected)


@pytest.mark.parametrize("template", ["plain", "gemma"])
def test_ctrl_c_in_a_stream_keeps_what_came(
    endless: Gemma, template: str
) -> None:
    session = said(Session(endless, template=template), "one")
    stream = session.stream("two", max_tokens=1_000_000, **NO_END)
    shown: list[str] = []
    with (
        pytest.raises(KeyboardInterrupt),
        ctrl_c_when(lambda: len(shown) >= 5),
    ):
        while True:
            shown.append(next(stream).text)
    stream.cancel()  # it may have hit the test
    assert session.turns == 2
    assert session.messages[-1].content.startswith("".join(shown))
    assert_sound(session)
    session.send("three", max_tokens=1)


@pytest.mark.parametrize("template", ["plain", "gemma"])
def test_cancel_in_a_signal_handler(endless: Gemma, template: str) -> None:
    session = said(Session(endless, template=template), "one")
    stream = session.stream("two", max_tokens=1_000_000, **NO_END)
    before = signal.signal(signal.SIGINT, lambda *_: stream.cancel())
    shown: list[str] = []
    try:
        with ctrl_c_when(lambda: len(shown) >= 5):
            for piece in stream:
                shown.append(piece.text)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stream.result().finish_reason == "cancelled"
    settled(session, stream, shown)


def test_a_failing_callback_ends_the_call(session: Session) -> None:
    before = state(session)
    calls: list[int] = []

    def fail(done: int, total: int) -> None:
        calls.append(done)
        if done >= 2:
            raise RuntimeError("from the callback")

    with pytest.raises(RuntimeError, match="from the callback"):
        session.send("two", progress=fail, max_tokens=300, **NO_END)
    assert state(session) == before
    calls.clear()
    # A stream keeps what it delivered, and says that it is not all.
    stream = session.stream("two", progress=fail, max_tokens=300, **NO_END)
    shown = [next(stream).text for _ in range(2)]
    with pytest.raises(RuntimeError, match="from the callback"):
        next(stream)
    assert calls == [1, 2]
    shown += [piece.text for piece in stream]
    with pytest.raises(RuntimeError, match="from the callback"):
        _ = stream.result()
    reply = session.messages[-1]
    assert reply == Message("model", "".join(shown).strip(), incomplete=True)
    assert session.turns == 2
    again = Session.from_bytes(session.to_bytes(), session.gemma)
    assert again.messages == session.messages
    assert again.send("three", max_tokens=3) is not None
    session.send("three", max_tokens=3)
    assert again.messages == session.messages
    assert_sound(session)


class Broken:
    """A handle whose generation fails now."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def next(self, timeout_s: float = 0) -> None:
        self.cancel()
        self._handle.result()
        raise RuntimeError("from below")

    result = next

    def cancel(self) -> None:
        self._handle.cancel()


def test_a_failing_stream_keeps_the_turn(tiny: Gemma) -> None:
    for delivered in (0, 3):
        session = Session(tiny, capacity_tokens=512)
        session.send("one", max_tokens=2)
        before = state(session)
        stream = session.stream("two", max_tokens=delivered + 1, **NO_END)
        shown = [next(stream).text for _ in range(delivered)]
        stream._inner._handle = Broken(stream._inner._handle)
        with pytest.raises(RuntimeError, match="from below"):
            next(stream)
        if delivered == 0:
            assert state(session) == before
        else:
            reply = Message("model", "".join(shown).strip(), True)
            assert session.messages[-1] == reply
            assert_sound(session)
        session.send("three", max_tokens=2)


def test_a_callback_may_cancel_and_not_send(session: Session) -> None:
    found: list[str] = []

    def progress(done: int, total: int) -> None:
        if done == 2:
            with pytest.raises(GemmaKVError, match="still being streamed"):
                session.send("three")
            found.append("refused")
        if done == 4:
            stream.cancel()

    stream = session.stream(
        "two", progress=progress, max_tokens=100, **NO_END
    )
    shown = [piece.text for piece in stream]
    assert found == ["refused"]
    assert stream.result().finish_reason == "cancelled"
    settled(session, stream, shown)


def test_a_failure_after_the_reply_changes_nothing(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state(session)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(session._talk, "_keep_common", fail)
    with pytest.raises(MemoryError):
        session.send("two", max_tokens=3)
    stream = session.stream("two", max_tokens=3)
    with pytest.raises(MemoryError):
        list(stream)
    for call in (session.undo, lambda: session.goto(0)):
        with pytest.raises(MemoryError):
            call()  # type: ignore[operator]
    with pytest.raises(MemoryError):
        session.system = "new"
    monkeypatch.undo()
    assert state(session) == before and session.system is None
    session.send("three", max_tokens=1)


# ---- asyncio ----


def test_async_for(session: Session) -> None:
    options: Any = {"max_tokens": 20, "seed": 3, **NO_END}
    expected = session.fork().send("two", **options)

    async def main() -> list[str]:
        return [piece.text async for piece in session.stream("two", **options)]

    assert "".join(asyncio.run(main())) == expected.text
    assert session.messages[-1].content == expected.text


def test_tasks_with_their_own_sessions(session: Session) -> None:
    forks = [session.fork() for _ in range(4)]
    options: Any = {"max_tokens": 20, "seed": 3, **NO_END}
    expected = session.send("two", **options).text

    async def read(fork: Session) -> str:
        pieces = [piece async for piece in fork.stream("two", **options)]
        return "".join(piece.text for piece in pieces)

    async def main() -> list[str]:
        return await asyncio.gather(*map(read, forks))

    assert asyncio.run(main()) == [expected] * 4


def test_another_task_does_not_cut_a_reply_short(session: Session) -> None:
    async def main() -> ChatStream:
        stream = session.stream("two", max_tokens=30, **NO_END)
        await anext_of(stream)
        with pytest.raises(GemmaKVError, match="still being streamed"):
            session.send("three")
        async for _ in stream:
            pass
        session.send("three", max_tokens=1)
        return stream

    stream = asyncio.run(main())
    assert stream.result().finish_reason == "length"
    assert session.turns == 3


async def anext_of(stream: ChatStream) -> None:
    await stream.__anext__()


def test_async_cancellation_keeps_what_came(session: Session) -> None:
    shown: list[str] = []

    async def main() -> ChatStream:
        stream = session.stream("two", max_tokens=400, **NO_END)

        async def read() -> None:
            async for piece in stream:
                shown.append(piece.text)
                await asyncio.sleep(0)  # others of the loop have their turn

        task = asyncio.create_task(read())
        await wait_in_loop(lambda: len(shown) >= 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream.cancel()
        return stream

    stream = asyncio.run(main())
    assert session.turns == 2
    assert session.messages[-1].content.startswith("".join(shown))
    assert stream.result().finish_reason == "cancelled"
    session.send("three", max_tokens=1)
    assert_sound(session)
