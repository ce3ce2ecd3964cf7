"""Several processes that serve one port: a supervisor and its workers.

The supervisor loads nothing and has no threads. It forks the workers, tells
them to stop, and replaces those that end. All accept at one socket: what waits
there is lost with no worker, and whoever has least to do takes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

from gemmakv.server.process.board import AWAY, Board
from gemmakv.server.service.metrics import merged

LOG = logging.getLogger("gemmakv.server")

_READY = b"r"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MOST_STARTS = 5  # of a worker that never becomes ready, with no other there
_LONGEST_WAIT_S = 5.0
_PATIENCE_S = 10.0  # behind the time that draining may take
_END_S = 0.05  # between two looks at a process that is about to end
YIELD_S = 0.002  # for a worker that has less to do


class Worker:
    """What a worker knows of being one.

    Attributes:
      index: its place, 0 to workers - 1.
      first: whether there is no other: it answers also while it loads.
      control: to the supervisor, which closes it when it ends.
      mark: what this worker, and whoever had its place, owns begins with.
    """

    def __init__(
        self,
        index: int,
        first: bool,
        board: Board,
        control: socket.socket,
        server: str,
    ) -> None:
        self.index = index
        self.first = first
        self.control = control
        self.mark = f"{server}.{index}."
        self._board = board
        # What its predecessor counted goes on; what that did then is over.
        self._before = merged([], [board.read(index)])
        board.write(index, self._before)
        self._active = self._connections = 0
        self._accepts = False

    def say_ready(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone
            self.control.send(_READY)

    def beat(self) -> None:
        """To be called now and then: one that does not is taken for hung."""
        self._board.beat(self.index)

    def accepts(self, accepts: bool) -> None:
        """Whether the others count on it to take what comes."""
        self._accepts = accepts
        self.count()

    def count(self, active: int = 0, connections: int = 0) -> None:
        """Counts requests and connections that came (1) or ended (-1)."""
        self._active += active
        self._connections += connections
        load = (self._active << 32) + self._connections
        self._board.set_load(self.index, load if self._accepts else AWAY)

    def is_turn(self, waited: float) -> bool:
        """Whether it should take what has waited for that many seconds.

        One that takes nothing takes nothing while others do: it is draining,
        and would only say so.
        """
        loads = self._board.loads()
        own = loads[self.index]
        return own <= min(loads) or (own != AWAY and waited >= YIELD_S)

    def publish(self, metrics: str) -> None:
        """Tells the others, and a successor, this worker's numbers."""
        whole = merged([metrics], [self._before])
        if not self._board.write(self.index, whole):
            LOG.warning("the metrics of worker %d are too many", self.index)

    def metrics(self, own: str) -> str:
        """The numbers of all workers, with its own of now."""
        self.publish(own)
        return merged([self._board.read(k) for k in range(self._board.workers)])


