"""Where a model's threads compute."""

from __future__ import annotations

import dataclasses

from gemmakv import _core
from gemmakv._support.arguments import integer
from gemmakv._support.processors import check_pinned, in_ranges, thread_limit
from gemmakv.generation._option_kinds import MAX_INT


@dataclasses.dataclass(frozen=True)
class ThreadPlacement:
    """Where a model's threads compute; as text, a line that says so.

    Attributes:
      threads: how many there are.
      pinned: whether each one stays on a processor of its own.
      cpus: if so, that of each thread; otherwise those that the system moves
        them between. Ids as the system has them.
      cpu_nodes: the NUMA node of each of these.
      cores: how many cores have them.
    """

    threads: int
    pinned: bool
    cpus: tuple[int, ...]
    cpu_nodes: tuple[int, ...]
    cores: int

    @property
    def nodes(self) -> tuple[int, ...]:
        """The NUMA nodes, ascending."""
        return tuple(sorted(set(self.cpu_nodes)))

    def __str__(self) -> str:
        several = "" if self.threads == 1 else "s"
        how = "pinned to" if self.pinned else "not pinned, on any of"
        cores = "core" if self.cores == 1 else "cores"
        nodes = "node" if len(self.nodes) == 1 else "nodes"
        return (
            f"{self.threads} thread{several}, {how} CPUs "
            f"{in_ranges(self.cpus)} ({self.cores} {cores} of NUMA {nodes} "
            f"{in_ranges(self.nodes)})"
        )


def placement_of(engine: _core.Engine) -> ThreadPlacement:
    pinned, processors = engine.placement
    return ThreadPlacement(
        engine.threads,
        pinned,
        tuple(id for id, _, _ in processors),
        tuple(node for _, _, node in processors),
        len({core for _, core, _ in processors}),
    )


def count_threads(threads: int | None, pinned: bool) -> int:
    """Checks the threads that a model is to compute with; 0 for all."""
    if threads is None:
        return thread_limit() or 0
    count = integer("threads", threads, 1, MAX_INT)
    if pinned:
        check_pinned(count)
    return count
