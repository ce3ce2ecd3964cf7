"""The JSON files beside a vocabulary: which tokens were added, which are
special, and settings of the tokenizer.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gemmakv import _core
from gemmakv._support.documents import Section
from gemmakv._support.text import is_unicode
from gemmakv.errors import CorruptFile, MismatchError, brief, unexpected

# Settings that change token ids, and what they must be.
_SETTINGS = {
    "add_bos_token": True,
    "add_eos_token": False,
    "add_prefix_space": False,
    "sp_model_kwargs": {},
}
_TOKEN_LISTS = (
    "additional_special_tokens",
    "extra_special_tokens",
    "model_specific_special_tokens",
)


@dataclasses.dataclass(frozen=True)
class AddedToken:
    """A token that a JSON file names with its id. `file` is for errors."""

    content: str
    special: bool
    file: Path


@dataclasses.dataclass(frozen=True)
class Marks:
    """Added tokens by their ids, and special tokens with the files that say
    so.
    """

    added: Mapping[int, AddedToken]
    special: Mapping[str, Path]

    def is_control(self, piece: str) -> bool:
        """Tells whether a piece is a control token, never made from plain text:
        one that a file calls special, or that is one by its name in any Gemma,
        whatever the files say.
        """
        # Such names begin with one of these.
        return piece in self.special or (
            piece[:1] in ("<", "[")
            and is_unicode(piece)
            and _core.is_control_name(piece)
        )

    def check_known(self, pieces: Mapping[str, int]) -> None:
        """Raises CorruptFile if a special token is not among `pieces`."""
        for text, file in self.special.items():
            if text not in pieces:
                raise CorruptFile(
                    f"{file}: names the special token {brief(text)}, which "
                    "the vocabulary does not have"
                )


def read_marks(
    folder: Path,
    tokenizer_json: Mapping[str, Any] | None,
    may_add_eos: bool = False,
) -> Marks:
    """Reads the files of a Hugging Face directory.

    `tokenizer_json` is the content of tokenizer.json if it counts.
    `may_add_eos`: whether texts may have an end. Raises CorruptFile for what is
    damaged or contradicts itself, MismatchError for settings that are not
    Gemma's.
    """
    tokens: list[tuple[int, AddedToken]] = []
    special: dict[str, Path] = {}
    path = folder / "tokenizer_config.json"
    config = Section.of_file(path).values
    _check_settings(config, path, may_add_eos)
    tokens += _added_by_id(config, path)
    special.update((text, path) for text in _named(config, path))
    path = folder / "special_tokens_map.json"
    names = _named(Section.of_file(path).values, path)
    special.update((text, path) for text in names)
    path = folder / "added_tokens.json"
    for text, token in Section.of_file(path).values.items():
        _check_id(token, path)
        tokens.append((token, AddedToken(text, False, path)))
    path = folder / "tokenizer.json"
    if tokenizer_json is None and not tokens:
        tokenizer_json = Section.of_file(path).values
    tokens += _added_in_list(tokenizer_json or {}, path)
    added = _united(tokens)
    special.update((t.content, t.file) for t in added.values() if t.special)
    return Marks(added, special)


def _united(tokens: Iterable[tuple[int, AddedToken]]) -> dict[int, AddedToken]:
    """Unites the added tokens of several files, which must agree."""
    added: dict[int, AddedToken] = {}
    places: dict[str, tuple[int, Path]] = {}
    for token, new in tokens:
        old = added.setdefault(token, new)
        if old.content != new.content:
            raise CorruptFile(
                f"{new.file}: token {token} is {brief(new.content)}, in "
                f"{old.file} {brief(old.content)}"
            )
        other, file = places.setdefault(new.content, (token, new.file))
        if other != token:
            raise CorruptFile(
                f"{new.file}: {brief(new.content)} is token {token}, in "
                f"{file} token {other}"
            )
        if new.special and not old.special:
            added[token] = new
    return added


def _added_by_id(
    config: Mapping[str, Any], path: Path
) -> Iterator[tuple[int, AddedToken]]:
    table = config.get("added_tokens_decoder") or {}
    if not isinstance(table, dict):
        raise unexpected(
            path, "an object added_tokens_decoder", table, CorruptFile
        )
    for key, entry in table.items():
        if not re.fullmatch(r"[0-9]{1,9}", key):
            raise unexpected(
                path, "token ids in added_tokens_decoder", key, CorruptFile
            )
        yield int(key), _added_token(entry, path)


def _added_in_list(
    content: Mapping[str, Any], path: Path
) -> Iterator[tuple[int, AddedToken]]:
    entries = content.get("added_tokens") or []
    if not isinstance(entries, list):
        raise unexpected(path, "a list added_tokens", entries, CorruptFile)
    for entry in entries:
        token = _added_token(entry, path)
        _check_id(entry.get("id"), path)
        yield entry["id"], token


def _check_id(token: object, path: Path) -> None:
    if type(token) is not int or not 0 <= token < 1 << 30:
        raise unexpected(path, "the id of an added token", token, CorruptFile)


def _added_token(entry: Any, path: Path) -> AddedToken:
    content = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(content, str) or not content or not is_unicode(content):
        raise unexpected(path, "an added token", entry, CorruptFile)
    for flag in ("special", "lstrip", "rstrip", "single_word"):
        value = entry.get(flag, False)
        if not isinstance(value, bool):
            raise unexpected(
                path,
                f"true or false for {flag} of {brief(content)}",
                value,
                CorruptFile,
            )
        if value and flag != "special":
            raise MismatchError(
                f"{path}: {flag} of {brief(content)} is true, expected "
                "false as in Gemma's tokenizers"
            )
    return AddedToken(content, bool(entry.get("special", False)), path)


def _check_settings(
    config: Mapping[str, Any], path: Path, may_add_eos: bool
) -> None:
    for key, expected in _SETTINGS.items():
        if key == "add_eos_token" and may_add_eos:
            continue
        value = config.get(key)
        if value is not None and value != expected:
            raise MismatchError(
                f"{path}: {key} is {brief(value)}, expected {expected} as in "
                "Gemma's tokenizers"
            )


def _named(config: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Gives the special tokens that have roles ("bos_token")."""
    for key, value in config.items():
        if key in _TOKEN_LISTS:
            values = value.values() if isinstance(value, dict) else value
            if values is not None and not isinstance(value, (dict, list)):
                raise unexpected(path, f"a list {key}", value, CorruptFile)
            for one in values or ():
                yield _token_text(one, key, path)
        elif key.endswith("_token") and not isinstance(value, bool | None):
            yield _token_text(value, key, path)


def _token_text(value: Any, key: str, path: Path) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        raise unexpected(path, f"a token for {key}", value, CorruptFile)
    return text
