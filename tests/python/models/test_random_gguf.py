"""tools/make_random_gguf.py as its own docstring calls it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf")

TOOL = Path(__file__).parents[3] / "tools" / "make_random_gguf.py"
[CALL] = re.findall(r"    python tools/\S+ (--tiny .*)", TOOL.read_text())


@pytest.mark.parametrize("more", [[], ["--type", "Q6_K"]])
def test_types_do_not_swallow_the_file(
    more: list[str], tmp_path: Path
) -> None:
    import gguf

    out = tmp_path / "made.gguf"
    words = shlex.split(CALL.replace("OUT.gguf", str(out)))
    subprocess.run([sys.executable, str(TOOL), *more, *words], check=True)
    reader = gguf.GGUFReader(str(out))
    found = {tensor.tensor_type.name for tensor in reader.tensors}
    assert found == {"F32", "Q8_0", "Q4_K"} | set(more[1:])
