"""A short run of tools/kill_prefix_cache.py with a fixed seed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_TOOL = Path(__file__).resolve().parents[3] / "tools" / "kill_prefix_cache.py"
_spec = importlib.util.spec_from_file_location("kill_prefix_cache", _TOOL)
assert _spec is not None and _spec.loader is not None
tool = importlib.util.module_from_spec(_spec)
# A dataclass looks its own module up by name while it is being defined.
sys.modules["kill_prefix_cache"] = tool
_spec.loader.exec_module(tool)


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_answers_survive_kills(place: str, tmp_path: Path) -> None:
    above = str(tmp_path) if place == "disk" else "/dev/shm"
    if not Path(above).is_dir():
        pytest.skip("no /dev/shm")
    with tool.random_model() as path:
        killer = tool.Killer(path, tool.tier_of(above), above, seed=3)
        report = killer.run(kills=4, processes=4)
    assert report.sound, report
    assert report.killed >= 4 and report.answers > 0
    assert report.cached_tokens > 0, "nothing ever came from the tier"
