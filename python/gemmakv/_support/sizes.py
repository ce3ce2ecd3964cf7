"""How bytes are told to people."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB")


def in_bytes(number: float) -> str:
    """Two or three digits and a unit of powers of 1000: "18.4 MB"."""
    value = float(number)
    unit = 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value /= 1000
        unit += 1
    digits = 0 if unit == 0 or value >= 99.95 else 1
    return f"{value:.{digits}f} {_UNITS[unit]}"
