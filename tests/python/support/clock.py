"""A wall clock that jumps, of processes that are started with it."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

from support import preload

why_not = preload.why_not


class JumpingClock:
    """`env` is for those whose clock it is to be; `jump` sets by how many
    seconds it is off, for all of them at once.
    """

    def __init__(self, folder: Path) -> None:
        """Builds the library in `folder`. Raises RuntimeError."""
        library = preload.build("clock_jump", folder)
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
