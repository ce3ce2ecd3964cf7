"""What a model's file says about it, beside its shape."""

from __future__ import annotations

import dataclasses
import os
import re

from gemmakv import _core

# "gemma-3-1b-it", "Gemma 2 2b It", "gemma-it.Q4_0": a word of its own.
_TUNED = re.compile(r"(?i)(?:^|[-_. ])(?:it|instruct|chat)(?:[-_. ]|$)")


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """Names and chat template of a model.

    names: what it is called, in its metadata and on disk.
    chat_template: Jinja source of its chat template, None if it has none.
    """

    names: tuple[str, ...] = ()
    chat_template: str | None = None

    @property
    def instruction_tuned(self) -> bool:
        """Whether one of its names says that it was tuned for chat."""
        return any(_TUNED.search(name) for name in self.names)


def info_of_gguf(path: str) -> ModelInfo:
    """Reads a GGUF file's metadata; values of a wrong type count as absent."""
    file = _core.GgufFile(os.fsencode(path))
    present = set(file.keys())

    def text(key: str) -> str | None:
        value = file.get(key) if key in present else None
        return value if isinstance(value, str) and value else None

    keys = ("general.name", "general.basename", "general.finetune")
    names = [text(key) for key in keys]
    stem = os.path.splitext(os.path.basename(path))[0]
    return ModelInfo(
        names=tuple(name for name in [*names, stem] if name),
        chat_template=text("tokenizer.chat_template"),
    )
