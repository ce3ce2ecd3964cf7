"""What the workers of one server tell each other, in memory that they share."""

from __future__ import annotations

import mmap
import struct
import zlib

_LOADS = 4096  # bytes: of 8 a worker
_BEATS = 4096  # the same
_HALF = 16 << 20  # bytes of a text; those that are not used take no memory
_HEAD = struct.Struct("<QII")  # number, length, checksum
_RETRIES = 100

MOST_WORKERS = _LOADS // 8
AWAY = (1 << 64) - 1  # the load of a worker that takes nothing


class Board:
    """Made before the workers are forked; each has a place of its own.

    A place outlives its worker: whoever takes it over finds what the last one
    left. Writing and reading need no lock. A text is written beside the one
    before it, and one that is being replaced is read again.
    """

    def __init__(self, workers: int) -> None:
        if not 1 <= workers <= MOST_WORKERS:
            raise ValueError(
                f"workers: expected 1 to {MOST_WORKERS}, found {workers}"
            )
        self._memory = mmap.mmap(-1, _LOADS + _BEATS + workers * 2 * _HALF)
        numbers = memoryview(self._memory)[: _LOADS + _BEATS].cast("Q")
        self._loads = numbers[: _LOADS // 8]
        self._beats = numbers[_LOADS // 8 :]
        self.workers = workers
        for worker in range(workers):
            self.set_load(worker, AWAY)

    def set_load(self, worker: int, load: int) -> None:
        """What a worker has to do, less than AWAY; or AWAY."""
        self._loads[worker] = load

    def loads(self) -> list[int]:
        return self._loads[: self.workers].tolist()

    def beat(self, worker: int) -> None:
        """The worker is alive."""
        self._beats[worker] = (self._beats[worker] + 1) % AWAY

    def beats(self) -> list[int]:
        """Of each worker a number that changes as long as it is alive."""
        return self._beats[: self.workers].tolist()

    def write(self, worker: int, text: str) -> bool:
        """Replaces the text of a worker; False if it is too long."""
        data = text.encode()
        if len(data) > _HALF - _HEAD.size:
            return False
        number = max(self._number(worker, 0), self._number(worker, 1)) + 1
        at = self._half(worker, number % 2)
        body = at + _HEAD.size
        self._memory[body : body + len(data)] = data
        _HEAD.pack_into(self._memory, at, number, len(data), zlib.crc32(data))
        return True

    def read(self, worker: int) -> str:
        """The last text of a worker; "" if there is none."""
        for _ in range(_RETRIES):
            halves = sorted(
                (self._number(worker, half), half) for half in (0, 1)
            )
            # A worker that was killed while it wrote leaves the other half.
            for number, half in reversed(halves):
                if number == 0:
                    return ""
                data = self._checked(worker, half)
                if data is not None:
                    return data.decode()
        return ""

    def _checked(self, worker: int, half: int) -> bytes | None:
        at = self._half(worker, half)
        _, length, checksum = _HEAD.unpack_from(self._memory, at)
        body = at + _HEAD.size
        data = self._memory[body : body + min(length, _HALF - _HEAD.size)]
        return data if zlib.crc32(data) == checksum else None

    def _number(self, worker: int, half: int) -> int:
        found: int = _HEAD.unpack_from(
            self._memory, self._half(worker, half)
        )[0]
        return found

    def _half(self, worker: int, half: int) -> int:
        return _LOADS + _BEATS + (2 * worker + half) * _HALF
