"""The package and code that uses it pass a strict type checker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gemmakv
from support.folders import ROOT

PACKAGE = Path(gemmakv.__file__).parent

USER_CODE = """
import numpy as np
import gemmakv

gemma = gemmakv.Gemma.load("gemma-3-270m", threads=2, progress=True)
cache = gemmakv.create_kv_cache(gemma.config, capacity_tokens=64)
one: gemmakv.Generation = gemma.generate(cache, "a", top_k=3, stop=["b"])
many: list[gemmakv.Generation] = gemma.generate(cache, [1, 2], n=2)
both = gemma.generate_batch([cache, cache.fork()], ["a", np.array([1])],
                            seed=[1, None], temperature=0.5)
talk: list[gemmakv.Message | dict[str, str]] = [
    gemmakv.Message("user", "a"), {"role": "assistant", "content": "b"}]
session = gemmakv.Session(gemma, messages=talk)
session.messages = talk
said: str = gemma.chat(talk, cache=cache, tools=[{"a": 1}], top_k=3).text
ids: np.ndarray[tuple[int, ...], np.dtype[np.int32]] = (
    gemma.apply_chat_template(talk, add_generation_prompt=False, mood="x"))
count: int = gemma.count_tokens(talk) + gemma.count_tokens("text")
for piece in gemma.stream(cache, "", logit_bias={5: -1.0}):
    print(piece.text + one.text, both[0].usage.cached_tokens)
rows: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = gemma.logits(
    cache, many[0].token_ids, all_positions=True)
"""

MISUSE = """
import gemmakv

gemma = gemmakv.Gemma.load("gemma-3-270m")
cache = gemmakv.create_kv_cache("gemma3-270m")
gemma.generate(cache, "a", temprature=1.0)
gemma.generate("cache", "a")
gemma.generate(cache, "a", n=2).text
"""


@pytest.mark.slow
def test_the_package_and_code_that_uses_it(tmp_path: Path) -> None:
    """In one run, which takes as long as the package alone."""
    pytest.importorskip("mypy", reason="needs mypy")
    assert (PACKAGE / "py.typed").exists()
    config = tmp_path / "mypy.ini"
    config.write_text(
        "[mypy]\n[mypy-sentencepiece.*]\nignore_missing_imports = True\n"
    )
    (tmp_path / "user_code.py").write_text(USER_CODE)
    (tmp_path / "misuse.py").write_text(MISUSE)
    result = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict"),
            *("--config-file", str(config)),
            # What has not changed since the last run is not looked at again.
            *("--cache-dir", str(ROOT / "build" / "mypy")),
            *("-p", "gemmakv", "-m", "user_code", "-m", "misuse"),
        ],
        env={**os.environ, "MYPYPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    misuse = re.compile(r".*misuse\.py:(\d+): error:")
    errors = [line for line in result.stdout.splitlines() if "error:" in line]
    others = [line for line in errors if not misuse.match(line)]
    assert others == [] and result.stderr == "", result
    lines = {found[1] for line in errors if (found := misuse.match(line))}
    assert lines == {"6", "7", "8"}, errors
