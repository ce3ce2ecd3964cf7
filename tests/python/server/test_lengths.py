"""Texts without room in the context are refused before they have tokens."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Any

import pytest

from gemmakv.server.app import App
from support.asgi import get, make_app, post
from support.kept import error

CHAT, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
LONG = "word " * 40_000  # more words than the context has tokens
UNBROKEN = "x" * 400_000
SAID = [{"role": "user", "content": LONG}]


def no_long_text(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing long is encoded."""
    assert app.service is not None
    real = app.service.tokenizer._encode_plain

    def encode(text: str) -> list[int]:
        assert len(text) < 20_000, "it is encoded"
        return real(text)

    monkeypatch.setattr(app.service.tokenizer, "_encode_plain", encode)


def check(answer: Any, param: str | None) -> None:
    assert answer.status_code == 400, answer.text
    found = answer.json()["error"]
    assert "at least " in found["message"], found
    if param is not None:
        assert found["param"] == param
        assert found["code"] == "context_length_exceeded"
        assert found["n_prompt_tokens"] >= found["n_ctx"]


@pytest.mark.parametrize("text", [LONG, UNBROKEN])
@pytest.mark.parametrize("path, field, param", [
    (CHAT, "messages", "messages"), (MESSAGES, "messages", None),
    (MESSAGES, "system", None), ("/api/chat", "messages", None),
    (RESPONSES, "input", "input"), (RESPONSES, "instructions", "input"),
    ("/v1/completions", "prompt", "prompt"), ("/api/generate", "prompt", None),
    ("/v1/cache/match", "prompt", "prompt"),
    ("/v1/cache/match", "messages", "messages"),
    ("/v1/cache/pins", "prompt", "prompt"),
    ("/v1/sessions", "system", "system"),
])  # fmt: skip
def test_each_route(
    kept: App, monkeypatch: pytest.MonkeyPatch, path: str, field: str,
    param: str | None, text: str,
) -> None:  # fmt: skip
    no_long_text(kept, monkeypatch)
    body: dict[str, Any] = {"model": "talker"}
    if path in (CHAT, MESSAGES, "/api/chat"):
        body["messages"] = [{"role": "user", "content": "x"}]
    if path == MESSAGES:
        body["max_tokens"] = 1
    if path == RESPONSES:
        body["input"] = "x"
    body[field] = text
    if field == "messages":
        body[field] = [{"role": "user", "content": text}]
    answer = post(kept, path, body)
    if path.startswith("/api/"):
        assert answer.status_code == 400
        assert "at least " in answer.json()["error"]
    else:
        check(answer, param)


@pytest.mark.parametrize("prompt", [LONG, ["x", LONG], [5, UNBROKEN]])
def test_completion(
    app: App, monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    no_long_text(app, monkeypatch)
    found = error(post(app, "/completion", {"prompt": prompt}), 400)
    assert "at least " in found["message"]
    assert found["type"] == "exceed_context_size_error"


def test_in_a_session(kept: App, monkeypatch: pytest.MonkeyPatch) -> None:
    id = post(kept, "/v1/sessions", {}).json()["id"]
    hello = [{"role": "user", "content": "hello"}]
    for said in (hello, hello):
        answer = post(kept, CHAT, {"session": id, "messages": said})
        assert answer.status_code == 200, answer.text
    no_long_text(kept, monkeypatch)
    check(post(kept, CHAT, {"session": id, "messages": SAID}), "messages")
    begun = [*hello, {"role": "assistant", "content": LONG}]
    check(post(kept, CHAT, {"session": id, "messages": begun}), "messages")
    path = f"/v1/sessions/{id}"
    assert len(get(kept, path).json()["turns"]) == 2


def test_with_truncation(kept: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out has no tokens either."""
    no_long_text(kept, monkeypatch)
    talk = [*SAID, {"role": "assistant", "content": "so"},
            {"role": "user", "content": "and now"}]  # fmt: skip
    for store in (True, False):
        body = {"input": talk, "truncation": "auto", "store": store}
        answer = post(kept, RESPONSES, body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["dropped_messages"] == 2
        body["input"] = SAID
        check(post(kept, RESPONSES, body), "input")


def test_what_fits_is_never_refused(shared: Any, monkeypatch: Any) -> None:
    """At the very last token, of text and of the longest tokens that there
    are; one more is refused.
    """
    app = make_app(shared, max_model_len=512)
    service = app.service
    assert service is not None
    table = service.tokenizer.token_bytes
    longest = max(
        (one.decode() for one in table if one.decode("utf-8", "ignore")),
        key=len,
    )
    for text in (longest, "x", "x ", " ", "\u4f60"):
        count = 0
        while len(service.tokenizer.encode(text * (count + 1))) < 511:
            count += 1
        prompt = text * count
        for more, status in (("", 200), (text * 600, 400)):
            body = {"prompt": prompt + more, "max_tokens": 1}
            answer = post(app, "/v1/completions", body)
            assert answer.status_code == status, answer.text


def test_white_space_that_a_template_leaves_out(shared: Any) -> None:
    app = make_app(shared, max_model_len=512)
    said = [{"role": "user", "content": " " * 100_000 + "x"}]
    body = {"messages": said, "max_tokens": 1}
    assert post(app, CHAT, body).status_code == 200


def test_long_texts_keep_no_others_waiting(app: App) -> None:
    """As many as there are threads kept all others for as long as they took."""
    assert app.service is not None
    threads = app.service.threads
    over = Event()

    async def main() -> int:
        long = [
            asyncio.ensure_future(
                threads.run_texts(lambda _: over.wait(100), "x" * 200_000)
            )
            for _ in range(4)
        ]
        await asyncio.sleep(0)  # they begin
        found = await asyncio.wait_for(threads.run_texts(len, "x" * 9000), 60)
        over.set()
        await asyncio.gather(*long)
        return found

    try:
        assert asyncio.run(main()) == 9000
    finally:
        over.set()


def test_counts_are_exact(kept: App) -> None:
    """What only counts says how many there are."""
    body = {"messages": SAID}
    counted = post(kept, f"{MESSAGES}/count_tokens", body).json()
    assert counted["input_tokens"] > 40_000
    found = post(kept, "/tokenize", {"content": LONG}).json()["tokens"]
    assert len(found) > 40_000


