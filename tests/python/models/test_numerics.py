"""No bit changes unnoticed: keys, values, logits, fingerprints are pinned."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmakv import _core, cpu_info
from support import golden_numerics


@pytest.mark.slow
@pytest.mark.parametrize("target", cpu_info()["targets"])
def test_the_bits_are_those_of_the_numerics_version(
    target: str, tmp_path: Path
) -> None:
    stored = golden_numerics.read()
    assert stored["version"] == _core.numerics_version(), (
        f"run {golden_numerics.TOOL}: its hashes are of another version")
    _core.force_target(target)
    try:
        expected = stored[golden_numerics.arithmetic()]
        found = golden_numerics.digests(tmp_path)
    finally:
        _core.force_target("")
    changed = {
        f"{model}: {way}"
        for model in {*expected, *found}
        for way in {*expected.get(model, {}), *found.get(model, {})}
        if expected.get(model, {}).get(way) != found.get(model, {}).get(way)
    }
    assert not changed, (
        "these have other bits than before. If that is meant, whoever changes "
        "bits must raise kNumericsVersion (cpp/ops/target.h) and write the new "
        f"hashes with {golden_numerics.TOOL}: {sorted(changed)}")
