"""The features of the processor, and those that the kernels use."""

from __future__ import annotations

import platform
from typing import Any

from gemmakv import _core
from gemmakv._support.processors import (
    cores,
    cpu_quota,
    nodes,
    placement_order,
    processors,
)


def cpu_info() -> dict[str, Any]:
    """Describes this processor as the kernels see it.

    Keys: `cpu` (its name), `target` (the SIMD target that kernels run on),
    `targets` (those of this build that this processor can run, best first),
    `compiled` (all of this build, best first), `threads`
    (processors that this process may use), `cores` and `nodes` (cores and NUMA
    nodes that have these), `default_threads` (those of a model that is loaded
    without saying how many), `quota` (processors' worth of time that control
    groups give this process, None without a bound), `placement` ((id, core,
    NUMA node) of the processors in the order in which pinned threads take
    them) and the cache sizes `l1_bytes`, `l2_bytes` and
    `l3_bytes` (0 where unknown).
    """
    return {
        "cpu": _cpu_name(),
        **_core.cpu_info(),
        "cores": cores(),
        "nodes": nodes(),
        "default_threads": processors(),
        "quota": cpu_quota(),
        "placement": placement_order(),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
