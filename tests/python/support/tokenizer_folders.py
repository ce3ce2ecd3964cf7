"""Directories of a small model, with a tokenizer of either kind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from support import golden_models, tiny_gguf, tokenizer_files

ROWS = tiny_gguf.vocabulary()

KINDS = ["model", "json"]


def directory(
    folder: Path, kind: str, vocab_size: int = tiny_gguf.VOCAB
) -> Path:
    golden = golden_models.read("gemma3-gqa")
    changed = {**golden.config, "vocab_size": vocab_size}
    golden_models.write(folder, dataclasses.replace(golden, config=changed))
    return tokenizer_files.write(folder, ROWS, kind)
