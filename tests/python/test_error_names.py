"""Errors of bad arguments name what a user knows: an argument and its class,
not those of the compiled core.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv import Gemma, GemmaKVError, KVCache, Session, Tokenizer

TALK = [{"role": "user", "content": "ab"}]
OURS = re.compile(
    r"_core|incompatible function|pybind|\b(engine|Engine|Model|Requests)\b"
)


class Anything:
    """An object that no argument takes."""

    def __repr__(self) -> str:
        return "<anything>"


# Arguments of a call that is right, by their names.
RIGHT: dict[str, Callable[[Gemma], Any]] = {
    "cache": lambda g: g.new_cache(64),
    "caches": lambda g: [g.new_cache(64)],
    "choices": lambda g: ["a", "b"],
    "config": lambda g: g.config,
    "data": lambda g: g.new_cache(64).to_bytes(),
    "ids": lambda g: [17],
    "length": lambda g: 0,
    "messages": lambda g: TALK,
    "model": lambda g: g,
    "path_or_file": lambda g: io.BytesIO(),
    "piece": lambda g: "a",
    "prompt": lambda g: "ab",
    "prompts": lambda g: ["ab"],
    "salt": lambda g: "ab",
    "source": lambda g: {},
    "text": lambda g: "ab",
    "texts": lambda g: ["ab"],
    "token": lambda g: 17,
    "tokens": lambda g: [17],
    "turn": lambda g: 0,
}
MORE: dict[str, dict[str, Any]] = {
    "embed": {"pooling": "mean"}, "aembed": {"pooling": "mean"},
    "generate": {"max_tokens": 1}, "agenerate": {"max_tokens": 1},
    "chat": {"max_tokens": 1}, "achat": {"max_tokens": 1},
    "send": {"max_tokens": 1}, "asend": {"max_tokens": 1},
    "stream": {"max_tokens": 1}, "astream": {"max_tokens": 1},
    "generate_batch": {"max_tokens": 1}, "agenerate_batch": {"max_tokens": 1},
}  # fmt: skip
# Protocols of Python, and what takes no arguments of interest.
LEFT_OUT = {"run", "arun"}


def methods() -> list[tuple[str, str]]:
    """Gives each argument of each public method, as (place, argument)."""
    found = []
    for cls in (Gemma, KVCache, Session, Tokenizer):
        for name, method in inspect.getmembers(cls, callable):
            if name.startswith("_") or name in LEFT_OUT:
                continue
            for one in inspect.signature(method).parameters.values():
                if one.name != "self" and one.kind is not one.VAR_KEYWORD:
                    found.append((f"{cls.__name__}.{name}", one.name))
    for name in ("create_kv_cache", "Session", "BlockPool", "PrefixCache"):
        for argument in inspect.signature(getattr(gemmakv, name)).parameters:
            if argument != "more":
                found.append((name, argument))
    return found


def object_of(kind: str, gemma: Gemma) -> Any:
    if kind == "Gemma":
        return gemma
    if kind == "KVCache":
        return gemma.new_cache(64)
    if kind == "Session":
        return Session(gemma, capacity_tokens=64)
    return gemma.tokenizer


@pytest.mark.parametrize(("place", "argument"), methods())
def test_no_error_names_what_is_inside(
    talker: Gemma, talker_path: Path, place: str, argument: str
) -> None:
    kind, _, name = place.partition(".")
    function: Any = getattr(
        object_of(kind, talker) if name else gemmakv, name or kind
    )
    keywords: dict[str, Any] = dict(MORE.get(name, {}))
    for one in inspect.signature(function).parameters.values():
        if one.name == "gemma":
            keywords[one.name] = talker
        elif one.default is one.empty and one.name in RIGHT:
            keywords[one.name] = RIGHT[one.name](talker)
    if place == "Gemma.load":
        keywords["model"] = talker_path
    if name in ("generate", "agenerate", "prefill", "aprefill", "stream",
                "astream") and kind == "Gemma":  # fmt: skip
        keywords |= {"cache": talker.new_cache(64), "prompt": "ab"}
    keywords[argument] = Anything()
    try:
        found = function(**keywords)
        if inspect.iscoroutine(found):
            asyncio.run(found)
    except (ValueError, TypeError, GemmaKVError) as error:
        assert not OURS.search(str(error)), error
        assert not isinstance(error, UnicodeError)
