"""Tokens that go on from a reply, for conversations kept as tokens.

What was said stays as it is, token for token: only the end of the last reply's
turn, the new messages and the opening of the next reply are rendered.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

import numpy as np

from gemmakv.chat._messages import Message, Segment, Template, Tools
from gemmakv.chat._templates import render
from gemmakv.chat._transcript import Encoder, Ids
from gemmakv.chat._turns import place_error
from gemmakv.tokenizers._tokenizer import Tokenizer

_ASKED = Message("user", "A")  # the turn before a reply, whatever it was


def kept_reply(
    token_ids: Sequence[int], text: str, tokenizer: Tokenizer
) -> Ids:
    """Gives the tokens of a reply up to the end of its text.

    What is left off is white space, the token that ended it and its stop
    string. If the text ends within a token, that token's part is encoded.
    """
    target = text.rstrip()
    table = tokenizer.token_bytes
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    kept = length = done = 0  # `kept` tokens are the first `length` characters
    for i, token in enumerate([*token_ids, -1]):
        if length == len(target):
            break
        data = table[token] if 0 <= token < len(table) else b""
        # A control token or the end may cut a character short.
        cut = decoder.getstate()[0] and not data
        piece = decoder.decode(data, bool(cut))
        if not target.startswith(piece, done):
            break
        done += len(piece)
        if cut and done == len(target):
            kept, length = i, done
        elif token >= 0 and not decoder.getstate()[0]:
            kept, length = i + 1, done
    rest = target[length:]
    ids = [*token_ids[:kept], *(tokenizer.encode(rest) if rest else ())]
    return np.array(ids, np.int32)


def continuation(
    template: Template,
    tokenizer: Tokenizer,
    reply: Message,
    messages: Sequence[Message],
    tools: Tools | None = None,
    check: Callable[[Sequence[Segment]], None] | None = None,
) -> Ids | None:
    """Gives what follows the last token of `reply` when `messages` come;
    `check` is called with it before it has tokens.

    None if the template says the reply otherwise once they have come, or
    cannot say this much by itself: the conversation then has to be rendered
    as a whole.
    """

    def said(more: Sequence[Message], opens: bool) -> list[Segment]:
        return render(
            template,
            [_ASKED, *more],
            tools=tools,
            add_generation_prompt=opens,
        )

    try:
        before = said([reply], False)
        after = said([reply, *messages], True)
        one, other = (said([Message("assistant", c)], False) for c in "AB")
    except ValueError:
        return None
    if not _begins(after, before):
        return None
    end = _length(before) - _common_end(one, other)
    more = _from(after, end)
    if check is not None:
        check(more)
    return Encoder(tokenizer, -1).encode(more)


def moved(error: ValueError, by: int) -> ValueError:
    """Makes an error about messages that stand `by` places further on."""
    return place_error(error, lambda i: max(i + by, 0))


def _size(segment: Segment) -> int:
    """Counts characters; a control token is one."""
    return 1 if segment.special else len(segment.text)


def _length(segments: Sequence[Segment]) -> int:
    return sum(map(_size, segments))


def _begins(whole: Sequence[Segment], beginning: Sequence[Segment]) -> bool:
    if len(whole) < len(beginning):
        return False
    *same, last = beginning
    found = whole[len(same)]
    return list(whole[: len(same)]) == same and (
        found == last
        or not (found.special or last.special)
        and found.text.startswith(last.text)
    )


def _common_end(one: Sequence[Segment], other: Sequence[Segment]) -> int:
    """Counts the characters that both end with."""
    length = 0
    for a, b in zip(reversed(one), reversed(other)):
        if a == b:
            length += _size(a)
            continue
        if not (a.special or b.special):
            length += _common_suffix(a.text, b.text)
        break
    return length


def _common_suffix(a: str, b: str) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[-1 - count] == b[-1 - count]:
        count += 1
    return count


def _from(segments: Sequence[Segment], start: int) -> list[Segment]:
    """Gives the segments without the first `start` characters."""
    found: list[Segment] = []
    for segment in segments:
        size = _size(segment)
        if start >= size:
            start -= size
        elif start:
            found.append(Segment(segment.text[start:]))
            start = 0
        else:
            found.append(segment)
    return found
