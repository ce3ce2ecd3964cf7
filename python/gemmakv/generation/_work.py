"""Calls of the engine: one form of each, done on a thread or on a loop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    TypeAlias,
    TypeVar,
    cast,
)

from gemmakv import _core
from gemmakv._support.loops import Bell, until_done
from gemmakv._support.progress import Report
from gemmakv.generation._prompts import TokenArray
from gemmakv.generation._stream import REPORT_S

if TYPE_CHECKING:
    import asyncio

# How often a call on an event loop looks whether what it waits for is a reader
# who stalls.
_STALL_S = 0.05

_T = TypeVar("_T")


class Job(NamedTuple):
    """A batch for the engine."""

    caches: list[_core.KVCache]
    prompts: list[TokenArray]
    options: list[_core.GenerateOptions]
    report: Report | None = None
    streamed: bool = False  # is not waited for
    optional_bos: Sequence[bool] = ()
    # Of each row: positions that others are likely to begin with.
    boundaries: Sequence[Sequence[int]] = ()
    # What make the rows' constraints; they may take their time.
    constraints: Sequence[Callable[[], Any] | None] = ()
    draft: _core.Engine | None = None  # instead of the engine's own

    def made(self) -> list[Any]:
        return [make and make() for make in self.constraints]


# Yields jobs, and is sent the calls that they became: ended, unless streamed.
Work: TypeAlias = Generator[Job, _core.Call, _T]


def done(engine: _core.Engine, work: Work[_T]) -> _T:
    """Does it, waiting on this thread."""
    call = None
    with contextlib.closing(work):
        try:
            job, result = _go_on(work, None)
            while job is not None:
                begin = time.monotonic()
                made = job.made()
                _pass_time(job, begin)
                call = _start(engine, job, None, made)
                assert call is not None
                job, result = _go_on(work, call)
            return cast(_T, result)
        finally:
            # It keeps what it failed with, whose traceback has this frame.
            del call


async def adone(engine: _core.Engine, work: Work[_T]) -> _T:
    """Does it, waiting on this thread's event loop."""
    bell = Bell()
    with contextlib.closing(work):
        job, result = _go_on(work, None)
        while job is not None:
            job, result = _go_on(work, await _run(engine, job, bell))
        return cast(_T, result)


def _go_on(
    work: Work[_T], call: _core.Call | None
) -> tuple[Job | None, _T | None]:
    """Returns the next job, or None and the result.

    The end of the work is told from a `StopIteration` of code that a call runs.
    """
    try:
        return work.send(cast(_core.Call, call)), None
    except StopIteration as end:
        return None, end.value


class _Given(Exception):
    """Nobody waits for the result any more."""


async def off_the_loop(work: Callable[[Callable[[], None]], _T]) -> _T:
    """Calls `work` on a thread of its own, and returns what it returns.

    It is to call what it is given now and then, which raises once nobody wants
    the result any more. A task that is cancelled ends with the thread.
    """
    import asyncio  # who waits here has it: a start without it is quicker

    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()
    ended: asyncio.Future[None] = loop.create_future()
    left = threading.Event()

    def check() -> None:
        if left.is_set():
            raise _Given

    def settle(result: _T | None, error: BaseException | None) -> None:
        ended.set_result(None)
        if future.done():
            return
        if error is None:
            future.set_result(cast(_T, result))
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = work(check)
        except BaseException as error:
            failure = error
        # The loop may be gone.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="gemmakv-call", daemon=True).start()
    try:
        return await future
    except asyncio.CancelledError:
        left.set()
        while not ended.done():
            # A cancel meanwhile is put off until then.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(ended)
        raise
    finally:
        left.set()


def time_left(deadline: float | None, begin: float) -> float | None:
    """Computes what is left of a deadline in seconds, set at `begin`."""
    if deadline is None:
        return None
    return max(0.0, deadline - (time.monotonic() - begin))


def _start(
    engine: _core.Engine, job: Job, bell: Bell | None, made: list[Any]
) -> _core.Call | None:
    """Starts a job. With a bell it waits for nothing: None if a cache is in
    use, and the bell rings when it is free. Without one, what is not streamed
    has ended.
    """
    core_bell = None if bell is None else bell.core
    if job.draft is not None:
        engine = engine.with_draft(job.draft)
    return engine.start(
        *job[:3], job.streamed, core_bell, job.optional_bos, job.boundaries,
        made, job.report,
    )  # fmt: skip


def _pass_time(job: Job, begin: float) -> None:
    """Takes what has passed since off the deadlines."""
    for one in job.options:
        one.deadline = time_left(one.deadline, begin)


async def _run(engine: _core.Engine, job: Job, bell: Bell) -> _core.Call:
    import asyncio

    call = None
    made: list[Any] = []
    if any(job.constraints):
        begin = time.monotonic()
        made = await asyncio.to_thread(job.made)
        _pass_time(job, begin)
    while call is None:
        begin = time.monotonic()
        call = _start(engine, job, bell, made)
        if call is None:
            # Rings when the cache is free; a reader who stalls does not.
            await bell.wait(_STALL_S)
            _pass_time(job, begin)
    if job.streamed:
        return call
    try:
        while not call.done:
            if job.report is not None:
                job.report(call.progress, False)
            await bell.wait(None if job.report is None else REPORT_S)
        call.wait(job.report)  # it is done: raises if it failed
        return call
    except GeneratorExit:  # nothing can be waited for
        call.abort()
        raise
    except BaseException:
        call.abort()
        await until_done(call, bell)
        call.abort()  # it may have been decided before
        del call  # which keeps what it failed with, and that this frame
        raise
