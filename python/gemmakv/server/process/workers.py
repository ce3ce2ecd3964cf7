"""Several processes that serve one socket, under uvicorn's supervisor.

The supervisor loads nothing. It starts the workers, tells them to stop, and
replaces those that end or hang. The processes tell each other by files of one
folder, most of them locks, which end with the process that holds them:

- `place-N`: locked by the worker whose number is N; it has the worker's pid.
- `loading`: locked by the worker that loads the model: one after the other,
  so that the first makes what the others find.
- `serving`: locked by all workers that have loaded it.
- `ready`: a byte for each time that a worker had loaded it.
- `failure`: the error, pickled, of a worker that could not, with no other.
- `*.db`: the numbers of each worker, by prometheus_client.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import pickle
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO

import uvicorn
from prometheus_client.multiprocess import mark_process_dead
from uvicorn.supervisors import Multiprocess

from gemmakv.server.service.counts import FOLDER

MOST_WORKERS = 512
_LOOK_S = 0.05  # between two looks at a lock
# How a worker ends that was told to.
_TOLD = (0, -signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT)


class Worker:
    """The place of this process among the workers of a server.

    Attributes:
      index: its number, the lowest that was free.
      mark: the beginning of the names of what this worker owns, and owned the
        worker that had its place before.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder = folder
        self._workers = workers
        for index in itertools.count():
            self._place = open(folder / f"place-{index}", "a+")  # noqa: SIM115
            if _lock(self._place):
                break
            self._place.close()
        self.index = index
        self.mark = f"{folder.name}.{index}."
        self._place.seek(0)
        if before := self._place.read():
            mark_process_dead(int(before), str(folder))  # type: ignore[no-untyped-call]
        self._place.truncate(0)
        self._place.write(str(os.getpid()))
        self._place.flush()

    @contextlib.asynccontextmanager
    async def turn(self, check: Callable[[], None]) -> AsyncIterator[None]:
        """Holds the turn of loading. Calls `check`, which may raise, as long as
        it waits.
        """
        with (self._folder / "loading").open("w") as file:
            while not _lock(file):
                check()
                await asyncio.sleep(_LOOK_S)
            yield

    def others_serve(self) -> bool:
        """Says whether a worker serves. Requires: it is this one's turn."""
        with open(self._folder / "serving", "w") as file:
            return not _lock(file)

    def say_serving(self) -> bool:
        """Tells the others that this one serves; gives whether all do now for
        the first time. Requires: it is this one's turn.
        """
        self._serving = open(self._folder / "serving", "w")  # noqa: SIM115
        fcntl.flock(self._serving, fcntl.LOCK_SH)
        with open(self._folder / "ready", "ab") as file:
            file.write(b".")
            return file.tell() == self._workers

    def say_failed(self, error: Exception) -> None:
        """Makes the supervisor raise an error, once this process has ended
        with uvicorn's code for that.
        """
        try:
            data = pickle.dumps(error)
            pickle.loads(data)
        except Exception:
            words = f"{type(error).__name__}: {error}"
            data = pickle.dumps(RuntimeError(words))
        (self._folder / "failure").write_bytes(data)


def _lock(file: IO[str]) -> bool:
    """Locks a file for as long as it is open, if nobody else has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def supervise(config: uvicorn.Config, sock: socket.socket, folder: Path) -> int:
    """Runs the workers until a signal says so, and gives an exit code. Raises
    what the first of them raises as it loads the model.

    `folder` is an empty one, for the files of the workers.
    """
    os.environ[FOLDER] = str(folder)
    # What is old is removed from folders like /tmp, unless it is locked.
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
    supervisor = Multiprocess(config, [sock])

    def hang_up(number: int, frame: object) -> None:
        """Ends the server as its terminal ends; to uvicorn it is a restart."""
        supervisor.signal_queue.append(signal.SIGTERM)

    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else hang_up)

    def close() -> None:
        """Refuses new connections as soon as no worker accepts them."""
        supervisor.should_exit.wait()
        sock.close()

    threading.Thread(target=close, daemon=True).start()
    supervisor.run()
    failure = folder / "failure"
    if failure.exists():
        raise pickle.loads(failure.read_bytes())
    codes = [process.exitcode for process in supervisor.processes]
    return 0 if all(code in _TOLD for code in codes) else 1
