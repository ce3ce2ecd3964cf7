"""The beginning of a reply, written by the client, in every API that has
messages: the answer goes on from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv.server.app import App
from support.asgi import NAME, USER, get, post, sse_events
from support.kept import error, history, prompts_of, serving

BEGUN = {"role": "assistant", "content": "the in"}
TALK = [*USER, BEGUN]
PATHS = ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses")


def body_of(path: str, said: Any, **more: Any) -> dict[str, Any]:
    found = {"model": NAME, "messages": said, "max_tokens": 6, **more}
    if path == "/api/chat":
        found |= {"stream": False, "options": {"num_predict": 6}}
    if path == "/v1/responses":
        found["max_output_tokens"] = found.pop("max_tokens")
        found["input"] = found.pop("messages")
    return found


def text_of(path: str, found: dict[str, Any]) -> str:
    if path == "/v1/chat/completions":
        return str(found["choices"][0]["message"]["content"])
    if path == "/v1/messages":
        return str(found["content"][0]["text"])
    if path == "/api/chat":
        return str(found["message"]["content"])
    return str(found["output"][-1]["content"][0]["text"])


@pytest.mark.parametrize("path", PATHS)
def test_it_is_read_as_the_reply_so_far(
    app: App, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once some APIs took it for a turn that was over, and one refused it."""
    prompts = prompts_of(app, monkeypatch)
    text = text_of(path, post(app, path, body_of(path, TALK)).json())
    assert text and not text.startswith("the in")
    service = app.service
    assert service is not None
    opened = service.prompts.render(USER).tolist()
    begun = service.prompts.begun_ids("the in").tolist()
    assert prompts == [[*opened, *begun]]


@pytest.mark.parametrize("path", PATHS[:3])
def test_all_apis_say_the_same(app: App, path: str) -> None:
    asked = body_of(PATHS[0], TALK, temperature=0)
    expected = text_of(PATHS[0], post(app, PATHS[0], asked).json())
    body = body_of(path, TALK)
    (body["options"] if path == "/api/chat" else body)["temperature"] = 0
    assert text_of(path, post(app, path, body).json()) == expected


def test_white_space_between_the_two_is_kept(app: App) -> None:
    """Of a reply of its own it is left out."""
    service = app.service
    assert service is not None
    service.defaults["grammar"] = 'start: "  yes"'
    body = body_of(PATHS[0], TALK, max_tokens=20)
    found = post(app, PATHS[0], body).json()
    assert text_of(PATHS[0], found) == "  yes"
    whole = post(app, PATHS[0], {**body, "messages": USER})
    assert text_of(PATHS[0], whole.json()) == "yes"


def test_parts_are_one_text(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(app, monkeypatch)
    parts = [{"type": "text", "text": text} for text in ("the", " in")]
    said = [*USER, {"role": "assistant", "content": parts}]
    for path in PATHS[:2]:
        answer = post(app, path, body_of(path, said))
        assert answer.status_code == 200, answer.text
    post(app, PATHS[0], body_of(PATHS[0], TALK))
    assert prompts[0] == prompts[1] == prompts[2]


def test_streamed_as_whole(app: App) -> None:
    body = body_of(PATHS[0], TALK)
    whole = text_of(PATHS[0], post(app, PATHS[0], body).json())
    events = sse_events(post(app, PATHS[0], {**body, "stream": True}).text)
    said = "".join(
        data["choices"][0]["delta"].get("content") or ""
        for _, data in events
        if data != "[DONE]"
    )
    assert said == whole


@pytest.mark.parametrize("fields, param", [
    ({"messages": [BEGUN]}, "messages"),
    ({"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "a", "type": "function",
         "function": {"name": "f", "arguments": "{}"}}]}]},
     "messages[1].tool_calls"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [*USER, {**BEGUN, "reasoning_content": "x"}]},
     "messages[1].reasoning"),
])  # fmt: skip
def test_what_does_not_go_with_it(
    app: App, fields: dict[str, Any], param: str
) -> None:
    found = error(post(app, PATHS[0], body_of(PATHS[0], TALK, **fields)), 400)
    assert found["param"] == param and param in found["message"], found


def test_a_session_keeps_the_whole_reply(kept: App) -> None:
    id = post(kept, "/v1/sessions", {"name": "x"}).json()["id"]
    body = body_of(PATHS[0], TALK, session=id)
    rest = text_of(PATHS[0], post(kept, PATHS[0], body).json())
    [turn] = get(kept, f"/v1/sessions/{id}").json()["turns"]
    assert turn["messages"] == USER
    assert turn["reply"]["content"] == "the in" + rest
    more = post(kept, PATHS[0], body_of(PATHS[0], USER, session=id)).json()
    assert more["usage"]["prompt_tokens"] > turn["usage"]["prompt_tokens"]
    again = body_of(PATHS[0], [*USER, turn["reply"], *USER])
    resent = post(kept, PATHS[0], again).json()
    assert text_of(PATHS[0], resent)


def test_a_session_goes_on_with_the_tokens_of_both(
    shared: gemmakv.Gemma, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for app in serving(shared, folder):
        id = post(app, "/v1/sessions", {"name": "x"}).json()["id"]
        post(app, PATHS[0], body_of(PATHS[0], TALK, session=id))
        [turn] = get(app, f"/v1/sessions/{id}").json()["turns"]
        prompts = prompts_of(app, monkeypatch)
        post(app, PATHS[0], body_of(PATHS[0], TALK, session=id))
        store = history(app).store
        before = store.turns.line("", turn["id"])[-1].tokens.tolist()
        assert app.service is not None
        begun = app.service.prompts.begun_ids("the in").tolist()
        assert begun
        assert prompts[0][: len(before)] == before
        assert prompts[0][-len(begun) :] == begun


def test_a_kept_response_is_what_was_answered(kept: App) -> None:
    path = "/v1/responses"
    made = post(kept, path, body_of(path, TALK)).json()
    again = get(kept, f"{path}/{made['id']}").json()
    assert text_of(path, again) == text_of(path, made)
    streamed = get(kept, f"{path}/{made['id']}?stream=true").text
    last = sse_events(streamed)[-1][1]["response"]
    assert text_of(path, last) == text_of(path, made)
    items = get(kept, f"{path}/{made['id']}/input_items?order=asc").json()
    assert [one["role"] for one in items["data"]] == ["user", "assistant"]
    assert items["data"][1]["content"][0]["text"] == "the in"


def test_the_template_is_applied_likewise(app: App) -> None:
    found = post(app, "/apply-template", {"messages": TALK}).json()["prompt"]
    opened = post(app, "/apply-template", {"messages": USER}).json()["prompt"]
    service = app.service
    assert service is not None
    assert found == opened + service.prompts.begun_text("the in")
    body = {"prompt": found, "n_predict": 1}
    count = post(app, "/completion", body).json()["tokens_evaluated"]
    assert count == len(service.prompts.render(TALK))
