"""Text to token ids and back: what all tokenizers have in common."""

from __future__ import annotations

import abc
import re
from collections.abc import Iterable, Sequence
from functools import cached_property

from gemmakv._support.arguments import integer
from gemmakv._support.text import check_unicode
from gemmakv.errors import CorruptFile, MismatchError, unexpected

SPACE_MARK = "\u2581"  # a vocabulary's visible stand-in for a space
_SLICE = 65_536  # characters whose words are counted at once
# Added tokens that models without images or sounds have no rows for: one of
# Gemma 3's, 256 of Gemma 3n's. With more, the tokenizer is another model's.
_MOST_TEXTS_WITHOUT_ROWS = 256


def byte_piece(value: int) -> str:
    """How vocabularies write the token of a single byte: "<0xE2>"."""
    return f"<0x{value:02X}>"


BYTE_PIECES = frozenset(map(byte_piece, range(256)))


def check_rows(name: str, tokens: int, rows: int, texts: int) -> None:
    """Raises MismatchError that begins with `name` for a tokenizer of another
    model: of its tokens so many `texts` have no row in the embedding.
    """
    if texts > _MOST_TEXTS_WITHOUT_ROWS:
        raise MismatchError(
            f"{name}: tokenizer: found {tokens} tokens, expected about as "
            f"many as the model's {rows} rows"
        )


# The one rule of BOS, for prompts, conversations and servers alike: what begins
# with one gets no other.


def with_bos(ids: list[int], bos_id: int) -> list[int]:
    """Puts a BOS before ids, unless they begin with one or the model has none
    (`bos_id` < 0).
    """
    return ids if bos_id < 0 or ids[:1] == [bos_id] else [bos_id, *ids]


