"""Where the time of measured work goes, by part of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from gemmakv.generation._profile import PhaseProfile, StepProfile

# Shares below this are not worth a line of a table.
_LEAST = 0.0005


@dataclasses.dataclass(frozen=True)
class Profile(PhaseProfile):
    """The time of the steps of one measurement, all rounds together, and
    `between_s`, that of the calls outside of their steps.
    """

    name: str
    between_s: float


def profile_of(
    name: str, wall_s: float, found: StepProfile, phase: str
) -> Profile:
    """Makes the profile of the steps of one phase, "prefill" or "decode". Other
    steps, such as the first one of a conversation, also took part of the
    `wall_s` of the calls.
    """
    between_s = max(0.0, wall_s - sum(p.seconds for _, p in found.phases()))
    steps: PhaseProfile = getattr(found, phase)
    return Profile(**vars(steps), name=name, between_s=between_s)


def table_of(profiles: Sequence[Profile]) -> list[list[str]]:
    """Lines of a table, the first of names: shares of the steps' time."""
    lines = [["", *(p.name for p in profiles)]]
    for part in profiles[0].parts:
        shares = [p.parts[part] / p.seconds for p in profiles]
        if max(shares) >= _LEAST:
            lines.append([part, *(f"{100 * share:.1f} %" for share in shares)])
    more: dict[str, Callable[[Profile], str]] = {
        "of all, on one thread": lambda p: (
            f"{100 * sum(p.serial.values()) / p.seconds:.1f} %"
        ),
        "a step": lambda p: f"{1e3 * p.seconds / p.steps:.2f} ms",
        "between steps": lambda p: f"{1e3 * p.between_s / p.steps:.2f} ms",
        "rows of a step": lambda p: f"{p.rows / p.steps:.0f}",
        "parallel loops": lambda p: f"{p.loops / p.steps:.0f}",
    }
    return lines + [[name, *map(text, profiles)] for name, text in more.items()]
