"""A short run of tools/kill_prefix_cache.py with a fixed seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tools import tool

kills = tool("kill_prefix_cache")


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_answers_survive_kills(place: str, tmp_path: Path) -> None:
    above = str(tmp_path) if place == "disk" else "/dev/shm"
    if not Path(above).is_dir():
        pytest.skip("no /dev/shm")
    with kills.random_model() as path:
        killer = kills.Killer(path, kills.tier_of(above), above, seed=3)
        report = killer.run(kills=4, processes=4)
    assert report.sound, report
    assert report.killed >= 4 and report.answers > 0
    assert report.cached_tokens > 0, "nothing ever came from the tier"
