"""Session files of earlier versions open for ever, and go on as they did: from
their keys and values, or from their text where these have other bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemmakv import Gemma, Message, MismatchError, Session


def role(name: str) -> str:
    """Format 1 calls the assistant "model"."""
    return "assistant" if name == "model" else name


def parts(message: Message) -> tuple[str, object, bool]:
    return role(message.role), message.content, message.incomplete


@pytest.mark.parametrize("version", [1, 2])
def test_a_session_file(
    tiny: Gemma, golden: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = json.loads(
        (golden / f"session_v{version}.json").read_text("utf-8")
    )
    path = golden / f"session_v{version}.gkv"
    with pytest.raises(MismatchError, match="another version of gemmakv"):
        Session.load(path, tiny)
    with monkeypatch.context() as patch:
        patch.setattr(Gemma, "fingerprint", Gemma.weights_fingerprint)
        session = Session.load(path, tiny)
    assert [parts(m) for m in session.messages] == [
        (role(name), content, incomplete)
        for name, content, incomplete in stored["messages"]
    ]
    for name in ("system", "overflow"):
        assert getattr(session, name) == stored[name]
    assert session.template.name == stored["template"]
    assert session.options == {
        "top_k": 40,
        "seed": 2**64 - 1,
        "stop": ["xyz"],
        "logit_bias": {3: -float("inf"), 20: 0.1},
    }
    assert session.cache.tokens.tolist() == stored["tokens"]
    assert session.cache.capacity_tokens == stored["capacity_tokens"]
    assert session.cache.kv_dtype == stored["kv_dtype"]
    saved = session.stats.saved_prefill_tokens
    assert saved == stored["saved_prefill_tokens"]
    if version > 1:
        assert session.cache.checkpoints == stored["checkpoints"]
        assert session._talk.ends == stored["ends"]
    session = Session.load(path, tiny, rebuild=True)
    following = stored["next"]
    reply = session.send(
        following["text"], max_tokens=following["max_tokens"]
    )
    assert reply.token_ids == following["token_ids"]
    session.undo(session.turns)


def test_an_empty_one(tiny: Gemma, golden: Path) -> None:
    session = Session.load(golden / "session_v1_empty.gkv", tiny)
    assert session.messages == [] and session.cache.capacity_tokens == 100
    assert session.send("one", max_tokens=2).token_ids
