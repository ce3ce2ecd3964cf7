"""The threads of a service: what they run does not hold up its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from gemmakv.server.service.errors import library_errors

_POOL_THREADS = 2  # for templates and tokenizing
GRAMMAR_THREADS = 2  # for grammars: some take long
_LONG = 100_000  # characters and token ids that take a thread of their own
SHORT = 1_000  # characters and token ids that take no thread

_T = TypeVar("_T")


class Threads:
    """The threads that a service runs functions on, away from its event loop.

    All functions raise RequestError for the library's errors.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_POOL_THREADS, "gemmakv-text")
        self._long = ThreadPoolExecutor(1, "gemmakv-long-text", step_back)
        self._grammars = ThreadPoolExecutor(
            GRAMMAR_THREADS, "gemmakv-grammar", step_back
        )

    async def run(self, function: Callable[..., _T], *args: Any) -> _T:
        """Runs a function that computes, on one of two threads."""
        return await _run_on(self._pool, function, *args)

    async def run_texts(self, function: Callable[..., _T], *args: Any) -> _T:
        """Runs a function that takes as long as its arguments are: texts,
        token ids, messages. Short ones stay on the event loop, since going to
        a thread and back takes longer than they do; long ones, of which some
        take seconds, have a thread of their own.
        """
        length = count_texts(args, _LONG)
        if length > _LONG:
            return await _run_on(self._long, function, *args)
        if length > SHORT:
            return await self.run(function, *args)
        with library_errors():
            return function(*args)

    async def run_waiting(self, function: Callable[..., _T], *args: Any) -> _T:
        """Runs a function that may wait for other machines or disks."""
        return await _run_on(None, function, *args)

    async def run_grammars(self, function: Callable[..., _T], *args: Any) -> _T:
        """Runs a function that compiles grammars."""
        return await _run_on(self._grammars, function, *args)

    def close(self) -> None:
        for pool in (self._pool, self._long, self._grammars):
            pool.shutdown(wait=False, cancel_futures=True)


async def _run_on(
    pool: Executor | None, function: Callable[..., _T], *args: Any
) -> _T:
    loop = asyncio.get_running_loop()
    with library_errors():
        return await loop.run_in_executor(pool, function, *args)


def count_texts(value: object, most: int) -> int:
    """Counts the characters and numbers in a value; more than `most` says no
    more than that.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if not isinstance(value, list | tuple | np.ndarray):
        return 1
    count = len(value)
    if count <= most and set(map(type, value)) <= {int}:
        return 2 * count  # as below, but soon
    for one in value:
        if count > most:
            break
        count += count_texts(one, most - count)
    return count


def step_back() -> None:
    """Makes this thread, and those that it starts, leave the processors to the
    engine's, where there are too few.
    """
    if sys.platform == "linux":  # elsewhere it is the whole process
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
