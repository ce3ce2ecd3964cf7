"""Turn ends are checkpoints: going back to one computes nothing."""

from __future__ import annotations

import tiny_gguf
from gemmakv import Gemma, Session


def test_undo_replays_nothing(tiny: Gemma) -> None:
    session = Session(tiny, template="gemma")
    ends = [0]
    assert tiny.tokenizer is not None
    # What is no text, and white space at the end, is taken off a reply.
    banned = {
        i: -float("inf")
        for i, text in enumerate(tiny.tokenizer.token_bytes)
        if not text.isalpha()
    }
    for i in range(4):
        session.send(
            f"the {i}", max_tokens=2 * tiny_gguf.WINDOW, logit_bias=banned
        )
        ends.append(len(session.cache))
    assert session.cache.checkpoints == ends[1:]
    for turn in (3, 1):
        session.goto(turn)
        assert len(session.cache) == ends[turn]
        assert session.cache.fork().truncate(ends[turn]).replay_tokens == 0
        assert session.cache.checkpoints == ends[1 : turn + 1]


def test_a_stream_ends_with_one(tiny: Gemma) -> None:
    session = Session(tiny, template="plain")
    for piece in session.stream("the", max_tokens=20):
        del piece
    assert session.cache.checkpoints == [len(session.cache)]
