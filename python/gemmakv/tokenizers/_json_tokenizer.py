"""Tokenizers of tokenizer.json files, run by the package `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemmakv.errors import (
    CorruptFile,
    MismatchError,
    brief,
    unexpected,
)
from gemmakv.tokenizers._added_tokens import Marks
from gemmakv.tokenizers._merges import (
    MergesTokenizer,
    filter_merges,
    fit_rows,
    import_tokenizers,
)
from gemmakv.tokenizers._tokenizer import BYTE_PIECES, SPACE_MARK

# Settings of the model and what they must be; None stands for any of the
# values that mean the same as nothing.
_MODEL_SETTINGS = {
    "type": "BPE",
    "byte_fallback": True,
    "ignore_merges": None,
    "dropout": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
}
_NORMALIZER = {
    "type": "Replace",
    "pattern": {"String": " "},
    "content": SPACE_MARK,
}

# An added token as the library wants it, beside its id and content.
_PLAIN = dict.fromkeys(
    ("single_word", "lstrip", "rstrip", "normalized", "special"), False
)


class JsonTokenizer(MergesTokenizer):
    """The vocabulary of a tokenizer.json file."""

    def __init__(
        self,
        path: Path,
        content: Mapping[str, Any],
        marks: Marks,
        rows: int | None = None,
    ) -> None:
        """`content` is that of the file `path`, which only errors name. The
        model has `rows` for the first tokens; None: for all.

        Raises CorruptFile if it is not sound, MismatchError if it is not of
        Gemma's kind or of this model, GemmaKVError without the package.
        """
        package = import_tokenizers(str(path))
        _check_settings(path, content)
        ids = _vocabulary(path, content["model"], marks)
        marks.check_known(ids)
        silent = frozenset(
            token for piece, token in ids.items() if marks.is_control(piece)
        )
        rows = len(ids) if rows is None else rows
        known, silent = fit_rows(str(path), ids, silent, rows)
        model = content["model"]
        merges = filter_merges(model.get("merges"), known, ids)
        if not isinstance(merges, list) or not merges:
            raise unexpected(path, "merges", merges, CorruptFile)
        # Left out: what only concerns BOS, batches and decoding.
        settings = {
            **content,
            **dict.fromkeys(
                ("truncation", "padding", "post_processor", "decoder")
            ),
            # With all tokens in the vocabulary, the ids are those of the files.
            "model": {**model, "vocab": known, "merges": merges},
            "added_tokens": _added_texts(content, known, marks),
        }

        def make() -> Any:
            return package.Tokenizer.from_str(json.dumps(settings))

        super().__init__(str(path), ids, silent, make)


def _check_settings(path: Path, content: Mapping[str, Any]) -> None:
    """Raises unless text goes through nothing but Gemma's own steps."""
    model = content.get("model")
    if not isinstance(model, dict):
        raise unexpected(path, "a model", model, CorruptFile)
    for key, expected in _MODEL_SETTINGS.items():
        value = model.get(key)
        if (value or None) != expected:
            raise MismatchError(
                f"{path}: {key} of the model is {brief(value)}, expected "
                f"{brief(expected)} as in Gemma's tokenizers"
            )
    normalizers = _steps(content.get("normalizer"), "normalizers")
    if normalizers != [_NORMALIZER]:
        raise unexpected(
            path,
            "a normalizer that marks spaces as in Gemma's tokenizers",
            content.get("normalizer"),
            MismatchError,
        )
    # Gemma's splits at spaces, of which the normalizer has left none.
    for step in _steps(content.get("pre_tokenizer"), "pretokenizers"):
        kind = step.get("type") if isinstance(step, dict) else None
        if kind != "Split" or step.get("pattern") != {"String": " "}:
            raise unexpected(
                path,
                "no pre_tokenizer but one that splits at spaces, as in "
                "Gemma's tokenizers",
                step,
                MismatchError,
            )


def _steps(value: Any, key: str) -> list[Any]:
    """Gives the steps of a sequence; of one step that one, of null none."""
    if value is None:
        return []
    if isinstance(value, dict) and value.get("type") == "Sequence":
        steps = value.get(key)
        return steps if isinstance(steps, list) else [value]
    return [value]


def _vocabulary(
    path: Path, model: Mapping[str, Any], marks: Marks
) -> dict[str, int]:
    """Gives the ids of all pieces and added tokens: each below their number."""
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not vocab:
        raise unexpected(path, "a vocab", vocab, CorruptFile)
    ids: dict[str, int] = dict(vocab)
    if set(map(type, ids.values())) != {int}:
        raise CorruptFile(f"{path}: vocab has ids that are no integers")
    for token, added in marks.added.items():
        if ids.setdefault(added.content, token) != token:
            raise CorruptFile(
                f"{added.file}: {brief(added.content)} is token {token}, in "
                f"{path} token {ids[added.content]}"
            )
    seen = bytearray(len(ids))
    for piece, token in ids.items():
        if not 0 <= token < len(ids) or seen[token]:
            known = marks.added.get(token)
            file = known.file if known and known.content == piece else path
            raise CorruptFile(
                f"{file}: expected the ids of {len(ids)} tokens to be 0 to "
                f"{len(ids) - 1}, each once, found {token} for {brief(piece)}"
            )
        seen[token] = 1
    return ids


def _added_texts(
    content: Mapping[str, Any], ids: Mapping[str, int], marks: Marks
) -> list[dict[str, Any]]:
    """Gives the added tokens that are found in texts, before any merge."""
    entries = {
        entry["content"]: entry for entry in content.get("added_tokens") or []
    }
    return [
        {**_PLAIN, "id": token, "content": added.content}
        | entries.get(added.content, {})
        for token, added in sorted(marks.added.items())
        if added.content in ids
        and not marks.is_control(added.content)
        # The name of a byte is text like any other.
        and added.content not in BYTE_PIECES
    ]
