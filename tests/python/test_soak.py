"""A short run of tools/soak.py with a fixed seed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import gemmakv

_TOOL = Path(__file__).resolve().parents[2] / "tools" / "soak.py"
_spec = importlib.util.spec_from_file_location("soak", _TOOL)
assert _spec is not None and _spec.loader is not None
soak = importlib.util.module_from_spec(_spec)
# A dataclass looks its own module up by name while it is being defined.
sys.modules["soak"] = soak
_spec.loader.exec_module(soak)


def test_nothing_is_left(tiny: gemmakv.Gemma, tmp_path: Path) -> None:
    run = soak.Soak(tiny, tmp_path, seed=1, verify_every=3)
    report = run.run(conversations=1000, threads=4, seconds=0)
    assert report.conversations == 1000
    assert report.operations >= 3000
    assert report.verified == 1000 // 3
    assert report.peak_bytes > 0
    assert report.blocks_left == 0
    assert not list(tmp_path.iterdir())
