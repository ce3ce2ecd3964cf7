"""Turn ends are checkpoints: going back to one computes nothing."""

from __future__ import annotations

import pytest

from gemmakv import Gemma, Session
from support import family_models, tiny_gguf
from support.sessions import NO_END, assert_same, said


@pytest.fixture(params=family_models.FAMILIES)
def model(request: pytest.FixtureRequest, tiny: Gemma) -> Gemma:
    """A model of each family, with a tokenizer."""
    return family_models.model(request.param, tokenizer=tiny.tokenizer)


def test_ways_to_the_same_turn(model: Gemma) -> None:
    session = said(Session(model, "Be kind.", template="gemma"), "the first")
    first = session.fork()
    said(session, "a second turn that leaves the window behind", "third")
    assert len(session.cache) > 4 * family_models.WINDOW
    ways = [session, session.fork()]
    ways += [Session.from_bytes(session.to_bytes(), model)]
    options = {"max_tokens": 12, "seed": 9, "logprobs": True, **NO_END}
    replies = [way.send("fourth", **options) for way in ways]
    session.undo()
    replies.append(session.send("fourth", **options))
    for reply in replies[1:]:
        assert_same(reply, replies[0])
    session.goto(1)
    assert session.messages == first.messages
    assert_same(session.send("else", **options), first.send("else", **options))


def test_undo_replays_nothing(model: Gemma) -> None:
    session = Session(model, template="gemma")
    ends = [0]
    assert model.tokenizer is not None
    # What is no text, and white space at the end, is taken off a reply.
    banned = {
        i: -float("inf")
        for i, text in enumerate(model.tokenizer.token_bytes)
        if not text.isalpha()
    }
    for i in range(4):
        session.send(
            f"the {i}", max_tokens=2 * tiny_gguf.WINDOW, logit_bias=banned
        )
        ends.append(len(session.cache))
    # A model of full layers needs none.
    marks = ends[1:] if model.config.sliding_window else []
    assert session.cache.checkpoints == marks
    for turn in (3, 1):
        session.goto(turn)
        assert len(session.cache) == ends[turn]
        assert session.cache.fork().truncate(ends[turn]).replay_tokens == 0
        assert session.cache.checkpoints == marks[:turn]


def test_a_stream_ends_with_one(tiny: Gemma) -> None:
    session = Session(tiny, template="plain")
    for piece in session.stream("the", max_tokens=20):
        del piece
    assert session.cache.checkpoints == [len(session.cache)]
