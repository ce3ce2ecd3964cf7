"""The socket that a server accepts at, alone or with other processes."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from typing import Any

from gemmakv.server.process.workers import YIELD_S, Worker

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

LOG = logging.getLogger("gemmakv.server")

_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.5  # shorter than the event loop's, until it tries again
# Files that connections leave to others, those that answer: of a pipe, a disk's
# tier, the page. Of low limits it is a quarter.
_LEFT = 64
_SAY_S = 60.0  # between two lines that say the same


class Listener(socket.socket):
    """Of one of several workers: they take turns."""

    worker: Worker | None = None
    _since = 0.0  # of waiting for its turn
    _last = 0.0
    _full_until = 0.0

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises BlockingIOError where another worker should take it.

        The event loop calls this until it fails, and again while somebody
        waits: a worker with more to do leaves the others a moment. Where there
        is no room for a connection the loop waits a second, but not before it
        has called this a thousand times more, with a traceback for each.
        """
        now = time.monotonic()
        if now < self._full_until:
            raise BlockingIOError
        if now - self._last > YIELD_S:
            self._since = now
        self._last = now
        worker = self.worker
        if worker is not None and not worker.is_turn(now - self._since):
            raise BlockingIOError
        try:
            self._check_room()
            found = super().accept()
        except OSError as error:
            if error.errno in _FULL:
                self._full_until = now + _PAUSE_S
            raise
        if worker is not None:
            worker.count(connections=1)
        # The others are busy: the next one need not wait as long.
        self._since = now - 0.9 * YIELD_S
        return found

    def _check_room(self) -> None:
        """Raises OSError where a connection would be one of the last files
        that may be opened.
        """
        if resource is None:
            return
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most == resource.RLIM_INFINITY:
            return
        next_one = os.dup(self.fileno())  # the lowest number that is free
        os.close(next_one)
        if next_one >= most - min(_LEFT, most // 4):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def listener(sock: socket.socket, worker: Worker | None) -> Listener:
    """The socket as a server accepts at it. Takes it over."""
    found = Listener(sock.family, sock.type, sock.proto, sock.detach())
    found.setblocking(False)
    found.worker = worker
    return found


class LoopErrors:
    """An event loop's handler for errors that nobody awaits: there being no
    room for a connection is a line of the log, now and then.
    """

    _said = -_SAY_S

    def __call__(
        self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        error = context.get("exception")
        number = error.errno if isinstance(error, OSError) else None
        if number not in _FULL or "socket" not in context:
            loop.default_exception_handler(context)
            return
        now = time.monotonic()
        if now - self._said >= _SAY_S:
            self._said = now
            LOG.warning(
                "no connection can be accepted: %s; clients wait until others "
                "go (the limit of open files is that of `ulimit -n`)",
                os.strerror(number or 0),
            )


__all__ = ["Listener", "LoopErrors", "listener"]
