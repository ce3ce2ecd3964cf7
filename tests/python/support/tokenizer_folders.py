"""Directories of a small model, with a tokenizer of either kind."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

from support import golden_models, tiny_gguf, tokenizer_files

ROWS = tiny_gguf.vocabulary()

KINDS = ["model", "json"]


def directory(
    folder: Path, kind: str, vocab_size: int = tiny_gguf.VOCAB
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in _model_files(vocab_size).items():
        (folder / name).write_bytes(data)
    return tokenizer_files.write(folder, ROWS, kind)


@functools.cache
def _model_files(vocab_size: int) -> dict[str, bytes]:
    """The content of a model's files by name; drawing weights takes a while."""
    golden = golden_models.read("gemma3-gqa")
    changed = {**golden.config, "vocab_size": vocab_size}
    with tempfile.TemporaryDirectory() as made:
        golden_models.write(
            Path(made), dataclasses.replace(golden, config=changed)
        )
        return {path.name: path.read_bytes() for path in Path(made).iterdir()}
