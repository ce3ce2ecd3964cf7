"""`--lenient`: what is tolerated, what never is, and that answers say so."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import gemmakv
from gemmakv.server.apis.lenient import LACKING, TOLERATED
from gemmakv.server.apis.openai import JSON_OPTIONS
from gemmakv.server.app import App
from support.asgi import NAME, USER, get, post, sse_events
from support.kept import KEYS, bearer, serving

IGNORED = "x-gemmakv-ignored"
_NONE: Any = {"no": "such value"}
_BAD_SCHEMA = {"type": "object", "not": {}}
_CHAT, _RESPONSES = "/v1/chat/completions", "/v1/responses"

# Of each route a request that is served.
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": USER},
    "/api/chat": {
        "model": NAME, "messages": USER, "stream": False,
        "options": {"num_predict": 2},
    },
    "/api/generate": {
        "model": NAME, "prompt": "hello", "stream": False,
        "options": {"num_predict": 2},
    },
    "/api/show": {"model": NAME},
}  # fmt: skip


def _function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def _claude(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, **more}


_STRICT = {"parameters": _BAD_SCHEMA, "strict": True}


def _nones(*names: str) -> dict[str, dict[str, Any]]:
    return {name: {name: _NONE} for name in names}


_OPENAI: dict[str, dict[str, Any]] = {
    **_nones(*JSON_OPTIONS, "tools"),
    "model": {"model": "another"},
    "n": {"n": 0},
    "tool_choice": {"tool_choice": "nobody"},
    "session": {"session": "sess_none"},
    "conversation": {"conversation": "conv_none"},
    "previous_response_id": {"previous_response_id": "resp_none"},
}
_COMPLETIONS: dict[str, dict[str, Any]] = {
    **_OPENAI,
    **_nones(
        "reasoning_effort", "thinking", "chat_template_kwargs", "functions",
        "function_call", "modalities", "audio", "web_search_options",
    ),
    "stream_options": {"stream_options": {"include_usage": True}},
}  # fmt: skip
_TOOLS: dict[str, dict[str, Any]] = {
    "tools[]": {"tools": [_function("a"), {"type": "computer"}]},
    "tools[].function.parameters": {
        "tools": [_function("a"), _function("b", **_STRICT)],
    },
}
_COUNTED: dict[str, dict[str, Any]] = {
    **_nones(
        "thinking", "mcp_servers", "container", "session", "tools",
        "tool_choice", "output_format",
    ),
    "model": {"model": "another"},
    "context_management": {"context_management": {"edits": 5}},
    "output_config": {"output_config": 5},
    "output_config.*": {"output_config": {"effort": "none at all"}},
    "tools[]": {"tools": [_claude("a"), {"type": "bash", "name": "b"}]},
}  # fmt: skip
_OLLAMA: dict[str, dict[str, Any]] = {
    **_nones("think", "logprobs", "top_logprobs"),
    "model": {"model": "another"},
    "options": {"options": 5},
    "options.*": {"options": {"mirostat": 2, "num_predict": 2}},
    "format": {"format": "yaml"},
}
# A request with a field that is refused, by route and by what is tolerated.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {
        **_COMPLETIONS,
        **_TOOLS,
        **_nones("parallel_tool_calls"),
        "max_completion_tokens": {
            "max_completion_tokens": -2, "max_tokens": None,
        },
    },
    "/v1/completions": {
        **_COMPLETIONS,
        "suffix": {"suffix": "after"},
        "best_of": {"best_of": 3},
    },
    "/v1/responses": {
        **{k: v for k, v in _OPENAI.items() if k != "logprobs"},
        **_nones(
            "parallel_tool_calls", "include", "prompt", "user",
            "prompt_cache_key", "background", "truncation",
            "context_management",
        ),
        "max_tokens": {"max_tokens": -2, "max_output_tokens": None},
        "max_output_tokens": {"max_output_tokens": -2},
        "metadata": {"metadata": 5},
        "reasoning": {"reasoning": {"effort": "none at all"}},
        "text": {"text": "plain"},
        "text.format": {"text": {"format": _NONE}},
        "tools[]": {
            "tools": [{"type": "function", "name": "a"},
                      {"type": "function", "name": "not a name"}],
        },
        "tools[].parameters": {
            "tools": [{"type": "web_search"},
                      {"type": "function", "name": "b", **_STRICT}],
        },
    },
    "/v1/messages": {
        "diagnostics": {"diagnostics": 5},
        **_COUNTED,
        **_nones(
            "stop_sequences", "temperature", "top_p", "top_k", "deadline",
        ),
        "tools[].input_schema": {
            "tools": [_claude("a"), _claude("b", input_schema=_BAD_SCHEMA,
                                            strict=True)],
        },
    },
    "/v1/messages/count_tokens": _COUNTED,
    "/api/chat": {
        **_OLLAMA,
        **_TOOLS,
        "session": {"session": "sess_none"},
        "tools": {"tools": 5},
    },
    "/v1/responses/input_tokens": {
        **{k: v for k, v in _OPENAI.items()
           if k in ("model", "tools", "tool_choice", "session", "conversation",
                    "previous_response_id")},
        **_nones("truncation"),
        "reasoning": {"reasoning": {"effort": "none at all"}},
        "text": {"text": "plain"},
        "text.format": {"text": {"format": {"type": "xml"}}},
        "tools[]": {
            "tools": [{"type": "function", "name": "a"},
                      {"type": "function", "name": "not a name"}],
        },
        "tools[].parameters": {
            "tools": [{"type": "function", "name": "b",
                       "parameters": {"type": "array"}}],
        },
    },
    "/api/generate": {**_OLLAMA, **_nones("suffix", "template", "context")},
    "/api/show": {"model": {"model": "another"}},
}  # fmt: skip
_PAIRS = [(route, field) for route, fields in CASES.items() for field in fields]


@pytest.fixture(scope="module")
def lenient(
    shared: gemmakv.Gemma, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[App]:
    folder: Path = tmp_path_factory.mktemp("lenient")
    yield from serving(shared, folder, lenient=True)


@pytest.fixture(scope="module")
def strict(
    shared: gemmakv.Gemma, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[App]:
    yield from serving(shared, tmp_path_factory.mktemp("strict"))


def _named(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return response.headers[IGNORED].split(", ")


def _rule(field: str) -> str:
    """As the lists have it."""
    return field.replace("[0]", "[]").replace("[1]", "[]")


def test_each_tolerated_field_has_a_case() -> None:
    listed = {route: set(fields) for route, fields in TOLERATED.items()}
    assert listed.pop("/v1/models/{model:path}") == {"model"}
    items = listed.pop("/v1/responses/{response}/input_items")
    assert items == {"after", "limit", "order"}
    again = listed.pop("/v1/responses/{response}")
    assert again == {"stream", "starting_after"}
    assert listed.pop("/v1/models") == {"limit", "after_id", "before_id"}
    assert {route: set(fields) for route, fields in CASES.items()} == listed


@pytest.mark.parametrize(("route", "field"), _PAIRS)
def test_what_is_refused_is_left_out_and_named(
    lenient: App, strict: App, route: str, field: str
) -> None:
    body = {**BASES[route], **CASES[route][field]}
    refused = post(strict, route, body)
    assert refused.status_code in (400, 404), refused.text
    [found] = _named(post(lenient, route, body))
    rule = _rule(found)
    if field.endswith(".*"):
        assert rule.rpartition(".")[0] == field.removesuffix(".*")
    else:
        assert rule == field
    # What is told of it names it, too.
    assert found.split(".")[-1].split("[")[0] in refused.text


@pytest.mark.parametrize("query", ["after=x", "limit=0", "order=up"])
def test_what_is_refused_of_a_query(lenient: App, query: str) -> None:
    made = post(lenient, _RESPONSES, BASES[_RESPONSES]).json()["id"]
    path = f"{_RESPONSES}/{made}/input_items"
    found = get(lenient, f"{path}?{query}")
    assert _named(found) == [query.partition("=")[0]]
    assert found.json() == get(lenient, path).json()


@pytest.mark.parametrize(
    "query",
    ["starting_after=1", "starting_after=-1&stream=false", "stream=2",
     "stream=false&stream=false"],
)  # fmt: skip
def test_what_is_refused_of_a_response(
    lenient: App, strict: App, query: str
) -> None:
    made = post(lenient, _RESPONSES, BASES[_RESPONSES]).json()["id"]
    path = f"{_RESPONSES}/{made}"
    found = get(lenient, f"{path}?{query}")
    assert _named(found) == [query.partition("=")[0]]
    assert found.json() == get(lenient, path).json()


@pytest.mark.parametrize("query", ["limit=0", "after_id=x", "before_id=x"])
def test_what_is_refused_of_models(
    lenient: App, strict: App, query: str
) -> None:
    assert get(strict, f"/v1/models?{query}").status_code == 400
    found = get(lenient, f"/v1/models?{query}")
    assert _named(found) == [query.partition("=")[0]]
    assert found.json() == get(strict, "/v1/models").json()


def test_what_is_good_is_as_without_it(lenient: App, strict: App) -> None:
    body = {**BASES[_CHAT], "max_tokens": 8}
    plain = post(strict, _CHAT, body)
    same = post(lenient, _CHAT, body)
    assert IGNORED not in same.headers
    assert same.json()["choices"] == plain.json()["choices"]
    # What was left out changes nothing else.
    odd = post(lenient, _CHAT, {**body, "audio": {"voice": "x"}, "top_p": 7})
    assert _named(odd) == ["audio", "top_p"]
    assert odd.json()["choices"] == plain.json()["choices"]


def test_a_stream_names_what_was_left_out(lenient: App) -> None:
    body = {**BASES[_CHAT], "stream": True, "model": "gpt-5", "n": 0}
    response = post(lenient, _CHAT, body)
    assert _named(response) == ["model", "n"]
    events = sse_events(response.text)
    assert events[-1][1] == "[DONE]"
    assert events[0][1]["model"] == NAME


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\r\nset-cookie: b", "a%0D%0Aset-cookie%3A%20b"),
        ("\U0001f999", "%F0%9F%A6%99"), ("a, b", "a%2C%20b"), ("\0", "%00"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_name_is_no_header_of_its_own(
    lenient: App,
    caplog: pytest.LogCaptureFixture,
    name: str,
    shown: str,
    stream: bool,
) -> None:
    body = {**BASES["/v1/messages"], "output_config": {name: 1}}
    with caplog.at_level(logging.INFO, "gemmakv.server"):
        found = post(lenient, "/v1/messages", {**body, "stream": stream})
    assert found.status_code == 200
    assert found.headers[IGNORED] == f"output_config.{shown}"
    said = caplog.records[-1].getMessage()
    assert said.endswith(f"ignored output_config.{shown}")


def test_places_of_a_list_are_named_as_they_were_sent(lenient: App) -> None:
    tools = [
        {"type": "one"},
        _function("a"),
        {"type": "two"},
        {"type": "three"},
        _function("b", **_STRICT),
    ]
    response = post(lenient, _CHAT, {**BASES[_CHAT], "tools": tools})
    assert _named(response) == [
        "tools[0]", "tools[2]", "tools[3]", "tools[4].function.parameters",
    ]  # fmt: skip
    choice = {"tool_choice": "required", "parallel_tool_calls": False}
    body = {
        **BASES[_CHAT], **choice, "tools": tools[:1], "max_tokens": 2,
    }  # fmt: skip
    assert _named(post(lenient, _CHAT, body)) == ["tools[0]", "tool_choice"]


def test_a_response_of_nothing_is_one_of_an_empty_input(
    lenient: App, strict: App
) -> None:
    assert LACKING == {_RESPONSES: {"input": ""}}
    refused = post(strict, _RESPONSES, {})
    assert refused.status_code == 400
    assert _named(post(lenient, _RESPONSES, {"max_output_tokens": 1})) == [
        "input"
    ]
    for bad in (5, []):  # it is what is said
        refused = post(lenient, _RESPONSES, {"input": bad})
        assert refused.status_code == 400
        assert IGNORED not in refused.headers


def test_the_model_of_any_name_is_the_one(lenient: App, strict: App) -> None:
    assert get(strict, "/v1/models/gpt-5").status_code == 404
    found = get(lenient, "/v1/models/gpt-5")
    assert _named(found) == ["model"]
    assert found.json()["id"] == NAME


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (_CHAT, {"messages": []}),
        (_CHAT, {"messages": [{"role": "nobody", "content": "x"}]}),
        (_CHAT, {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": "x"}}]}]}),
        (_CHAT, {"messages": [{"role": "user", "content": "hi " * 5000}]}),
        ("/v1/completions", {"prompt": [1, "x"]}),
        (_RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [
            {"role": "assistant", "content": "I"}]}),
        ("/v1/messages", {"messages": USER}),
        ("/api/chat", {"messages": [
            {"role": "user", "content": "x", "images": ["x"]}]}),
        ("/api/generate", {"prompt": "x", "images": ["x"]}),
        ("/v1/embeddings", {"input": "x"}),
        (_CHAT, b"{"),
        (_CHAT, b"{}"),
    ],
)  # fmt: skip
def test_what_is_said_is_never_left_out(
    lenient: App, route: str, body: Any
) -> None:
    response = post(lenient, route, body)
    assert response.status_code in (400, 404), response.text


def test_kept_things_that_are_not_there_stay_that(lenient: App) -> None:
    for path in ("/v1/responses/resp_none", "/v1/sessions/sess_none"):
        assert get(lenient, path).status_code == 404


def test_keys_are_asked_for_all_the_same(
    shared: gemmakv.Gemma, tmp_path: Path
) -> None:
    app = next(serving(shared, tmp_path, lenient=True, api_keys=KEYS))
    body = {**BASES[_CHAT], "model": "another"}
    assert post(app, _CHAT, body).status_code == 401
    assert _named(post(app, _CHAT, body, **bearer(KEYS[0]))) == ["model"]


def test_a_request_can_only_lose_so_much(lenient: App) -> None:
    tools = [{"type": "computer"}] * 64
    body = {**BASES[_CHAT], "tools": tools}
    assert len(_named(post(lenient, _CHAT, body))) == 64
    body["tools"] = [*tools, *tools[:1]]
    refused = post(lenient, _CHAT, body)
    assert refused.status_code == 400


def test_the_log_names_it(
    lenient: App, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "gemmakv.server"):
        post(lenient, _CHAT, {**BASES[_CHAT], "model": "x", "audio": {"a": 1}})
        post(lenient, _CHAT, BASES[_CHAT])
    first, second = caplog.records[-2:]
    assert first.getMessage().endswith("ignored model, audio")
    assert "ignored" not in second.getMessage()


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (_RESPONSES, {"conversation": "none"}, "conversation"),
        (_RESPONSES, {"session": "none"}, "session"),
        (_RESPONSES, {"max_tokens": -2, "max_output_tokens": None},
         "max_tokens"),
        (_CHAT, {"tools": [_function("a"), _function("b", **_STRICT)],
                 "tool_choice": "b"}, "tools[1].function.parameters.not"),
    ],
)  # fmt: skip
def test_errors_name_the_field_that_was_sent(
    strict: App, route: str, body: dict[str, Any], param: str
) -> None:
    error = post(strict, route, {**BASES[route], **body}).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


def test_a_bad_schema_of_a_tool_is_told_without_the_grammar(
    strict: App,
) -> None:
    tools = [_function("a"), _function("b", **_STRICT)]
    error = post(strict, _CHAT, {**BASES[_CHAT], "tools": tools}).json()
    message = error["error"]["message"]
    assert message.startswith("tools[1].function.parameters.not: ")
    assert "start" not in message and "line" not in message
    claude = [_claude("a"), _claude("b", input_schema=_BAD_SCHEMA, strict=True)]
    body = {**BASES["/v1/messages"], "tools": claude}
    error = post(strict, "/v1/messages", body).json()["error"]
    assert error["message"].startswith("tools[1].input_schema.not: ")


def test_a_format_is_named_as_it_was_sent(strict: App) -> None:
    bad = {"type": "json_schema", "schema": {"not": {}}}
    for body, name in (
        ({"output_format": bad}, "output_format"),
        ({"output_config": {"format": bad}}, "output_config.format"),
    ):
        sent = {**BASES["/v1/messages"], **body}
        error = post(strict, "/v1/messages", sent).json()["error"]
        assert error["message"].startswith(f"{name}.schema.not: ")


def test_a_session_takes_one_turn_of_several_tries(lenient: App) -> None:
    session = post(lenient, "/v1/sessions", {"name": "trip"}).json()["id"]
    tools = [_function("a"), _function("b", **_STRICT)]
    body = {**BASES[_CHAT], "session": session, "tools": tools, "n": 0}
    for turns in (1, 2):
        response = post(lenient, _CHAT, body)
        assert _named(response) == ["n", "tools[1].function.parameters"]
        found = get(lenient, f"/v1/sessions/{session}").json()
        assert len(found["turns"]) == turns
