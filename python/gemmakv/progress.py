"""Progress reports of calls that take a while."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Union

from gemmakv import _core
from gemmakv.errors import brief

Progress = Union[Callable[[int, int], object], bool, None]
Callback = Callable[[int, int], object]

_POLL_S = 0.05


def as_callback(progress: Progress, label: str) -> Callback | None:
    """The callable(done, total) that `progress` asks for; None for none.

    True is a line on stderr that begins with `label`.
    """
    if progress is None or progress is False:
        return None
    if progress is True:
        return _StderrLine(label)
    if callable(progress):
        return progress
    raise ValueError(
        "progress: expected a callable(done, total), True or None, found "
        + brief(progress)
    )


class _StderrLine:
    """Rewrites one line on a terminal; elsewhere prints it once, at the end."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        percent = 100 if total <= 0 else min(100, 100 * done // total)
        finished = done >= total
        if percent == self._shown or not (finished or sys.stderr.isatty()):
            return
        self._shown = percent
        start = "\r" if sys.stderr.isatty() else ""
        end = "\n" if finished else ""
        sys.stderr.write(f"{start}{self._label} {percent:3d} %{end}")
        sys.stderr.flush()


@contextmanager
def watch_caches(
    caches: Sequence[_core.KVCache], total: int, callback: Callback | None
) -> Iterator[None]:
    """Reports the tokens that `caches` gain while the body runs.

    The callback runs on a thread of its own; what it raises is raised when
    the body has ended. The last report, (total, total), says that the call is
    over, be it before `total` tokens.
    """
    if callback is None:
        yield
        return
    start = [len(cache) for cache in caches]
    stop = threading.Event()
    failures: list[BaseException] = []

    def poll() -> None:
        reported = -1
        while not stop.is_set():
            gained = sum(
                len(cache) - before for cache, before in zip(caches, start)
            )
            done = max(0, min(gained, total - 1))
            if done != reported:
                reported = done
                try:
                    callback(done, total)
                except BaseException as error:
                    failures.append(error)
                    return
            stop.wait(_POLL_S)

    poller = threading.Thread(target=poll, name="gemmakv-progress", daemon=True)
    poller.start()
    try:
        yield
    finally:
        stop.set()
        poller.join()
    if failures:
        raise failures[0]
    callback(total, total)
