"""The command line as a test sees it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

RunCli = Callable[..., "subprocess.CompletedProcess[bytes]"]


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