class _Place:
    """Of one worker: the process that is it now, if there is one."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.pid = 0
        self.control: socket.socket | None = None
        self.ready = False
        self.starts = 0  # since one was ready
        self.start_at: float | None = None
        self.beat = -1  # the last one that was seen
        self.seen_at = 0.0


def supervise(
    workers: int,
    sock: socket.socket,
    drain_timeout: float,
    announce: Callable[[], None],
    worker_timeout: float = 60.0,
) -> Worker | int:
    """Returns in each worker, and with an exit code in the supervisor.

    The first worker starts alone: the others find what it has made. `announce`
    is called once, when all are ready, or one of them has failed. A worker that
    does not `beat` for `worker_timeout` seconds is killed, and replaced. There
    must be no other thread.
    """
    return _Supervisor(
        workers, sock, drain_timeout, announce, worker_timeout
    ).run()


class _Supervisor:
    def __init__(
        self,
        workers: int,
        sock: socket.socket,
        drain_timeout: float,
        announce: Callable[[], None],
        worker_timeout: float,
    ) -> None:
        self._sock = sock
        self._worker_timeout = worker_timeout
        self._looked_at = time.monotonic()
        self._drain_timeout = drain_timeout
        self._announce = announce
        self._board = Board(workers)
        self._server = secrets.token_hex(4)
        self._places = [_Place(index) for index in range(workers)]
        self._announced = False
        self._was_ready = False  # some worker, once
        self._code: int | None = None  # once it stops
        self._give_up: float | None = None

    def run(self) -> Worker | int:
        with _wakeups() as wakeups:
            self._places[0].start_at = 0.0
            while True:
                worker = self._start_due()
                if worker is not None:
                    return worker
                if self._code is not None and not any(
                    place.pid for place in self._places
                ):
                    return self._code
                self._wait(wakeups)

    def _start_due(self) -> Worker | None:
        """Forks what is due; returns in the new process."""
        for place in self._places:
            due = place.start_at is not None and (
                place.start_at <= time.monotonic()
            )
            if due and self._code is None:
                worker = self._fork(place)
                if worker is not None:
                    return worker
        return None

    def _fork(self, place: _Place) -> Worker | None:
        ours, theirs = socket.socketpair()
        sys.stderr.flush()
        # A signal waits until the new process has handlers of its own: by the
        # inherited ones it would be lost to it, and told the supervisor again.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            pid = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            ours.close()
            theirs.close()
            if not self._was_ready:
                raise
            LOG.error("worker %d cannot be started: %s", place.index, error)
            place.starts += 1
            self._start_later(place)
            return None
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            theirs.close()
            place.pid, place.control = pid, ours
            place.ready, place.start_at = False, None
            place.starts += 1
            place.beat, place.seen_at = -1, time.monotonic()
            return None
        signal.set_wakeup_fd(-1)
        # A terminal's Ctrl-C reaches all; the supervisor says what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        # Whoever else held it would hide the supervisor's end.
        ours.close()
        for other in self._places:
            if other.control is not None:
                other.control.close()
        return Worker(
            place.index, not self._was_ready, self._board, theirs, self._server
        )

    def _wait(self, wakeups: socket.socket) -> None:
        """For a signal, for a worker, or until something is due."""
        with selectors.DefaultSelector() as selector:
            selector.register(wakeups, selectors.EVENT_READ)
            for place in self._places:
                if place.control is not None:
                    selector.register(
                        place.control, selectors.EVENT_READ, place
                    )
            found = [key.data for key, _ in selector.select(self._timeout())]
        # First: it may be why a worker has ended.
        with contextlib.suppress(BlockingIOError):
            for number in wakeups.recv(64):
                self._stop(number)
        for place in found:
            if place is not None:
                self._hear(place)
        for place in self._places:
            if place.pid and place.control is None:
                self._reap(place)
        if self._code is None:
            self._end_hung()
        if self._give_up is not None and time.monotonic() > self._give_up:
            LOG.error("workers did not end in time")
            self._code = 1
            self._signal(signal.SIGKILL)
            self._give_up = None

    def _end_hung(self) -> None:
        """Kills workers that have not beaten for too long."""
        now = time.monotonic()
        # For so long this process was stopped, too, or the machine slept.
        slept = max(now - self._looked_at - self._look_s, 0)
        self._looked_at = now
        for place, beat in zip(self._places, self._board.beats()):
            if not place.pid:
                continue
            place.seen_at += slept
            if beat != place.beat:
                place.beat, place.seen_at = beat, now
            elif now - place.seen_at > self._worker_timeout:
                LOG.error(
                    "worker %d (process %d) has not answered for %.0f s: it "
                    "is replaced",
                    place.index,
                    place.pid,
                    now - place.seen_at,
                )
                place.seen_at = now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(place.pid, signal.SIGKILL)

    @property
    def _look_s(self) -> float:
        """Between two looks at the workers."""
        return min(self._worker_timeout / 4, 5.0)

    def _timeout(self) -> float | None:
        times = [
            place.start_at
            for place in self._places
            if place.start_at is not None and self._code is None
        ]
        if self._give_up is not None:
            times.append(self._give_up)
        now = time.monotonic()
        if self._code is None and any(place.pid for place in self._places):
            times.append(now + self._look_s)
        if any(place.pid and not place.control for place in self._places):
            times.append(now + _END_S)
        return max(min(times) - time.monotonic(), 0) if times else None

    def _hear(self, place: _Place) -> None:
        assert place.control is not None
        if place.control.recv(64):
            place.ready, place.starts = True, 0
            if not self._was_ready:
                self._was_ready = True
                for other in self._places:
                    if not other.pid:
                        other.start_at = 0.0
            if all(other.ready for other in self._places):
                self._say_serving()
            return
        # It may take a while to end, or never do: others are heard meanwhile.
        place.control.close()
        place.control = None

    def _reap(self, place: _Place) -> None:
        pid, status = os.waitpid(place.pid, os.WNOHANG)
        if not pid:
            return
        was_ready, place.ready, place.pid = place.ready, False, 0
        self._board.set_load(place.index, AWAY)
        self._ended(place, os.waitstatus_to_exitcode(status), was_ready)

    def _say_serving(self) -> None:
        if not self._announced:
            self._announced = True
            self._announce()

    def _ended(self, place: _Place, code: int, was_ready: bool) -> None:
        # One that was not ready yet ends by the signal itself.
        told = code in (0, -signal.SIGTERM)
        if self._code is not None:
            # One that did not start served nobody, and has said why.
            if was_ready and not told:
                self._code = self._code or 1
            return
        if not self._was_ready:  # it has said why, or all are told to stop
            self._code = 0 if told else code if code > 0 else 1
            return
        LOG.warning(
            "worker %d ended %s%s",
            place.index,
            f"by signal {-code}" if code < 0 else f"with {code}",
            "" if was_ready else " before it was ready",
        )
        others = any(other.ready for other in self._places)
        if place.starts >= _MOST_STARTS and not others:
            LOG.error("worker %d does not start: stopping", place.index)
            self._code = 1
            self._end()
            return
        if not was_ready:
            self._say_serving()
        self._start_later(place)

    def _start_later(self, place: _Place) -> None:
        wait = 0.1 * 2**place.starts if place.starts else 0
        place.start_at = time.monotonic() + min(wait, _LONGEST_WAIT_S)

    def _stop(self, number: int) -> None:
        if number not in _SIGNALS:
            return
        if self._give_up is None:
            self._code = self._code or 0
            self._end()
        else:
            self._code = 128 + number
            self._signal(signal.SIGKILL)

    def _end(self) -> None:
        self._sock.close()
        self._give_up = time.monotonic() + self._drain_timeout + _PATIENCE_S
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for place in self._places:
            if place.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(place.pid, number)


@contextlib.contextmanager
def _wakeups() -> Iterator[socket.socket]:
    """A socket that gets the number of each signal that ends the server."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    handlers = {
        number: signal.signal(number, lambda *_: None) for number in _SIGNALS
    }
    before = signal.set_wakeup_fd(writer.fileno())
    owner = os.getpid()
    try:
        yield reader
    finally:
        if os.getpid() == owner:  # in a worker it is already over
            signal.set_wakeup_fd(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        reader.close()
        writer.close()
