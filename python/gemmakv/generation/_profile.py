"""Where the time of a model's steps went."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from gemmakv import _core


@dataclasses.dataclass(frozen=True)
class PhaseProfile:
    """Where the time of steps of one kind went.

    As the thread saw it that drives the steps: its own share of the work of all
    threads, and waiting for the others ("joins"). Every moment of a step is in
    one part, so that they sum to `seconds`.

    Attributes:
      steps: how many there were.
      rows: positions that they computed.
      loops: parallel loops that several threads took part in; each ends with a
        join.
      seconds: from planning a step to delivering its tokens, of all of them.
      parts: seconds by part, see docs/guide.md.
      serial: of each part, the seconds in which the other threads had no work.
    """

    steps: int
    rows: int
    loops: int
    seconds: float
    parts: Mapping[str, float]
    serial: Mapping[str, float]

    def __add__(self, other: PhaseProfile) -> PhaseProfile:
        return self._joined(other, 1)

    def __sub__(self, earlier: PhaseProfile) -> PhaseProfile:
        return self._joined(earlier, -1)

    def _joined(self, other: PhaseProfile, sign: int) -> PhaseProfile:
        return PhaseProfile(
            self.steps + sign * other.steps,
            self.rows + sign * other.rows,
            self.loops + sign * other.loops,
            self.seconds + sign * other.seconds,
            {k: v + sign * other.parts[k] for k, v in self.parts.items()},
            {k: v + sign * other.serial[k] for k, v in self.serial.items()},
        )


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """Where the time of a model's steps went since it was loaded.

    `later - earlier` is what came between the two.

    Attributes:
      prefill: of steps that read prompts alone.
      decode: of steps that go on with conversations alone.
      mixed: of steps that do both.
      embedding: of texts of a model of embeddings.
    """

    prefill: PhaseProfile
    decode: PhaseProfile
    mixed: PhaseProfile
    embedding: PhaseProfile

    def __add__(self, other: StepProfile) -> StepProfile:
        both = zip(vars(self).values(), vars(other).values())
        return StepProfile(*(one + more for one, more in both))

    def __sub__(self, earlier: StepProfile) -> StepProfile:
        both = zip(vars(self).values(), vars(earlier).values())
        return StepProfile(*(now - before for now, before in both))

    def phases(self) -> Iterator[tuple[str, PhaseProfile]]:
        """Gives the phases that had steps, by their names."""
        for name, phase in vars(self).items():
            if phase.steps > 0:
                yield name, phase


def profile_of(engine: _core.Engine) -> StepProfile:
    """Makes one of the core's numbers."""
    phases = {}
    for name, (steps, rows, loops, seconds, parts) in engine.profile().items():
        phases[name] = PhaseProfile(
            steps,
            rows,
            loops,
            seconds,
            {part: both[0] for part, both in parts.items()},
            {part: both[1] for part, both in parts.items()},
        )
    return StepProfile(**phases)
