"""Processes of the command line that import nothing: copies of one process.

Python's start and the imports take most of the time of a short command. Here
one process does both, once, and forks at each request: the copy has a pid,
streams, signals and an exit code of its own, as any process. `subprocess` is
for what happens before the imports, or depends on variables of Python.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

WAIT_S = 300  # far above what anything needs
_INT = struct.Struct("i")
# Variables with such names act before the first line of the package runs.
_EARLY = ("PYTHON", "LC_", "LD_")


def runs_here(env: dict[str, str]) -> bool:
    """Says whether a copy is as good as a new process with these variables."""
    return not any(
        name.startswith(_EARLY) and value != os.environ.get(name)
        for name, value in env.items()
    )


class Fork:
    """A process, with the methods of subprocess.Popen that tests use."""

    def __init__(self, status: int) -> None:
        self._status = status  # a pipe: the pid, and the exit code at the end
        self.pid = self._read()
        self.returncode: int | None = None

    def _read(self) -> int:
        data = os.read(self._status, _INT.size)
        assert data, "the process that makes copies has ended"
        return int(_INT.unpack(data)[0])

    def poll(self) -> int | None:
        """Gives the exit code, minus the signal's number; None if it runs."""
        return self.returncode if self._ended_within(0) else None

    def wait(self, timeout: float = WAIT_S) -> int:
        """Waits for the end and gives the exit code as `poll` does. Raises
        TimeoutExpired.
        """
        if not self._ended_within(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended_within(self, seconds: float) -> bool:
        if self.returncode is None:
            if not select.select([self._status], [], [], seconds)[0]:
                return False
            self.returncode = self._read()
            os.close(self._status)
        return True


class Talk(NamedTuple):
    """A process, and our ends of its stdin and stdout."""

    process: Fork
    stdin: BinaryIO
    stdout: BinaryIO

    def say(self, text: bytes) -> None:
        self.stdin.write(text)
        self.stdin.flush()

    def end(self) -> bytes:
        """Closes stdin and waits for the end; gives what is left of stdout."""
        self.stdin.close()
        with self.stdout:
            rest = self.stdout.read()
        self.process.wait()
        return rest


class Forks:
    """Starts copies of one process; `with` ends that one."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._requests is not None and self._server is not None:
            self._requests.close()
            self._server.wait(WAIT_S)

    def start(
        self,
        arguments: Sequence[object],
        streams: tuple[int, int, int],
        env: dict[str, str],
        *,
        before: str = "",
        terminal: bool = False,
    ) -> Fork:
        """Runs `gemmakv ARGUMENTS` with these descriptors as stdin, stdout and
        stderr, and with no other variables than `env`.

        `before` is a program that runs first. With `terminal`, stdin becomes
        the terminal of a new session.
        """
        request = {
            "arguments": [os.fsdecode(str(one)) for one in arguments],
            "env": env,
            "folder": os.getcwd(),
            "before": before,
            "terminal": terminal,
        }
        file = _in_memory(json.dumps(request).encode())
        status, end = os.pipe()
        try:
            passed = [file, end, *streams]
            socket.send_fds(self._socket(), [b"fork"], passed)
        finally:
            os.close(file)
            os.close(end)
        return Fork(status)

    def talk(self, arguments: Sequence[object], env: dict[str, str]) -> Talk:
        """Runs a command whose stdin and stdout are pipes."""
        stdin, ours = os.pipe()
        theirs, stdout = os.pipe()
        with open(os.devnull, "wb") as nowhere:
            streams = (stdin, stdout, nowhere.fileno())
            fork = self.start(arguments, streams, env)
        os.close(stdin)
        os.close(stdout)
        return Talk(fork, open(ours, "wb"), open(theirs, "rb"))

    def run(
        self,
        arguments: Sequence[object],
        stdin: bytes = b"",
        env: dict[str, str] | None = None,
        *,
        before: str = "",
        timeout: float = WAIT_S,
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs a command to its end, as subprocess.run does."""
        streams = (_in_memory(stdin), _in_memory(), _in_memory())
        variables = dict(os.environ) if env is None else env
        try:
            fork = self.start(arguments, streams, variables, before=before)
            try:
                code = fork.wait(timeout)
            finally:
                fork.kill()
            out, error = (_content(one) for one in streams[1:])
        finally:
            for one in streams:
                os.close(one)
        return subprocess.CompletedProcess([*arguments], code, out, error)

    def _socket(self) -> socket.socket:
        if self._requests is None:
            self._requests, theirs = socket.socketpair(
                socket.AF_UNIX, socket.SOCK_SEQPACKET
            )
            with theirs:
                here = str(Path(__file__).parent.parent)
                path = [here, os.environ.get("PYTHONPATH", "")]
                self._server = subprocess.Popen(
                    [
                        sys.executable, "-c",
                        "from support.forks import serve; serve()",
                        str(theirs.fileno()),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(filter(None, path)),
                        "OPENBLAS_NUM_THREADS": "1",  # forks copy no threads
                    },
                )  # fmt: skip
        return self._requests


def _in_memory(data: bytes = b"") -> int:
    """A file of this content that is in no folder; its descriptor."""
    descriptor = os.memfd_create("stream")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _content(descriptor: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


# The process that makes the copies.


def serve() -> None:
    """Forks at each request until the socket of argv[1] is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the tests decide
    requests = socket.socket(fileno=int(sys.argv[1]))
    _import_all()
    gc.freeze()  # no copy looks for garbage among what all share
    running: dict[int, tuple[int, int]] = {}  # by pidfd: the pid, its status
    while True:
        ready = select.select([requests, *running], [], [])[0]
        for descriptor in ready:
            if descriptor is not requests:
                pid, status = running.pop(descriptor)
                _, ended = os.waitpid(pid, 0)
                _tell(status, os.waitstatus_to_exitcode(ended))
                os.close(status)
                os.close(descriptor)
        if requests in ready:
            data, passed, _, _ = socket.recv_fds(requests, 16, 5)
            if not data:
                return
            file, status, *streams = passed
            pid = os.fork()
            if pid == 0:
                _run(json.loads(_content(file)), streams)
            running[os.pidfd_open(pid)] = (pid, status)
            _tell(status, pid)
            for one in (file, *streams):
                os.close(one)


def _import_all() -> None:
    """Imports what commands import when they run."""
    from gemmakv.cli import main

    for place in ("pipe", "terminal"):
        importlib.import_module(f"gemmakv.cli.chat.{place}")
    for arguments in (["--version"], ["generate", "--help"]):
        assert main(arguments) == 0  # typer imports as it shows a page


def _tell(status: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know
        os.write(status, _INT.pack(number))


def _run(request: dict[str, Any], streams: list[int]) -> None:
    """Becomes the command; does not return."""
    code = 1
    try:
        _take_place(request, streams)
        code = _run_command(request["before"])
        sys.stdout.flush()
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


def _take_place(request: dict[str, Any], streams: list[int]) -> None:
    if request["terminal"]:
        os.setsid()
    # From above all of the three: none takes the place of another.
    above = [fcntl.fcntl(one, fcntl.F_DUPFD, 64) for one in streams]
    for number, one in enumerate(above):
        os.dup2(one, number)
    os.closerange(3, 1 << 16)
    if request["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Tests that run under nohup ignore it, and so would the program.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        for number, mode, errors in (
            (0, "r", "strict"),
            (1, "w", "strict"),
            (2, "w", "backslashreplace"),
        )
    )
    sys.stderr.reconfigure(line_buffering=True)
    sys.argv = ["gemmakv", *request["arguments"]]


def _run_command(before: str) -> int:
    from gemmakv._support import interrupts
    from gemmakv.cli import main

    interrupts.exit_at_them()  # as importing it for the command line does
    if before:
        exec(compile(before, "before", "exec"), {"__name__": "before"})
    return main()
