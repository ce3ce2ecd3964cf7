"""Tokenizers whose merges decide, run by the package `tokenizers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from gemmakv._support.extras import import_extra
from gemmakv.errors import CorruptFile, MismatchError, brief, one_line
from gemmakv.tokenizers._tokenizer import Tokenizer, byte_piece, check_rows

_LONG = 16_384  # characters that others do not wait for


class MergesTokenizer(Tokenizer):
    """A vocabulary of merges.

    The library does not look for control tokens in text, and no merges may
    make one; those that `encode` asks for are found before.
    """

    def __init__(
        self,
        name: str,
        ids: Mapping[str, int],
        silent: frozenset[int],
        make_library: Callable[[], Any],
    ) -> None:
        """`ids` of all pieces, 0 to their number - 1, each once.
        `make_library` makes that tokenizer, which looks for none of `silent`
        in a text.

        Raises, with `name` in front: CorruptFile if the library rejects the
        vocabulary, MismatchError if plain text could become a silent token.
        """
        super().__init__(len(ids))
        self._ids = ids
        self._silent_ids = silent
        try:
            self._library = make_library()
        except Exception as error:  # the library raises no narrower type
            raise CorruptFile(
                f"{name}: the package tokenizers rejects the vocabulary: "
                + one_line(error)
            ) from None
        self._check_silent(name)

    def _check_silent(self, name: str) -> None:
        """Raises MismatchError if merges make a silent token. Those that do
        in some text do it in the token's own, where nothing is beside it.
        """
        tokens = sorted(self._silent_ids)
        texts = [self._pieces[token] for token in tokens]
        found = self._library.encode_batch(texts, add_special_tokens=False)
        for token, text, encoding in zip(tokens, texts, found):
            if token in encoding.ids:
                raise MismatchError(
                    f"{name}: the merges make the control token {brief(text)} "
                    "of plain text"
                )

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
    """Imports it. Raises GemmaKVError that begins with `name` without it."""
    return import_extra("tokenizers", "tokenizers", f"{name}: reading it")


def fit_rows(
    name: str, ids: Mapping[str, int], silent: frozenset[int], rows: int
) -> tuple[Mapping[str, int], frozenset[int]]:
    """Gives the tokens among `ids`, which are 0 to their number - 1, that have
    one of `rows` in the embedding, and those that no text becomes: `silent` and
    all without a row.

    Raises, with `name` in front: MismatchError for the tokenizer of another
    model, CorruptFile if a byte has no token.
    """
    without = frozenset(range(rows, len(ids)))
    check_rows(name, len(ids), rows, len(without - silent))
    known = ids
    if without:
        known = {piece: token for piece, token in ids.items() if token < rows}
    for value in range(256):
        # Some files have the tab itself in the place of its byte.
        if byte_piece(value) in known or value < 0x80 and chr(value) in known:
            continue
        raise CorruptFile(
            f"{name}: the vocabulary has no token {byte_piece(value)}"
        )
    return known, silent | without


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
