"""/v1/chat/completions, /v1/completions and /v1/models, in the SDK's types."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

import gemmakv
from gemmakv.server.app import App
from gemmakv.server.service.chat import ChatService
from gemmakv.server.settings import Settings
from support.asgi import NAME, USER, get, make_app, post, sse_events
from support.extras import needs
from support.refusals import check_refusal

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

pytestmark = needs("openai")
CHAT = "/v1/chat/completions"
SAID = {"model": NAME, "messages": USER, "temperature": 1, "max_tokens": 6}


def chat(app: App, **fields: Any) -> ChatCompletion:
    from openai.types.chat import ChatCompletion

    response = post(app, CHAT, {**SAID, **fields})
    assert response.status_code == 200, response.text
    return ChatCompletion.model_validate(response.json(), strict=True)


def chunks(app: App, **fields: Any) -> list[ChatCompletionChunk]:
    from openai.types.chat import ChatCompletionChunk

    response = post(app, CHAT, {**SAID, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream"
    events = sse_events(response.text)
    assert events[-1] == ("", "[DONE]")
    return [
        ChatCompletionChunk.model_validate(data, strict=True)
        for _, data in events[:-1]
    ]


def error(app: App, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    response = post(app, path, body)
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    assert {"message", "type", "param", "code"} <= found.keys()
    return found


def test_reply_is_what_chat_gives(app: App, shared: gemmakv.Gemma) -> None:
    expected = shared.chat(USER, temperature=1, seed=5, max_tokens=6)
    found = chat(app)
    [choice] = found.choices
    assert choice.message.content == expected.text
    assert choice.finish_reason == "length"
    assert found.model == NAME and found.object == "chat.completion"
    usage = found.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens == shared.count_tokens(USER)
    assert usage.completion_tokens == 6
    assert usage.total_tokens == usage.prompt_tokens + 6


def test_stream_says_the_same(app: App) -> None:
    whole = chat(app).choices[0].message.content
    found = chunks(app)
    first, *middle, last = found
    assert first.choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in found)
    assert text == whole
    assert last.choices[0].finish_reason == "length"
    assert not last.choices[0].delta.model_dump(exclude_unset=True)
    assert all(c.choices[0].finish_reason is None for c in middle)
    assert len({c.id for c in found}) == 1
    assert all(c.usage is None for c in found)


def test_progress_of_the_prompt(app: App) -> None:
    """As llama-server says it: after the opening chunk, before any text."""
    long = [{"role": "user", "content": "many words " * 100}]
    found = chunks(app, messages=long, return_progress=True)
    told = [(c.model_extra or {}).get("prompt_progress") for c in found]
    said = [one for one in told if one is not None]
    assert said and told[1 : len(said) + 1] == said
    total = app.service.prompts.render(long).size if app.service else 0
    assert said[-1]["processed"] == said[-1]["total"] == total
    assert all(0 <= one["cache"] <= one["processed"] for one in said)
    assert chat(app, messages=long, return_progress=True)
    plain = chunks(app, messages=long, return_progress=False)
    assert not any("prompt_progress" in (c.model_extra or {}) for c in plain)
    text, same = (
        "".join(c.choices[0].delta.content or "" for c in one)
        for one in (found, plain)
    )
    assert text == same


def test_include_usage(app: App) -> None:
    found = chunks(app, stream_options={"include_usage": True})
    last = found[-1]
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == 6
    assert last.usage.prompt_tokens_details is not None
    assert all("usage" in c.model_fields_set for c in found)
    assert all(c.usage is None for c in found[:-1])


def test_cached_tokens_are_counted(app: App) -> None:
    long = [{"role": "user", "content": "a long text " * 120}]
    first = chat(app, messages=long)
    again = chat(app, messages=long)
    assert first.usage and again.usage
    details = again.usage.prompt_tokens_details
    assert details is not None and details.cached_tokens is not None
    assert 0 < details.cached_tokens < again.usage.prompt_tokens
    assert again.choices == first.choices


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(app: App, shared: gemmakv.Gemma, stream: bool) -> None:
    cache = gemmakv.create_kv_cache(shared.config)
    expected = shared.generate(
        cache,
        shared.apply_chat_template(USER),
        max_tokens=6,
        top_logprobs=3,
        seed=5,
        temperature=1,
    )  # fmt: skip
    fields = {"logprobs": True, "top_logprobs": 3}
    if stream:
        entries = [
            entry
            for c in chunks(app, **fields)
            if c.choices[0].logprobs
            for entry in c.choices[0].logprobs.content or []
        ]
    else:
        logprobs = chat(app, **fields).choices[0].logprobs
        assert logprobs is not None
        entries = logprobs.content or []
    assert expected.logprobs is not None
    assert [e.logprob for e in entries] == [float(p) for p in expected.logprobs]
    assert all(len(e.top_logprobs) == 3 for e in entries)
    text = b"".join(bytes(e.bytes or []) for e in entries)
    assert text.decode("utf-8", "replace") == expected.text
    for entry in entries:
        assert entry.top_logprobs[0].logprob >= entry.logprob
        data = bytes(entry.bytes or [])
        assert entry.token == data.decode("utf-8", "replace")
        assert all(math.isfinite(top.logprob) for top in entry.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_n_and_seed(app: App, stream: bool) -> None:
    fields = {"temperature": 1.5, "seed": 7}
    singles = [
        chat(app, **{**fields, "seed": 7 + i}).choices[0].message.content
        for i in range(3)
    ]
    assert len(set(singles)) > 1
    if stream:
        texts = ["", "", ""]
        for chunk in chunks(app, n=3, **fields):
            [choice] = chunk.choices
            texts[choice.index] += choice.delta.content or ""
    else:
        found = chat(app, n=3, **fields)
        assert [c.index for c in found.choices] == [0, 1, 2]
        texts = [c.message.content or "" for c in found.choices]
        assert found.usage and found.usage.completion_tokens == 18
    assert texts == singles


def test_stop_cuts(app: App) -> None:
    text = chat(app, max_tokens=30).choices[0].message.content
    assert text is not None
    letter = text[10]
    for stop in (letter, ["\u20ac", letter]):
        found = chat(app, max_tokens=30, stop=stop).choices[0]
        assert found.finish_reason == "stop"
        assert found.message.content == text[: text.index(letter)].rstrip()


@pytest.mark.parametrize("streamed", [False, True])
def test_stops_are_looked_for_in_what_is_said(
    shared: gemmakv.Gemma, streamed: bool
) -> None:
    """Not in the white space before it, which an answer leaves out."""
    app = make_app(shared, max_model_len=256, default_seed=5)
    assert app.service is not None
    app.service.defaults["grammar"] = 'start: " \\n Hi there"'

    def text(**fields: Any) -> str:
        body = {**SAID, "max_tokens": 60, "stream": streamed, **fields}
        found = post(app, CHAT, body)
        assert found.status_code == 200, found.text
        if not streamed:
            content: str = found.json()["choices"][0]["message"]["content"]
            return content
        return "".join(
            choice["delta"].get("content") or ""
            for _, chunk in sse_events(found.text)
            if chunk != "[DONE]"
            for choice in chunk["choices"]
        )

    assert text(stop=[" "]) == "Hi"
    assert text(stop="\n") == text() == "Hi there"
    assert text(stop=[" Hi", " there"]) == "Hi"
    # Where the client has begun the reply, white space goes on with it.
    begun = [*USER, {"role": "assistant", "content": "So"}]
    assert text(messages=begun, stop=" ") == ""


def test_logit_bias_bans_and_forces(app: App, shared: gemmakv.Gemma) -> None:
    assert shared.tokenizer is not None
    [token] = shared.tokenizer.encode("q")
    forced = chat(app, logit_bias={str(token): 100}).choices[0]
    assert forced.message.content == "qqqqqq"


@pytest.mark.parametrize("key", ["05", "x", "-1", "\u0665", ""])
def test_logit_bias_of_no_token(app: App, key: str) -> None:
    """ "05" was the token "5", and which of both counted nobody could tell."""
    body = {"model": NAME, "messages": USER, "logit_bias": {"5": 1, key: 2}}
    found = post(app, "/v1/chat/completions", body)
    check_refusal(found, "logit_bias", f"found {key!r}")


def test_pages_of_models(shared: gemmakv.Gemma) -> None:
    """The pages of Anthropic's clients: `limit` and ids meant nothing."""
    settings = Settings(("a", "b", "c"), version="1")
    app = App(settings, ChatService(shared, settings))

    def ids(query: str) -> tuple[list[str], bool]:
        head = {"anthropic-version": "2023-06-01"}
        found = get(app, f"/v1/models?{query}", **head).json()
        names = [one["id"] for one in found["data"]]
        ends = names[:1] + names[-1:] or [None, None]
        assert [found["first_id"], found["last_id"]] == ends
        return names, found["has_more"]

    assert ids("") == (["a", "b", "c"], False)
    assert ids("limit=2") == (["a", "b"], True)
    assert ids("limit=2&after_id=b") == (["c"], False)
    assert ids("limit=1&before_id=c") == (["b"], True)
    assert ids("after_id=c") == ([], False)
    assert "has_more" not in get(app, "/v1/models").json()
    for query, words in (
        ("limit=0", ["limit", "int", "found 0"]),
        ("after_id=x", ["after_id", "a or b or c", "found 'x'"]),
        ("before_id=", ["before_id", "a or b or c"]),
    ):
        check_refusal(get(app, f"/v1/models?{query}"), *words)


