"""Bytes: as people say them, and how many there are."""

from __future__ import annotations

import os
import re
from decimal import Decimal
from pathlib import Path

from gemmakv.errors import unexpected

_UNITS = ("B", "kB", "MB", "GB", "TB")


def in_bytes(number: float) -> str:
    """Writes two or three digits and a unit of powers of 1000: "18.4 MB"."""
    value = float(number)
    unit = 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value /= 1000
        unit += 1
    digits = 0 if unit == 0 or value >= 99.95 else 1
    return f"{value:.{digits}f} {_UNITS[unit]}"


def parse_bytes(name: str, size: object) -> int:
    """Reads an int, or text as "512MiB", "2GB" or "100000": "k" is 1000, "Ki"
    is 1024. At most 2^63 - 1. Raises ArgumentError.
    """
    count = None
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        count = size
    if isinstance(size, str):
        found = _SIZE.fullmatch(size.strip())
        if found:
            step = 1024 if found["binary"] else 1000
            power = " KMGT".index((found["unit"] or " ").upper())
            count = int(Decimal(found["number"]) * step**power)
    if count is not None and count > _MOST:
        raise unexpected(name, f"at most {_MOST} bytes", size)
    if count is not None:
        return count
    raise unexpected(name, 'bytes, as 1073741824 or "1GiB"', size)


_MOST = (1 << 63) - 1
_SIZE = re.compile(
    r"(?P<number>\d+(\.\d+)?)\s*((?P<unit>[KMGT])(?P<binary>i)?)?B?",
    re.IGNORECASE,
)


def memory_limit() -> int:
    """Bytes that this process may use: the machine's, or its cgroup's."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ):
        try:
            limit = min(limit, int(Path(path).read_text()))
        except (OSError, ValueError):
            continue  # no such cgroup, or "max"
    return limit
