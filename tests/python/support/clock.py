"""A wall clock that jumps, of processes that are started with it."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[3] / "tools/clock_jump.c"
COMPILERS = ("cc", "gcc", "clang")


def why_not() -> str | None:
    """Why there can be no jumping clock here."""
    if not any(map(shutil.which, COMPILERS)):
        return f"no C compiler ({', '.join(COMPILERS)}) to build {SOURCE.name}"
    return None


class JumpingClock:
    """`env` is for those whose clock it is to be; `jump` sets by how many
    seconds it is off, for all of them at once.
    """

    def __init__(self, folder: Path) -> None:
        """Builds the library in `folder`. Raises RuntimeError."""
        if reason := why_not():
            raise RuntimeError(reason)
        compiler = next(filter(None, map(shutil.which, COMPILERS)))
        library = folder / "clock_jump.so"
        done = subprocess.run(
            [compiler, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2",
             "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{compiler}: {done.stderr}")
        file = folder / "clock"
        file.write_bytes(bytes(8))
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), 8)
        self._shift = ctypes.c_int64.from_buffer(self._map)
        self.env = {
            "LD_PRELOAD": str(library), "GEMMAKV_CLOCK_FILE": str(file),
        }  # fmt: skip

    def jump(self, seconds: int) -> None:
        self._shift.value = seconds  # one store: no half of it is seen
