"""The command line as a test sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from support.forks import WAIT_S, Forks, runs_here

RunCli = Callable[..., "subprocess.CompletedProcess[bytes]"]


def run_command(
    forks: Forks,
    arguments: Sequence[object],
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
    before: str = "",
) -> subprocess.CompletedProcess[bytes]:
    """Runs `gemmakv ARGUMENTS` to its end, with the variables of this process
    and `env`.
    """
    env = env or {}
    variables = {**os.environ, **env}
    if runs_here(env):
        return forks.run(arguments, stdin, variables, before=before)
    assert not before
    return subprocess.run(
        [sys.executable, "-m", "gemmakv", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        env=variables,
        timeout=WAIT_S,
        check=False,
    )


def assert_fails(
    result: subprocess.CompletedProcess[bytes], *words: str, code: int = 1
) -> None:
    """One clear line on stderr, nothing on stdout, a non-zero exit."""
    error = result.stderr.decode()
    assert result.returncode == code, error
    assert result.stdout == b""
    assert error.startswith("gemmakv: error: ")
    assert error.endswith("\n") and error.count("\n") == 1, error
    for word in words:
        assert word in error


def first_on_path(folder: Path) -> str:
    """PYTHONPATH with `folder` ahead of everything."""
    return os.pathsep.join(
        filter(None, [str(folder), os.environ.get("PYTHONPATH")])
    )
