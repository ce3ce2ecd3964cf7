"""Tokenizers of model directories."""

from __future__ import annotations

from pathlib import Path

from gemmakv._support.documents import read_object
from gemmakv.tokenizers._added_tokens import read_marks
from gemmakv.tokenizers._json_tokenizer import JsonTokenizer
from gemmakv.tokenizers._sentencepiece import SentencePieceTokenizer
from gemmakv.tokenizers._sentencepiece_file import marked_model
from gemmakv.tokenizers._tokenizer import Tokenizer


def tokenizer_of_folder(
    folder: Path, *, may_add_eos: bool = False, rows: int | None = None
) -> Tokenizer | None:
    """The tokenizer of a directory: that of its tokenizer.model, else of its
    tokenizer.json, else None. `may_add_eos`: of models of embeddings, whose
    texts may have an end. The model has `rows` for the first tokens; None: for
    all.

    Raises OSError, CorruptFile for files that are damaged or contradict each
    other, MismatchError for a tokenizer that is not of Gemma's kind,
    GemmaKVError if a package is missing.
    """
    path = folder / "tokenizer.model"
    if path.exists():
        model = marked_model(path, read_marks(folder, None, may_add_eos), rows)
        return SentencePieceTokenizer(model, str(path))
    path = folder / "tokenizer.json"
    if path.exists():
        content = read_object(path)
        marks = read_marks(folder, content, may_add_eos)
        return JsonTokenizer(path, content, marks, rows)
    return None