def test_max_completion_tokens(app: App) -> None:
    none = {"max_tokens": None}
    found = chat(app, **none, max_completion_tokens=3)
    assert found.usage and found.usage.completion_tokens == 3
    found = chat(app, **none)  # the operator's default
    assert found.usage and found.usage.completion_tokens == 8
    said = error(app, CHAT, {**SAID, **none, "max_completion_tokens": -2})
    assert said["param"] == "max_completion_tokens"
    assert "-2" in said["message"]
    said = error(app, CHAT, {**SAID, "max_completion_tokens": 7})
    assert said["param"] == "max_tokens"


def test_no_longer_than_the_context(app: App) -> None:
    long = [{"role": "user", "content": "x" * 4050}]
    found = chat(app, messages=long, max_tokens=100_000)
    assert found.usage and found.usage.total_tokens == 4096
    assert found.choices[0].finish_reason == "length"
    long = [{"role": "user", "content": "x" * 5000}]
    said = error(app, CHAT, {**SAID, "messages": long})
    assert said["code"] == "context_length_exceeded"
    assert said["param"] == "messages"
    assert said["n_ctx"] == 4096 and said["n_prompt_tokens"] > 5000


def test_roles_and_parts(app: App) -> None:
    system = chat(app, messages=[{"role": "system", "content": "S"}, *USER])
    developer = chat(
        app,
        messages=[
            {"role": "developer", "content": "S"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "hello there"}],
            },
        ],
    )
    assert developer.choices == system.choices


