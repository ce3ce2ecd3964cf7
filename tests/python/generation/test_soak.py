"""A short run of tools/soak.py with a fixed seed."""

from __future__ import annotations

from pathlib import Path

import pytest

import gemmakv
from support import family_models
from support.tools import tool

soak = tool("soak")


@pytest.mark.slow
@pytest.mark.parametrize("family", family_models.FAMILIES)
def test_nothing_is_left(
    family: str, tiny: gemmakv.Gemma, tmp_path: Path
) -> None:
    model = family_models.model(family, tokenizer=tiny.tokenizer)
    run = soak.Soak(model, tmp_path, seed=1, verify_every=3)
    report = run.run(conversations=120, threads=4, seconds=0)
    assert report.conversations == 120
    assert report.operations >= 360
    assert report.verified == 120 // 3
    assert report.peak_bytes > 0
    assert report.blocks_left == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_nothing_is_left_with_a_prefix_cache(
    tiny_path: Path, tmp_path: Path
) -> None:
    model = gemmakv.Gemma.load(tiny_path)
    assert model.prefix_cache is not None
    run = soak.Soak(model, tmp_path, seed=1, verify_every=3)
    assert run.run(conversations=60, threads=4, seconds=0).blocks_left == 0
