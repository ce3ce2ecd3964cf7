"""Python programs in processes of their own, without the price of a start.

Python's start and the import of the package take most of a short program's
time. So one process does both, once, and forks for each program: the copy has
loaded nothing, begins with the first line of its program and ends as any
interpreter does.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile

LIMIT_S = 240.0  # for one that hangs

_SERVER = """
import json, os, sys
import gemmakv
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, flush=True)
else:
    raise SystemExit
for number, name in enumerate(job["streams"]):
    os.dup2(os.open(name, os.O_RDWR), number)
sys.argv[1:] = job["arguments"]
exec(compile(job["source"], "program", "exec"))
"""


@dataclasses.dataclass
class Ended:
    """How a program ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def run_program(source: str, *arguments: object) -> Ended:
    """Runs a program to its end. Raises TimeoutExpired, and kills it, if that
    does not come.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, error = (os.path.join(folder, name) for name in ("out", "error"))
        for name in (out, error):
            open(name, "x").close()
        job = {
            "source": source,
            "arguments": [str(one) for one in arguments],
            "streams": [os.devnull, out, error],
        }
        code = _answer(json.dumps(job).encode() + b"\n")
        with open(out) as said, open(error) as complained:
            return Ended(code, said.read(), complained.read())


def output_of(source: str, *arguments: object) -> str:
    """Gives what a program prints that ends without an error."""
    ended = run_program(source, *arguments)
    assert ended.returncode == 0, (ended.returncode, ended.stderr)
    return ended.stdout


_server: subprocess.Popen[bytes] | None = None


def _answer(line: bytes) -> int:
    global _server
    if _server is None:
        _server = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        atexit.register(_end)
    assert _server.stdin is not None and _server.stdout is not None
    _server.stdin.write(line)
    _server.stdin.flush()
    if not select.select([_server.stdout], [], [], LIMIT_S)[0]:
        _end()
        raise subprocess.TimeoutExpired("a program", LIMIT_S)
    return int(_server.stdout.readline())


def _end() -> None:
    """Ends the process, and a program that runs as its copy."""
    global _server
    if _server is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(_server.pid, signal.SIGKILL)
        _server.communicate()
        _server = None
