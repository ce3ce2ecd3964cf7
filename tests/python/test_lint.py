"""Python code has none of the faults that ruff looks for (pyproject.toml)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_ruff_finds_nothing() -> None:
    pytest.importorskip("ruff", reason="ruff does the looking")
    folders = ["examples", "python", "tests", "tools"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
