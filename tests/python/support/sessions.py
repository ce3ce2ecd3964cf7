"""Sessions compared: with their messages, and bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gemmakv import Generation, Message, Session
from gemmakv.chat._transcript import common_exact, common_text

INF = float("inf")
# Replies of random text: control tokens would only make them short.
BANNED = {token: -INF for token in range(6)}
NO_END = {"logit_bias": BANNED, "temperature": 1.0, "logprobs": True}


def canonical(session: Session, opens_reply: bool = False) -> list[int]:
    """Tokens of the template's rendering of a session's messages."""
    talk = session._talk
    return [int(i) for i in talk._encode(talk.messages, opens_reply)]


def continued(session: Session) -> npt.NDArray[np.int32]:
    """Tokens that every way to go on from a session's messages begins with."""
    talk = session._talk
    one, other = (
        talk._encode([*talk.messages, Message("user", text)], True)
        for text in "AB"
    )
    return one[: common_exact(one, other)]


def assert_sound(session: Session) -> None:
    """The cache says nothing but what the messages say."""
    held = session.cache.tokens
    wanted = continued(session)
    tokenizer = session.gemma.tokenizer
    assert tokenizer is not None
    assert common_text(held, wanted, tokenizer)[0] == len(held)
    roles = [m.role for m in session.messages if m.role != "system"]
    assert roles == ["user", "assistant"] * session.turns


def assert_same(a: Generation, b: Generation) -> None:
    """Bit for bit."""
    assert a.token_ids == b.token_ids
    assert a.logprobs is not None and b.logprobs is not None
    assert a.logprobs.tobytes() == b.logprobs.tobytes()
    assert (a.text, a.finish_reason) == (b.text, b.finish_reason)


def state(session: Session) -> tuple[Any, ...]:
    return (
        session.messages,
        session.cache.tokens.tolist(),
        session.cache.layers[0].held_range,
        session.cache.layers[0].keys.tobytes(),
    )


def said(session: Session, *texts: str, seed: int = 0) -> Session:
    for i, text in enumerate(texts):
        session.send(text, max_tokens=12, seed=seed + i, **NO_END)
        assert_sound(session)
    return session
