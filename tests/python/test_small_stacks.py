"""All that the core does takes at most 64 KiB of a thread's stack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support import small_stacks

FOR_THE_CORE_KIB = 64


def run(
    folder: Path, kib: int, jobs: list[str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "support.small_stacks", folder, str(kib),
         str(kib), *jobs],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    small_stacks.write(path)
    return path


@pytest.fixture(scope="module")
def least_kib(folder: Path) -> int:
    """The least that Python needs for itself."""
    for kib in (32, 48, 64, 96, 128, 192, 256, 512):
        if run(folder, kib, ["python"]).returncode == 0:
            return kib
    raise AssertionError("Python does not run in half a MiB")


@pytest.mark.slow
def test_work_in_small_stacks(folder: Path, least_kib: int) -> None:
    jobs = [name for name in small_stacks.JOBS if name != "python"]
    done = run(folder, least_kib + FOR_THE_CORE_KIB, jobs)
    # It names each that it has done: the next one is what failed.
    assert done.stdout.split() == jobs, done.stderr
    assert done.returncode == 0, done.stderr
