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

def rain(city: str, days: int = 1) -> float:
    return 0.5

schema: dict[str, object] = gemmakv.tool_schema(rain)
asker = gemmakv.Session(gemma, tools=[rain, schema], max_tokens=5)
asked: gemmakv.Generation = asker.run("a", rounds=2, temperature=0.5)
asker.give({call.id: rain("b") for call in asked.tool_calls})
asker.send([call.result(0.5) for call in asked.tool_calls])
asker.send({"role": "user", "content": "a"})
history: list[gemmakv.Message] = [asked.message, *asker.messages]
gemma.chat([*history, asked])
again = gemmakv.Session.load("chat.gkv", gemma)
said: str = gemma.chat(talk, cache=cache, tools=[{"a": 1}], top_k=3).text
ids: np.ndarray[tuple[int, ...], np.dtype[np.int32]] = (
    gemma.apply_chat_template(talk, add_generation_prompt=False, mood="x"))
count: int = gemma.count_tokens(talk) + gemma.count_tokens("text")
for piece in gemma.stream(cache, "", logit_bias={5: -1.0}):
    print(piece.text + one.text, both[0].usage.cached_tokens)
alone: gemmakv.Generation = gemma.generate("text", max_tokens=3)
several: list[gemmakv.Generation] = gemma.generate("text", n=2)
named: gemmakv.Generation = gemma.generate(prompt="text", cache=cache)
fresh: gemmakv.KVCache = gemma.new_cache(64, "int8")
why: gemmakv.options.FinishReason = alone.finish_reason
for piece in gemma.chat(talk, stream=True, max_tokens=3, cache=fresh):
    print(piece.text)
streamed: bool = "--stream" in "text"
either = gemma.chat(talk, stream=streamed)
print(either.text if isinstance(either, gemmakv.Generation) else "")
with gemma.stream("text", prompt_progress=lambda done, total: None) as stream:
    print(stream.result().text)


async def loop() -> None:
    reply: gemmakv.Generation = await gemma.achat(talk)
    async for piece in await gemma.achat(talk, stream=True):
        print(piece.text, reply.text)
    async for piece in await gemma.astream("text"):
        print(piece.text)
    batch = await gemma.agenerate_batch([cache], ["a"], max_tokens=[2])
    print(batch[0].text, (await gemma.ascore("a", ["b", "c"])).argmax())
    print((await gemma.alogits(cache, "text")).shape)


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
gemma.new_cache(kv_dtype="f16")
gemma.chat([], stream=True).text
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
    assert lines == {"6", "7", "8", "9", "10"}, errors
