"""Tokenizers whose merges decide, run by the package `tokenizers`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NoReturn

from gemmakv._support.extras import install_command
from gemmakv.errors import (
    CorruptFile,
    GemmaKVError,
    MismatchError,
    brief,
    unexpected,
)
from gemmakv.tokenizers._tokenizer import Tokenizer, byte_piece

_LONG = 16_384  # characters that others do not wait for


class MergesTokenizer(Tokenizer):
    """A vocabulary of merges.

    The library never sees the control tokens, so it cannot find them in
    plain text; those that `encode` asks for are found before.
    """

    def __init__(
        self, ids: Mapping[str, int], silent: frozenset[int], library: Any
    ) -> None:
        """`ids` of all pieces, 0 to their number - 1, each once; `library`:
        that tokenizer, without those that are `silent`.
        """
        super().__init__(len(ids))
        self._ids = ids
        self._silent_ids = silent
        self._library = library

    def id_of(self, piece: str) -> int | None:
        return self._ids.get(piece)

    def _piece(self, token: int) -> str:
        return self._pieces[token]

    def _encode_plain(self, text: str) -> list[int]:
        if len(text) > _LONG:  # only this lets other threads run meanwhile
            [encoding] = self._library.encode_batch(
                [text], add_special_tokens=False
            )
        else:
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


def import_tokenizers(name: str) -> Any:
    """The package. Raises GemmaKVError that begins with `name` without it."""
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise GemmaKVError(
            f"{name}: reading it needs the package tokenizers ({error}); "
            f"install it with: {install_command('tokenizers')}"
        ) from None


def check_merges(
    name: str,
    merges: Any,
    ids: Mapping[str, int],
    control: frozenset[int],
) -> list[tuple[str, str]]:
    """The merges as pairs.

    Raises, with `name` in front: CorruptFile if merges make what is no token,
    or a byte has none; MismatchError if plain text could become a control
    token.
    """
    for value in range(256):
        # Some files have the tab itself in the place of its byte.
        if byte_piece(value) in ids or value < 0x80 and chr(value) in ids:
            continue
        raise CorruptFile(
            f"{name}: the vocabulary has no token {byte_piece(value)}"
        )
    for piece, token in ids.items():
        if len(piece) == 1 and token in control:
            raise MismatchError(
                f"{name}: the control token {brief(piece)} is a letter"
            )
    if not isinstance(merges, list):
        raise unexpected(name, "merges", merges, CorruptFile)
    if not merges:
        raise CorruptFile(f"{name}: found no merges, expected some")
    for merge in merges:
        if not isinstance(merge, (str, list)):
            raise unexpected(name, "a merge", merge, CorruptFile)
    # ["a", "b"], in older files "a b".
    pairs = [tuple(m.split(" ") if type(m) is str else m) for m in merges]
    try:
        made = {ids[first + second] for first, second in pairs}
    except (KeyError, TypeError, ValueError):
        made = None
    if made is None or made & control:
        _raise_for_merge(name, pairs, ids, control)
    return pairs


def take_below(ids: Mapping[str, int], rows: int) -> Mapping[str, int]:
    """Gives the tokens among `ids`, which are 0 to their number - 1, that are
    below `rows`.
    """
    if rows >= len(ids):
        return ids
    return {piece: token for piece, token in ids.items() if token < rows}


def filter_merges(
    merges: Any, known: Mapping[str, int], ids: Mapping[str, int]
) -> Any:
    """Leaves out merges of tokens among `ids` that are not `known`; what is no
    list of merges stays as it is.
    """
    if len(known) == len(ids) or not isinstance(merges, list):
        return merges
    out = ids.keys() - known.keys()

    def is_known(merge: Any) -> bool:
        parts = merge.split(" ") if type(merge) is str else merge
        if type(parts) is not list or set(map(type, parts)) != {str}:
            return True
        return out.isdisjoint([*parts, "".join(parts)])

    return [merge for merge in merges if is_known(merge)]


def _raise_for_merge(
    name: str,
    pairs: list[Any],
    ids: Mapping[str, int],
    control: frozenset[int],
) -> NoReturn:
    """About the first merge that is bad. Requires: there is one."""
    for pair in pairs:
        if len(pair) != 2 or set(map(type, pair)) != {str}:
            raise unexpected(name, "a merge", list(pair), CorruptFile)
        token = ids.get(pair[0] + pair[1])
        if token is None:
            raise CorruptFile(
                f"{name}: the merge {brief(list(pair))} makes no token"
            )
        if token in control:
            raise MismatchError(
                f"{name}: the merge {brief(list(pair))} makes a control token "
                "out of plain text"
            )
    raise AssertionError("all are sound")
