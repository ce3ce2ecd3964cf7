"""Token ids of a rendered conversation, and what of them a cache holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gemmakv.chat._messages import Segment
from gemmakv.errors import MismatchError, brief
from gemmakv.tokenizers._tokenizer import Tokenizer, with_bos

Ids = npt.NDArray[np.int32]


class Encoder:
    """Turns segments into token ids, remembering those of the last call.

    Not thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer, bos_id: int) -> None:
        """`bos_id` < 0: the model has none."""
        self._tokenizer = tokenizer
        self._bos_id = bos_id
        self._known: dict[Segment, list[int]] = {}

    def encode(self, segments: Sequence[Segment]) -> Ids:
        """int32 [n], with exactly one BOS in front, whatever the template
        does about it. Raises ValueError for text that is not Unicode.
        """
        known = {}
        ids: list[int] = []
        for segment in segments:
            tokens = self._known.get(segment)
            if tokens is None:
                tokens = self._encode(segment)
            known[segment] = tokens
            ids += tokens
        self._known = known
        return np.array(with_bos(ids, self._bos_id), np.int32)

    def _encode(self, segment: Segment) -> list[int]:
        if not segment.special:
            return self._tokenizer.encode(segment.text)
        token = self._tokenizer.id_of(segment.text)
        if token is None:
            raise MismatchError(
                "template: expected the model to know the control token "
                f"{brief(segment.text)}, found none of that name; choose "
                "template='plain'"
            )
        return [token]


def at_least(
    segments: Iterable[Segment], tokenizer: Tokenizer, enough: int
) -> int:
    """A number of tokens that they have at least, as `Tokenizer._at_least`."""
    count = 0
    for segment in segments:
        if count >= enough:
            break
        if segment.special:
            count += 1
        else:
            count += tokenizer._at_least(segment.text, enough - count)
    return count


def common_exact(held: Ids, wanted: Ids) -> int:
    """How many leading ids are the same."""
    count = min(len(held), len(wanted))
    differs: npt.NDArray[Any] = held[:count] != wanted[:count]
    return int(differs.argmax()) if differs.any() else count


def common_text(
    held: Ids, wanted: Ids, tokenizer: Tokenizer
) -> tuple[int, int]:
    """The longest beginnings of `held` and `wanted` that say the same.

    A model may sample other tokens for a text than the tokenizer gives:
    beginnings are the same if their control tokens and the bytes of their
    text are. Returns the lengths (of held, of wanted).
    """
    i = j = 0
    while True:
        same = common_exact(held[i:], wanted[j:])
        i += same
        j += same
        step = _next_meeting(held[i:], wanted[j:], tokenizer.token_bytes)
        if step is None:
            return i, j
        i += step[0]
        j += step[1]


def _next_meeting(
    held: Ids, wanted: Ids, table: Sequence[bytes]
) -> tuple[int, int] | None:
    """Lengths of the shortest beginnings with the same bytes; None if there
    are no such before a control token or the end.
    """
    sides = (held, wanted)
    read = [0, 0]
    ahead = [b"", b""]  # bytes that the other side has not matched yet
    while True:
        side = 0 if len(ahead[0]) <= len(ahead[1]) else 1
        if read[side] == len(sides[side]):
            return None
        token = sides[side][read[side]]
        piece = table[token] if token < len(table) else b""
        if not piece:
            return None
        read[side] += 1
        ahead[side] += piece
        shorter = min(map(len, ahead))
        if ahead[0][:shorter] != ahead[1][:shorter]:
            return None
        ahead = [text[shorter:] for text in ahead]
        if shorter and ahead == [b"", b""]:
            return read[0], read[1]
