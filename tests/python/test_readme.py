"""The README's Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import gemmakv

README = Path(__file__).parents[2] / "README.md"


def test_readme_python_runs(model_path: str) -> None:
    del model_path
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        names: dict[str, object] = {}
        exec(compile(block, str(README), "exec"), names)
        restored, original = names["again"], names["other"]
        assert isinstance(restored, gemmakv.KVCache)
        assert isinstance(original, gemmakv.KVCache)
        assert restored.tokens.tolist() == original.tokens.tolist()
