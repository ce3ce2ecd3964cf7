"""Tokenizers of tokenizer.json files, run by the package `tokenizers`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from gemmakv.errors import (
    CorruptFile,
    GemmaKVError,
    MismatchError,
    brief,
    one_line,
    unexpected,
)
from gemmakv.tokenizers._added_tokens import Marks
from gemmakv.tokenizers._tokenizer import SPACE_MARK, Tokenizer, byte_piece

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
    "type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK
}

# An added token as the library wants it, beside its id and content.
_PLAIN = dict.fromkeys(
    ("single_word", "lstrip", "rstrip", "normalized", "special"), False
)


class JsonTokenizer(Tokenizer):
    """The vocabulary of a tokenizer.json file.

    The library never sees the control tokens, so it cannot find them in
    plain text; those that `encode` asks for are found before.
    """

    def __init__(
        self, path: Path, content: Mapping[str, Any], marks: Marks
    ) -> None:
        """`content` is that of the file `path`, which only errors name.

        Raises CorruptFile if it is not sound, MismatchError if it is not of
        Gemma's kind, GemmaKVError without the package.
        """
        package = _import_tokenizers(path)
        _check_settings(path, content)
        self._ids = _vocabulary(path, content["model"], marks)
        super().__init__(len(self._ids))
        marks.check_known(self._ids)
        self._silent_ids = frozenset(
            token for piece, token in self._ids.items()
            if marks.is_control(piece)
        )
        _check_bytes(path, self._ids)
        _check_merges(path, content["model"], self._ids, self._silent_ids)
        self._library = _run(package, path, content, self._ids, marks)

    def id_of(self, piece: str) -> int | None:
        return self._ids.get(piece)

    def _piece(self, token: int) -> str:
        return self._pieces[token]

    def _encode_plain(self, text: str) -> list[int]:
        encoding = self._library.encode(text, add_special_tokens=False)
        return [int(token) for token in encoding.ids]

    def _is_byte(self, token: int) -> bool:
        return token not in self._silent

    @cached_property
    def _pieces(self) -> list[str]:
        pieces = [""] * self.vocab_size
        for piece, token in self._ids.items():
            pieces[token] = piece
        return pieces

    @property
    def _silent(self) -> frozenset[int]:
        return self._silent_ids


def _import_tokenizers(path: Path) -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise GemmaKVError(
            f"{path}: reading it needs the package tokenizers ({error}); "
            'install it with: pip install "gemmakv[tokenizers]"'
        ) from None


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
    """The steps of a sequence; of one step that one, of null none."""
    if value is None:
        return []
    if isinstance(value, dict) and value.get("type") == "Sequence":
        steps = value.get(key)
        return steps if isinstance(steps, list) else [value]
    return [value]


def _vocabulary(
    path: Path, model: Mapping[str, Any], marks: Marks
) -> dict[str, int]:
    """Ids of all pieces, added ones included: each id below their number."""
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


def _check_bytes(path: Path, ids: Mapping[str, int]) -> None:
    """Raises unless every byte of every text has a token."""
    for value in range(256):
        # Some files have the tab itself in the place of its byte.
        if byte_piece(value) in ids or value < 0x80 and chr(value) in ids:
            continue
        raise CorruptFile(
            f"{path}: the vocabulary has no token {byte_piece(value)}"
        )


def _check_merges(
    path: Path,
    model: Mapping[str, Any],
    ids: Mapping[str, int],
    control: frozenset[int],
) -> None:
    """Raises if the model makes a control token out of plain text."""
    for piece, token in ids.items():
        if len(piece) == 1 and token in control:
            raise MismatchError(
                f"{path}: the control token {brief(piece)} is a letter"
            )
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise unexpected(path, "merges", merges, CorruptFile)
    for merge in merges:
        # ["a", "b"], in older files "a b".
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2:
            raise unexpected(path, "a merge", pair, CorruptFile)
        try:
            token = ids[pair[0] + pair[1]]
        except (KeyError, TypeError):
            raise CorruptFile(
                f"{path}: the merge {brief(pair)} makes no token"
            ) from None
        if token in control:
            raise MismatchError(
                f"{path}: the merge {brief(pair)} makes a control token out "
                "of plain text"
            )


def _run(
    package: Any,
    path: Path,
    content: Mapping[str, Any],
    ids: Mapping[str, int],
    marks: Marks,
) -> Any:
    """The library's tokenizer, without control tokens."""
    entries = {
        entry["content"]: entry for entry in content.get("added_tokens") or []
    }
    plain = [
        {**_PLAIN, "id": token, "content": added.content}
        | entries.get(added.content, {})
        for token, added in sorted(marks.added.items())
        if not marks.is_control(added.content)
    ]
    # Left out: what only concerns BOS, batches and decoding.
    rest = dict.fromkeys(
        ("truncation", "padding", "post_processor", "decoder")
    )
    # With all tokens in the vocabulary, the ids are those of the files.
    model = {**content["model"], "vocab": ids}
    settings = {**content, **rest, "model": model, "added_tokens": plain}
    try:
        return package.Tokenizer.from_str(json.dumps(settings))
    except Exception as error:  # the library raises no narrower type
        raise CorruptFile(
            f"{path}: the package tokenizers rejects it: "
            + one_line(error)
        ) from None
