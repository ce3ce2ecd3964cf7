"""Directories of models with chat templates, and what their renderings are."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from gemmakv import Gemma, Message
from gemmakv.chat._templates import template_for
from gemmakv.chat._transcript import Encoder
from support import tokenizer_files
from support.chat_cases import CASES, TURNS
from support.tokenizer_files import write_json
from support.tokenizer_folders import ROWS, directory

PLACES = ["tokenizer_config.json", "chat_template.jinja", "chat_template.json"]


def source_of(generation: str) -> str:
    """The template of a generation's instruction-tuned models."""
    has_system = "true" if generation == "gemma-3" else "false"
    return TURNS.replace("SYSTEM", has_system)


def model_with(
    folder: Path, kind: str, source: str, place: str = PLACES[0]
) -> Gemma:
    directory(folder, kind)
    if place == PLACES[0]:
        content = tokenizer_files.config(ROWS)
        write_json(folder / place, {**content, "chat_template": source})
    elif place == PLACES[1]:
        (folder / place).write_text(source, "utf-8")
    else:
        write_json(folder / place, {"chat_template": source})
    return Gemma.load(folder)


@functools.lru_cache(maxsize=64)
def own_template(gemma: Gemma) -> Any:
    """The template of a model's file, made once: compiling one takes longer
    than any rendering.
    """
    template = template_for(gemma)
    assert template.name == "file"
    return template


def ids_of(gemma: Gemma, messages: list[Message], reply: bool) -> list[int]:
    assert gemma.tokenizer is not None
    template = own_template(gemma)
    segments = template.render(messages, add_generation_prompt=reply)
    encoder = Encoder(gemma.tokenizer, gemma.config.bos_id)
    return [int(token) for token in encoder.encode(segments)]


def is_harmless(case: dict[str, Any]) -> bool:
    return not any("<" in content for _, content in case["messages"])


def cases_of(generation: str) -> list[dict[str, Any]]:
    found = [case for case in CASES if case["texts"][generation] is not None]
    assert len(found) >= 16
    return found
