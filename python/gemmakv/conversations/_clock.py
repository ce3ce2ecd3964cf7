"""The time by which leases end and what is kept for a while expires.

It is the database's own, which nobody sets: a clock that is wrong for a moment
must not delete what was promised. While the machine runs it goes as its uptime
does. Over a restart of the machine it goes on by what the wall clock has
gained since it was noted.

The noted time of the wall clock never goes back. Where the clock is behind it,
it goes on as the database's own time does: so what the clock gains when it is
set right is not counted once more. A clock that is ahead for a while has what
is off not counted until that time has come: things are kept for longer, never
for less. A restart with a clock that is ahead cannot be told from a machine
that was off.
"""

from __future__ import annotations

import json
import time

_NOTE_S = 60.0
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip() + " "
    except OSError:
        return ""


# Leases are told in the time since the machine's start, which all processes
# share and nobody sets. Those from before another start are none.
BOOT = _boot()


def uptime() -> float:
    """Gives the seconds since the machine's start."""
    return time.clock_gettime(_CLOCK)


class AgeClock:
    """The database's own time, in seconds. Goes on from what was noted."""

    def __init__(self, noted: bytes | None) -> None:
        now, wall = uptime(), time.time()
        age = wall
        if noted is not None:
            last = json.loads(noted)
            age, gone = last["age"], wall - last["wall"]
            if last["boot"] == BOOT and now >= last["uptime"]:
                gone = now - last["uptime"]
            age += max(gone, 0.0)
        self._ahead = age - now
        self._noted = now

    def now(self) -> float:
        return uptime() + self._ahead

    def is_due(self) -> bool:
        """Says whether it is to be noted again."""
        return uptime() - self._noted > _NOTE_S

    def note(self, before: bytes | None) -> bytes:
        """Gives what another one goes on from. `before`: what is noted."""
        self._noted = uptime()
        age, wall = self._noted + self._ahead, time.time()
        if before is not None:
            last = json.loads(before)
            wall = max(wall, last["wall"] + max(age - last["age"], 0.0))
        noted = {
            "age": age, "boot": BOOT, "uptime": self._noted, "wall": wall,
        }  # fmt: skip
        return json.dumps(noted).encode()
