"""How many threads are worth having."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_PROCESSORS = Path("/sys/devices/system/cpu")
_FEW = 4  # processors: all of them count


def thread_limit() -> int | None:
    """Threads by default, where these are fewer than the processors that this
    process may use; else None.

    One for each core, where there are more than four processors: two of one
    core share its arithmetic, which the kernels keep busy, and wait for each
    other at the end of each of some hundred loops a step. And no more than the
    time given to this process keeps busy.
    """
    there = os.sched_getaffinity(0)
    threads = cores() if len(there) > _FEW else len(there)
    quota = cpu_quota()
    if quota is not None:
        threads = min(threads, max(1, math.ceil(quota)))
    return threads if threads < len(there) else None


def cores(root: Path = _PROCESSORS) -> int:
    """Cores that have the processors that this process may use; as many as
    these where the system does not say.
    """
    return len({_core(root, id) for id in os.sched_getaffinity(0)})


def nodes(root: Path = _PROCESSORS) -> int:
    """NUMA nodes that have them; 1 where the system does not say."""
    found = {
        path.name
        for id in os.sched_getaffinity(0)
        for path in (root / f"cpu{id}").glob("node[0-9]*")
    }
    return max(1, len(found))


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


def _core(root: Path, id: int) -> str:
    """A name of the processor's core."""
    try:
        text = (root / f"cpu{id}/topology/thread_siblings_list").read_text()
    except (OSError, ValueError):
        text = ""
    return text.strip() or f"cpu{id}"