class Tokenizer(abc.ABC):
    """Tokenizer of a model.

    Every str has token ids and survives the way there and back, but for
    U+2581, which vocabularies take for a space. Safe from several threads.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    # What each kind of vocabulary answers in its own way.

    @abc.abstractmethod
    def id_of(self, piece: str) -> int | None:
        """Finds the token whose piece is exactly `piece`, control tokens
        included; None if there is none.
        """

    @abc.abstractmethod
    def _piece(self, token: int) -> str:
        """The piece of a valid id."""

    @abc.abstractmethod
    def _encode_plain(self, text: str) -> list[int]:
        """Ids of a text of valid Unicode; never one of `_silent`."""

    @property
    @abc.abstractmethod
    def _pieces(self) -> Sequence[str]:
        """All pieces, [vocab_size]."""

    @property
    @abc.abstractmethod
    def _silent(self) -> frozenset[int]:
        """Tokens without text: control, unused and unknown ones, and those
        without a row in the embedding.
        """

    @abc.abstractmethod
    def _is_byte(self, token: int) -> bool:
        """Whether the token of a piece like "<0xE2>" stands for that byte."""

    # What follows from it.

    def __repr__(self) -> str:
        return f"<Tokenizer of {self._vocab_size} tokens>"

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def bos_id(self) -> int | None:
        """The token that stands before the first text; None if there is none.

        A tokenizer that came with a model takes it, and `eos_ids`, from the
        model; any other takes the tokens that are called <bos> and <eos>.
        """
        bos_id, _ = self._ends
        return None if bos_id < 0 else bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end what a model says."""
        return self._ends[1]

    @cached_property
    def _ends(self) -> tuple[int, tuple[int, ...]]:
        bos_id, eos_id = self.id_of("<bos>"), self.id_of("<eos>")
        ends = () if eos_id is None else (eos_id,)
        return -1 if bos_id is None else bos_id, ends

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """UTF-8 bytes of each token, [vocab_size]; empty for control tokens.

        A token may hold a part of a character.
        """
        # One replace and one encode over all pieces: tens of milliseconds
        # less than a call for each of 262,144. No piece holds a NUL.
        joined = "\0".join(self._pieces).replace(SPACE_MARK, " ")
        table = joined.encode("utf-8").split(b"\0")
        if len(table) != self._vocab_size:
            raise CorruptFile("tokenizer: a piece of the vocabulary holds NUL")
        for i in self._silent:
            table[i] = b""
        for value in range(256):
            token = self.id_of(byte_piece(value))
            if token is not None and self._is_byte(token):
                table[token] = bytes([value])
        return table

    def _at_least(self, text: str, enough: int) -> int:
        """A number of tokens that `text` has at least, with control tokens or
        without, of what can be told without encoding it; counting ends where
        there are `enough`.
        """
        length, words = self._largest
        found = -(-len(text) // length)
        if len(text) < enough:
            return found
        count = 0
        for start in range(0, len(text), _SLICE):
            if found >= enough:
                break
            count += len(text[start : start + _SLICE].split())
            # Each cut may have made two of one.
            found = max(found, -(-(count - start // _SLICE) // words))
        return found

    @cached_property
    def _largest(self) -> tuple[int, int]:
        """Characters, and words between white space, that a token is of at
        most.
        """
        pieces = self._pieces
        texts = "\0".join(pieces).replace(SPACE_MARK, " ").split("\0")
        words = max(map(len, map(str.split, texts)))
        return max(1, *map(len, pieces)), max(1, words)

    def encode(
        self, text: str, parse_special: bool = False, *, add_bos: bool = False
    ) -> list[int]:
        """Turns a text into token ids, without BOS unless `add_bos`.

        The strings of control tokens ("<end_of_turn>") are ordinary text
        unless `parse_special`. With `add_bos` the ids are those that
        `Gemma.generate` begins a conversation with: BOS stands in front if
        the model has one and the text does not spell it already. Raises
        ValueError if `text` cannot be expressed in UTF-8 (lone surrogates).
        """
        if not isinstance(text, str):
            raise unexpected("text", "a str", text)
        check_unicode("text", text)
        ids: list[int] = []
        if parse_special:
            for part, token in self.split_special(text):
                ids += self._encode_plain(part) if token is None else [token]
        elif text:
            ids = self._encode_plain(text)
        return with_bos(ids, self._ends[0]) if add_bos else ids

    def split_special(self, text: str) -> list[tuple[str, int | None]]:
        """Splits a text into parts: (a control token's string, its id) and,
        between them, (text, None). No part is empty.
        """
        table, lengths, starts = self._specials
        parts: list[tuple[str, int | None]] = []
        done = position = 0
        while match := starts.search(text, position):
            start = match.start()
            position = start + 1
            for length in lengths:  # the longest first
                token = table.get(text[start : start + length])
                if token is not None:
                    if start > done:
                        parts.append((text[done:start], None))
                    done = position = start + length
                    parts.append((text[start:done], token))
                    break
        if done < len(text):
            parts.append((text[done:], None))
        return parts

    def decode(self, ids: Iterable[int]) -> str:
        """Turns token ids into text. Control tokens are silent; bytes that
        are not UTF-8 become U+FFFD. Raises ValueError for an id that is no
        token.
        """
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Turns token ids into bytes: exact where `decode` must replace."""
        if not isinstance(ids, Iterable):
            raise unexpected("ids", "token ids", ids)
        table = self.token_bytes
        parts = []
        for token in ids:
            parts.append(table[self._checked("ids", token)])
        return b"".join(parts)

    def piece_of(self, token: int) -> str:
        """Gives the piece of a token, the inverse of `id_of`. Raises ValueError
        for an id that is no token.
        """
        return self._piece(self._checked("token", token))

    def _checked(self, name: str, token: int) -> int:
        try:
            return integer(name, token, 0, self._vocab_size - 1)
        except ValueError:
            raise unexpected(
                name, f"a token id in [0, {self._vocab_size})", token
            ) from None

    @cached_property
    def _specials(self) -> tuple[dict[str, int], list[int], re.Pattern[str]]:
        """The ids of control tokens by their texts, the lengths of these,
        descending, and a pattern of their first characters.
        """
        table = {self._pieces[i]: i for i in self._silent if self._pieces[i]}
        lengths = sorted({len(text) for text in table}, reverse=True)
        starts = "|".join(sorted({re.escape(text[0]) for text in table}))
        return table, lengths, re.compile(starts or "(?!)")


def set_ends(
    tokenizer: Tokenizer, bos_id: int, eos_ids: Sequence[int]
) -> None:
    """Replaces the ends that are found by name, before anybody else has the
    tokenizer; `bos_id` < 0 is none.
    """
    tokenizer._ends = bos_id, tuple(eos_ids)
