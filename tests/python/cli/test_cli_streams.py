"""The command line where streams are closed, full or of other encodings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import RunCli, first_on_path

GEMMAKV = f"{sys.executable} -m gemmakv"


def shell(
    line: str, stdin: bytes = b"", **env: str
) -> subprocess.CompletedProcess[bytes]:
    """Runs a line of sh in which $GEMMAKV is the command line."""
    return subprocess.run(
        ["sh", "-c", line],
        input=stdin,
        capture_output=True,
        env={**os.environ, "GEMMAKV": GEMMAKV, **env},
        timeout=120,
        check=False,
    )


def one_line(result: subprocess.CompletedProcess[bytes]) -> str:
    lines = result.stderr.decode().splitlines()
    assert len(lines) == 1 and lines[0].startswith("gemmakv: error: "), lines
    return lines[0]


@pytest.mark.parametrize("command", ["generate --model {} -", "chat -m {}"])
def test_stdin_is_closed(command: str, talker_path: Path) -> None:
    result = shell(f"exec $GEMMAKV {command.format(talker_path)} <&-")
    assert result.returncode == 1
    assert "stdin is closed" in one_line(result)


@pytest.mark.parametrize("command", ["--version", "--help", "info --types"])
def test_stdout_is_closed(command: str) -> None:
    result = shell(f"exec $GEMMAKV {command} >&-")
    assert result.returncode == 1
    assert "stdout is closed" in one_line(result)


@pytest.mark.slow
def test_stderr_is_closed(talker_path: Path) -> None:
    line = f"exec $GEMMAKV chat -m {talker_path} --max-tokens 3 2>&-"
    result = shell(line, b"hello\n/list\n")
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 1
    assert shell("exec $GEMMAKV nonsense 2>&-").returncode == 2


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="there is no /dev/full"
)
def test_stdout_is_full() -> None:
    result = shell("exec $GEMMAKV --version >/dev/full")
    assert result.returncode == 1
    assert "stdout: No space left on device" in one_line(result)


def test_errors_of_files_name_them(cli: RunCli, tmp_path: Path) -> None:
    for name, shown in (("", "''"), (tmp_path / "none", tmp_path / "none")):
        result = cli("cache", "inspect", name)
        assert result.returncode == 1
        assert f"{shown}: No such file" in one_line(result)


@pytest.mark.parametrize("model", ["/dev/zero", "/dev/null"])
def test_a_device_is_no_model(cli: RunCli, model: str) -> None:
    result = cli("info", model)
    assert result.returncode == 1
    line = one_line(result)
    assert f"{model}: " in line and "regular file" in line


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_other_encodings(encoding: str, talker_path: Path) -> None:
    line = f"exec $GEMMAKV chat -m {talker_path} --max-tokens 3"
    result = shell(
        line, "/new é\n/tree\nhé\n".encode(), PYTHONIOENCODING=encoding
    )
    assert result.returncode == 0, result.stderr
    assert b"Traceback" not in result.stderr
    assert len(result.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    "option, message",
    [
        ("--top-p 7", "--top-p: "),
        ("--max-tokens=-1", "--max-tokens: "),
        ("--capacity-tokens 0", "--capacity-tokens: "),
        ("--capacity-tokens x", "--capacity-tokens: "),
        ("--kv-dtype x", "--kv-dtype: "),
        ("--logit-bias x", "--logit-bias: "),
        ("--threads 0", "--threads: "),
        ("--quantize x", "--quantize: "),
    ],
)
def test_errors_name_the_flag(
    cli: RunCli, option: str, message: str, talker_path: Path
) -> None:
    """Whoever finds the mistake, it is one of usage."""
    result = cli("generate", "-m", talker_path, *option.split(), "a")
    assert result.returncode == 2
    assert one_line(result).startswith(f"gemmakv: error: {message}")


# The key comes as a module of this name is looked for.
STARTING = """
import runpy, signal, sys

class Press:
    def find_spec(self, name, *rest):
        if name == sys.argv[1]:
            sys.argv[1:] = ["bench"]
            signal.raise_signal(signal.SIGINT)

sys.argv[0] = "gemmakv"
sys.meta_path.insert(0, Press())
runpy.run_module("gemmakv")
"""


@pytest.mark.parametrize(
    "module",
    ["gemmakv.options", "numpy", "gemmakv.cli", "typer", "gemmakv.cli.app"],
)
def test_ctrl_c_while_it_starts(module: str) -> None:
    """Before its own first line runs, Python itself reports the key."""
    done = subprocess.run(
        [sys.executable, "-c", STARTING, module],
        capture_output=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.default_int_handler
        ),
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, b"")


# Says that Python takes itself apart: its modules go.
ENDING = """
import os, runpy, signal, sys

class Last:
    def __del__(self, number=signal.SIGINT, kill=os.kill, pid=os.getpid(),
                write=os.write):
        kill(pid, number)
        write(1, b"end")

sys.argv = ["gemmakv", "--version"]
sys.modules["last"] = type(sys)("last")
sys.modules["last"].last = Last()
runpy.run_module("gemmakv", run_name="__main__")
"""


def test_ctrl_c_when_all_is_done() -> None:
    """Python had given its handlers up, and the process died of the signal."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING],
        capture_output=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.default_int_handler
        ),
        check=False,
    )
    assert done.stdout.endswith(b"end")
    assert (done.returncode, done.stderr) == (0, b"")


INSIDE = """
import sys
sys.argv = ["gemmakv", "--version"]
from gemmakv import cli

cli._run = lambda arguments: exec("raise KeyboardInterrupt")
sys.exit(cli.main())
"""


def test_ctrl_c_while_a_dataclass_is_made(tmp_path: Path) -> None:
    """They come of exec(), which Python notes: -2 in place of 130."""
    (tmp_path / "inside.py").write_text(INSIDE)
    done = subprocess.run(
        [sys.executable, "-m", "inside"],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": first_on_path(tmp_path)},
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, b"")


TWICE = """
import sys
sys.argv = ["gemmakv", "--version"]
from gemmakv import cli

def interrupt(*_):
    cli.interrupts.exit_at_them = before
    raise KeyboardInterrupt

before = cli.interrupts.exit_at_them
cli.interrupts.exit_at_them = interrupt
cli._run = lambda arguments: exec("raise KeyboardInterrupt")
sys.exit(cli.main())
"""


def test_another_ctrl_c_as_the_first_ends_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWICE], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, b"")
