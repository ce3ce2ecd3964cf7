"""How many threads are worth having."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def thread_limit() -> int | None:
    """Threads that the time given to this process keeps busy, where that is
    less than its processors; else None.
    """
    quota = cpu_quota()
    if quota is None:
        return None
    threads = max(1, math.ceil(quota))
    return threads if threads < len(os.sched_getaffinity(0)) else None


def processors() -> int:
    """Threads worth having, for this process."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return thread_limit() or len(os.sched_getaffinity(0))


def cpu_quota(root: Path = _CGROUPS, own: Path = _OWN) -> float | None:
    """Processors' worth of time that cgroups (version 2) give this process, a
    container's `--cpus`; None if there is no bound.
    """
    folders = [root]
    try:
        for line in own.read_text("utf-8").splitlines():
            if line.startswith("0::/"):
                for part in line[4:].split("/"):
                    folders.append(folders[-1] / part)
    except (OSError, ValueError):
        pass  # no cgroups: only what stands at the root
    # The least of all above it counts. A container sees its own at the root.
    return min(filter(None, map(_quota, folders)), default=None)


def _quota(folder: Path) -> float | None:
    try:
        most, period = (folder / "cpu.max").read_text("ascii").split()
        return int(most) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None  # no such file, or "max"
