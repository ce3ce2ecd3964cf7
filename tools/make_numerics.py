#!/usr/bin/env python3
"""Writes tests/golden/numerics.json: hashes of the bits that models give.

    python tools/make_numerics.py

To be run by whoever changes a bit of keys, values or logits, after raising
kNumericsVersion in cpp/ops/target.h: caches that were made before are then
refused instead of being continued with other bits. Takes the hashes of every
arithmetic that this processor has; refuses if it lacks one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/python"))

from gemmakv import _core, cpu_info
from support import golden_numerics


def main() -> None:
    found: dict[str, object] = {"version": _core.numerics_version()}
    with tempfile.TemporaryDirectory() as folder:
        for target in cpu_info()["targets"]:
            _core.force_target(target)
            name = golden_numerics.arithmetic()
            if name not in found:
                found[name] = golden_numerics.digests(Path(folder))
    if len(found) != 3:
        sys.exit("this processor has no fused multiply-add")
    golden_numerics.PATH.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
