"""Short runs of tools/kill_prefix_cache.py with a fixed seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import preload
from support.tools import tool

kills = tool("kill_prefix_cache")

LENGTHS = (150, 280, 400)  # of the prompts' beginnings

pytestmark = pytest.mark.skipif(
    preload.why_not() is not None, reason=str(preload.why_not())
)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_answers_survive_kills(place: str, tmp_path: Path) -> None:
    above = str(tmp_path) if place == "disk" else "/dev/shm"
    if not Path(above).is_dir():
        pytest.skip("no /dev/shm")
    with kills.random_model() as path:
        killer = kills.Killer(
            path, kills.tier_of(above), above, seed=3, lengths=LENGTHS
        )
        report = killer.run(kills=3, processes=2)
    assert report.sound, report
    assert report.killed >= 3 and report.answers > 0
    assert report.cached_tokens > 0, "nothing ever came from the tier"


@pytest.mark.slow
def test_processes_die_at_the_moment_that_is_asked_for(tmp_path: Path) -> None:
    """One after the other: what the tier does is seen by the system calls that
    it does it with."""
    moments = [
        "after-mkdir", "after-create", "after-write", "after-link",
        "after-lock", "before-unlink",
    ]  # fmt: skip
    with kills.random_model() as path:
        killer = kills.Killer(
            path, "disk", str(tmp_path), seed=3, lengths=LENGTHS
        )
        report = killer.run(
            len(moments), processes=1, lives=iter([(m, 1) for m in moments])
        )
    assert report.sound, report
    assert report.by_point == dict.fromkeys(moments, 1)