def test_null_is_absent_and_unknown_is_ignored(app: App) -> None:
    names = (
        "max_completion_tokens", "stop", "n", "seed", "logit_bias", "tools",
        "tool_choice", "response_format", "stream", "stream_options",
        "top_p", "presence_penalty", "logprobs", "top_logprobs", "user",
    )  # fmt: skip
    found = chat(app, **dict.fromkeys(names))
    more = {
        "user": "me", "metadata": {"a": "b"}, "store": True,
        "service_tier": "auto", "prompt_cache_key": "k", "tools": [],
        "parallel_tool_calls": True, "response_format": {"type": "text"},
        "tool_choice": "auto", "something_new": [1],
    }  # fmt: skip
    assert chat(app, **more).choices == found.choices == chat(app).choices


REFUSED: list[tuple[str, Any]] = [
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("response_format", {"type": "xml"}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "a", "format": "wav"}),
    ("web_search_options", {}),
    ("reasoning_effort", "most"),
    ("session", "s"),
    ("n", 0),
    ("n", 17),
    ("temperature", -1),
    ("temperature", "hot"),
    ("top_p", -0.1),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("seed", "x"),
    ("stop", ["a"] * 17),
    ("stop", 5),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"99999": 1}),
    ("logit_bias", [1]),
    ("top_logprobs", 3),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("messages", []),
    ("messages", "hello"),
    ("parse_special", True),
]


@pytest.mark.parametrize("name, value", REFUSED)
def test_refused_by_name(app: App, name: str, value: Any) -> None:
    said = error(app, CHAT, {**SAID, name: value})
    assert said["type"] == "invalid_request_error"
    assert said["param"] == name
    assert name in said["message"]


