"""A stream's opening event: behind the engine's start, before all others."""

from __future__ import annotations

from typing import Any

import pytest

import gemmakv
from gemmakv.errors import CacheFullError
from gemmakv.server.app import App
from gemmakv.server.service.sink import Sink
from support.asgi import NAME, post, sse_events

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"model": NAME, "messages": MESSAGES, "max_tokens": 3, "stream": True}


def test_engine_starts_before_the_opening(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    astream, emit_opening = gemmakv.Gemma.astream, Sink.open

    async def starting(*args: Any, **options: Any) -> Any:
        order.append("engine")
        return await astream(*args, **options)

    async def opening(sink: Sink) -> None:
        order.append("opening")
        await emit_opening(sink)

    monkeypatch.setattr(gemmakv.Gemma, "astream", starting)
    monkeypatch.setattr(Sink, "open", opening)
    assert post(app, "/v1/chat/completions", CHAT).status_code == 200
    assert order == ["engine", "opening"]


@pytest.mark.parametrize("n", [1, 3])
def test_opening_comes_first(app: App, n: int) -> None:
    answer = post(app, "/v1/chat/completions", {**CHAT, "n": n})
    deltas = [
        event["choices"][0]["delta"]
        for _, event in sse_events(answer.text)
        if isinstance(event, dict)
    ]
    assert all(one.get("role") == "assistant" for one in deltas[:n])
    assert not any("role" in one for one in deltas[n:])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_error_at_start_has_a_status(
    app: App, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def full(*_: Any, **options: Any) -> Any:
        raise CacheFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(gemmakv.Gemma, "astream", full)
        answer = post(app, path, CHAT)
    assert answer.status_code in (503, 529)
    assert "no room" in answer.json()["error"]["message"]
    assert post(app, path, CHAT).status_code == 200
