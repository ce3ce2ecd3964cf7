"""Tokenizers of model directories."""

from __future__ import annotations

from pathlib import Path

from gemmakv.tokenizer import Tokenizer


def tokenizer_of_folder(folder: Path) -> Tokenizer | None:
    """The tokenizer of a directory; None if it has none.

    Raises OSError or CorruptFile.
    """
    model = folder / "tokenizer.model"
    return Tokenizer(model.read_bytes()) if model.exists() else None