@pytest.mark.parametrize(
    "message, param",
    [
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "judge", "content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": 5}, "messages[0].content"),
        ({"content": "x"}, "messages[0].role"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1"}]},
            "messages[0].tool_calls[0]",
        ),
        (
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "x"}}],
            },
            "messages[0].content[0].type",
        ),
        (5, "messages[0]"),
    ],
)
def test_bad_message(app: App, message: Any, param: str) -> None:
    said = error(app, CHAT, {**SAID, "messages": [message]})
    assert said["param"] == param


def test_other_model(app: App) -> None:
    said = error(app, CHAT, {**SAID, "model": "gpt-9"}, 404)
    assert said["code"] == "model_not_found" and NAME in said["message"]


def test_models(app: App) -> None:
    from openai.types import Model

    found = get(app, "/v1/models").json()
    [entry] = found["data"]
    assert Model.model_validate(entry, strict=True).id == NAME
    assert entry["max_model_len"] == 4096
    assert get(app, f"/v1/models/{NAME}").json() == entry
    assert get(app, "/v1/models/other").status_code == 404


def complete(app: App, **fields: Any) -> Completion:
    from openai.types import Completion

    body = {"model": NAME, "prompt": "abc", "temperature": 0, **fields}
    response = post(app, "/v1/completions", body)
    assert response.status_code == 200, response.text
    return Completion.model_validate(response.json(), strict=True)


def test_completion(app: App, shared: gemmakv.Gemma) -> None:
    cache = gemmakv.create_kv_cache(shared.config)
    expected = shared.generate(cache, "abc", max_tokens=8)
    found = complete(app)
    assert found.choices[0].text == expected.text
    assert found.choices[0].finish_reason == "length"
    ids = cache.tokens[: len(cache) - 8].tolist()
    assert complete(app, prompt=ids).choices[0].text == expected.text
    echoed = complete(app, echo=True).choices[0].text
    assert echoed == "abc" + expected.text


def test_completions_of_several_prompts(app: App) -> None:
    alone = [complete(app, prompt=p).choices[0].text for p in ("abc", "xyz")]
    found = complete(app, prompt=["abc", "xyz"], n=2)
    assert [c.text for c in found.choices] == [
        alone[0], alone[0], alone[1], alone[1],
    ]  # fmt: skip
    assert [c.index for c in found.choices] == [0, 1, 2, 3]
    body = {
        "model": NAME, "prompt": ["abc", "xyz"], "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    events = sse_events(post(app, "/v1/completions", body).text)
    texts = ["", ""]
    for _, data in events[:-2]:
        [choice] = data["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == alone
    assert events[-2][1]["usage"]["completion_tokens"] == 16


def test_completion_logprobs(app: App) -> None:
    logprobs = complete(app, logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens and logprobs.text_offset and logprobs.top_logprobs
    assert len(logprobs.tokens) == 8
    assert logprobs.text_offset == [
        len("".join(logprobs.tokens[:i])) for i in range(8)
    ]
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    # None of the likeliest: the type has no list of nothings.
    for body in ({"logprobs": 0}, {"logprobs": 0, "stream": True}):
        said = {"model": NAME, "prompt": "abc", "max_tokens": 3, **body}
        text = post(app, "/v1/completions", said).text
        assert '"token_logprobs":[-' in text
        assert '"top_logprobs":null' in text
        assert "[null" not in text


@pytest.mark.parametrize(
    "name, value",
    [
        ("suffix", "x"), ("best_of", 3), ("prompt", []), ("prompt", [1, "a"]),
        ("prompt", [-1]), ("prompt", [1 << 40]), ("prompt", 3),
        ("prompt", ""), ("logprobs", True), ("logprobs", 21),
    ],
)  # fmt: skip
def test_bad_completion(app: App, name: str, value: Any) -> None:
    body = {"model": NAME, "prompt": "abc", name: value}
    if (name, value) == ("prompt", ""):
        body["max_tokens"] = 1
        assert post(app, "/v1/completions", body).status_code == 200
        return
    said = error(app, "/v1/completions", body)
    assert said["param"] in (name, "top_logprobs")
