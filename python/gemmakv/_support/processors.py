"""The number of threads that are worth having."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

from gemmakv import _core
from gemmakv.errors import ArgumentError

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_FEW = 4  # processors: all of them count


def thread_limit() -> int | None:
    """Gives the default number of threads if it is less than the number of
    processors that this process may use, else None.

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


def cores(folder: Path | None = None) -> int:
    """Counts the cores of the processors that this process may use; where the
    system does not say, these processors.
    """
    return len({(core, node) for _, core, node in placement_order(folder)})


def nodes(folder: Path | None = None) -> int:
    """Counts their NUMA nodes; 1 where the system does not say."""
    return len({node for _, _, node in placement_order(folder)})


def placement_order(folder: Path | None = None) -> list[tuple[int, int, int]]:
    """Lists (id, core, NUMA node) of the processors that this process may use,
    in the order in which threads are placed: one on each core, node after node,
    then a second one on each core that has two.
    """
    where = "" if folder is None else os.fspath(folder)
    return _core.placement_order(sorted(os.sched_getaffinity(0)), where)


def check_pinned(threads: int, workers: int = 1) -> None:
    """Raises ValueError where so many pinned threads, of each worker, are more
    than the processors that there are for it.
    """
    there = len(os.sched_getaffinity(0))
    if workers > there:
        raise ArgumentError(
            "workers",
            f"at most {there} with pin_threads, the processors that this "
            "process may use",
            workers,
            shown=f"{workers} workers",
        )
    own = min(map(len, shares(workers)))
    asked = f"{threads} with pin_threads"
    whose = "this process may use"
    if workers > 1:
        asked += f" and {workers} workers"
        whose = f"the least of their parts of {there} has"
    if threads > own:
        expected = f"at most {own}, the processors that {whose}"
        raise ArgumentError("threads", expected, threads, shown=asked)
    quota = cpu_quota()
    if quota is None:
        return
    most = max(1, math.ceil(quota)) // workers
    if threads > most:
        expected = (
            f"at most {most}, since control groups give {quota:g} processors' "
            "worth of time"
        )
        raise ArgumentError("threads", expected, threads, shown=asked)


def shares(parts: int, folder: Path | None = None) -> list[set[int]]:
    """Divides the processors that this process may use into so many parts.

    A part has whole cores that are neighbours in the order of placement, of one
    node if there are as many nodes, or if these divide the parts. If there are
    more parts than cores, each has some processors. Requires: no more parts
    than processors.
    """
    order = placement_order(folder)
    cores: dict[tuple[int, int], list[int]] = {}
    for id, core, node in order:
        cores.setdefault((node, core), []).append(id)
    units = [cores[key] for key in sorted(cores)]
    if parts > len(units):
        units = [[id] for unit in units for id in unit]
    bounds = [len(units) * part // parts for part in range(parts + 1)]
    return [
        {id for unit in units[begin:end] for id in unit}
        for begin, end in zip(bounds, bounds[1:])
    ]


def in_ranges(ids: Iterable[int]) -> str:
    """Writes a list of processors as the system does: "0-3,8"."""
    runs: list[list[int]] = []
    for id in sorted(ids):
        if runs and id == runs[-1][-1] + 1:
            runs[-1][1:] = [id]
        else:
            runs.append([id])
    return ",".join("-".join(map(str, run)) for run in runs)


def processors() -> int:
    """Gives the number of threads that are worth having in this process."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return thread_limit() or len(os.sched_getaffinity(0))


def cpu_quota(root: Path = _CGROUPS, own: Path = _OWN) -> float | None:
    """Gives how many processors' time control groups (version 2) leave to this
    process, as a container's `--cpus`; None if there is no bound.
    """
    folders = _core.control_groups(os.fspath(root), os.fspath(own))
    # The least of all above it counts. A container sees its own at the root.
    quotas = (_quota(Path(folder)) for folder in folders)
    return min(filter(None, quotas), default=None)


def _quota(folder: Path) -> float | None:
    try:
        most, period = (folder / "cpu.max").read_text("ascii").split()
        return int(most) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None  # no such file, or "max"
