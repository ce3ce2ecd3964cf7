"""Commands and programs in processes that import nothing: copies of one.

Python's start and the imports take most of the time of a short command. Here
one process does both, once, and forks at each request: the copy has a pid,
streams, signals and an exit code of its own, as any process. A new process of
Python is for what happens before the imports, or depends on variables of
Python or of the loader.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import fcntl
import functools
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, BinaryIO, NamedTuple

WAIT_S = 300  # far above what anything needs
_INT = struct.Struct("i")
Streams = tuple[int, int, int]  # descriptors: stdin, stdout, stderr
# Variables with such names act before the first line of the package runs.
_EARLY = ("PYTHON", "LC_", "LD_")
_SERVERS = (
    "gemmakv.server.process.run", "gemmakv.server.service.history",
    "gemmakv.conversations._store", "uvicorn.protocols.http.h11_impl",
)  # fmt: skip


def _runs_here(env: dict[str, str]) -> bool:
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
            with contextlib.suppress(ProcessLookupError):  # it ends right now
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


Process = Fork | subprocess.Popen[bytes]


class Talk(NamedTuple):
    """A process, and our ends of its stdin and stdout."""

    process: Process
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
    """Starts copies of one process, which ends with this one."""

    def __init__(self) -> None:
        self._requests: socket.socket | None = None

    def start(
        self,
        arguments: Sequence[object],
        streams: Streams,
        env: dict[str, str],
        *,
        before: str = "",
        terminal: bool = False,
        new: bool = False,
    ) -> Process:
        """Runs `gemmakv ARGUMENTS` with these descriptors as stdin, stdout and
        stderr, and with no other variables than `env`.

        `before` is a program that runs first. With `terminal`, stdin becomes
        the terminal of a new session. It is a new process of Python where
        `new` says so or a variable needs one.
        """
        words = [os.fsdecode(str(one)) for one in arguments]
        if _runs_here(env) and not new:
            imports = "servers" if words[:1] == ["serve"] else "commands"
            return self.fork(
                before, words, streams, env,
                imports=imports, command=True, terminal=terminal,
            )  # fmt: skip
        assert not before
        return subprocess.Popen(
            [sys.executable, "-m", "gemmakv", *words],
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            env=env,
            start_new_session=terminal,
            preexec_fn=_take_terminal if terminal else None,
        )

    def fork(
        self,
        source: str,
        arguments: Sequence[str],
        streams: Streams,
        env: dict[str, str],
        *,
        imports: str = "package",
        command: bool = False,
        terminal: bool = False,
    ) -> Fork:
        """Runs a program of Python, and a command after it where `command` says
        so. What "package", "commands" or "servers" import is there at once.
        """
        request = {
            "imports": imports,
            "command": command,
            "source": source,
            "arguments": arguments,
            "env": env,
            "folder": os.getcwd(),
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
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs a command to its end, as subprocess.run does, with the variables
        of this process and `env`.
        """
        variables = {**os.environ, **(env or {})}
        with _files(stdin) as streams:
            process = self.start(arguments, streams, variables, before=before)
            return _end_of(process, arguments, streams)

    def _socket(self) -> socket.socket:
        if self._requests is None:
            self._requests, theirs = socket.socketpair(
                socket.AF_UNIX, socket.SOCK_SEQPACKET
            )
            with theirs:
                here = str(Path(__file__).parent.parent)
                path = [here, os.environ.get("PYTHONPATH", "")]
                server = subprocess.Popen(
                    [
                        sys.executable, "-c",
                        "from support.forks import serve; exec(serve())",
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
            atexit.register(_end, os.getpid(), self._requests, server)
        return self._requests


FORKS = Forks()


@dataclasses.dataclass
class Ended:
    """How a program ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def run_program(source: str, *arguments: object) -> Ended:
    """Runs a program of Python to its end, which is that of any interpreter.
    Raises TimeoutExpired, and kills it, if that does not come.
    """
    words = [str(one) for one in arguments]
    with _files() as streams:
        fork = FORKS.fork(source, words, streams, {**os.environ})
        found = _end_of(fork, words, streams)
    out, error = found.stdout.decode(), found.stderr.decode()
    return Ended(found.returncode, out, error)


def output_of(source: str, *arguments: object) -> str:
    """Gives what a program prints that ends without an error."""
    ended = run_program(source, *arguments)
    assert ended.returncode == 0, (ended.returncode, ended.stderr)
    return ended.stdout


def _end(
    owner: int, requests: socket.socket, server: subprocess.Popen[bytes]
) -> None:
    """Ends the process that makes copies, and those that run still."""
    if os.getpid() != owner:
        return  # a fork of the tests has it not as its child
    requests.shutdown(socket.SHUT_RDWR)  # forks of the tests have it open, too
    try:
        server.wait(60)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _end_of(
    process: Process,
    arguments: Sequence[object],
    streams: Streams,
) -> subprocess.CompletedProcess[bytes]:
    try:
        code = process.wait(WAIT_S)
    finally:
        process.kill()
    out, error = (_content(one) for one in streams[1:])
    return subprocess.CompletedProcess([*arguments], code, out, error)


@contextlib.contextmanager
def _files(stdin: bytes = b"") -> Iterator[Streams]:
    """Files that are in no folder as the streams of a process."""
    streams = (_in_memory(stdin), _in_memory(), _in_memory())
    try:
        yield streams
    finally:
        for one in streams:
            os.close(one)


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


def serve() -> CodeType:
    """Forks at each request until the socket of argv[1] ends. Returns what is
    to run after it: a program in its process, and nothing here.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the tests decide
    requests = socket.socket(fileno=int(sys.argv[1]))
    _import_for("package")
    running: dict[int, tuple[int, int]] = {}  # by pidfd: the pid, its status
    while True:
        ready = select.select([requests, *running], [], [])[0]
        for descriptor in ready:
            if descriptor is not requests:
                _reap(descriptor, *running.pop(descriptor))
        if requests in ready:
            data, passed, _, _ = socket.recv_fds(requests, 16, 5)
            if not data:
                break
            file, status, *streams = passed
            request = json.loads(_content(file))
            _import_for(request["imports"])
            pid = os.fork()
            if pid == 0:
                requests.detach()
                return _become(request, streams)
            running[os.pidfd_open(pid)] = (pid, status)
            _tell(status, pid)
            for one in (file, *streams):
                os.close(one)
    for descriptor, (pid, status) in running.items():
        os.kill(pid, signal.SIGKILL)
        _reap(descriptor, pid, status)
    return compile("", "end", "exec")


def _reap(descriptor: int, pid: int, status: int) -> None:
    _, ended = os.waitpid(pid, 0)
    _tell(status, os.waitstatus_to_exitcode(ended))
    os.close(status)
    os.close(descriptor)


def _tell(status: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know
        os.write(status, _INT.pack(number))


@functools.cache
def _import_for(users: str) -> None:
    """Imports what they import as they run."""
    importlib.import_module("gemmakv")
    if users != "package":
        from gemmakv.cli.app import run

        for place in ("pipe", "terminal"):
            importlib.import_module(f"gemmakv.cli.chat.{place}")
        for arguments in (["--version"], ["generate", "--help"]):
            assert run(arguments) == 0  # typer imports as it shows a page
    if users == "servers":
        # Without the server's packages it says so itself.
        with contextlib.suppress(ModuleNotFoundError):
            for name in _SERVERS:
                importlib.import_module(name)
    gc.freeze()  # no copy looks for garbage among what all share


def _become(request: dict[str, Any], streams: list[int]) -> CodeType:
    """Becomes the process that is asked for: gives its program, or runs the
    command and does not return.
    """
    try:
        _take_place(request, streams)
        source = request["source"]
        program = compile(source, "program", "exec", dont_inherit=True)
        if not request["command"]:
            return program
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    code = 1
    try:
        code = _run_command(program)
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
        _take_terminal()
    # Tests that run under nohup or in the background ignore some.
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
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


def _take_terminal() -> None:
    """Makes stdin the terminal of this process and of its session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Tests that run under nohup ignore it, and so would the program.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _run_command(before: CodeType) -> int:
    from gemmakv._support import interrupts
    from gemmakv.cli import main

    interrupts.exit_at_them()  # as importing it for the command line does
    exec(before, {"__name__": "before"})
    return main()
