"""What is said of a field that is not as its type has it."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import Field, ValidationError

from gemmakv.server.apis.fields import Body, Query, Whole, invalid_field
from gemmakv.server.app import App
from gemmakv.server.service.errors import RequestError
from support.asgi import NAME, USER, post
from support.refusals import check_refusal


class Inner(Body):
    mode: Literal["a", "b"] = "a"


class Shape(Body):
    order: Literal["asc", "desc"] | None = None
    salt: str = Field("x", min_length=1, max_length=4)
    limit: Whole = Field(20, ge=1, le=100)
    seed: Whole = 0
    inner: list[Inner] = []
    some: str | list[Whole] = ""


class Asked(Query):
    limit: int = Field(20, ge=1, le=100)


def refused(shape: type[Body | Query], document: Any) -> RequestError:
    """The error of a request whose body, or query, is that."""
    with pytest.raises(ValidationError) as caught:
        shape.model_validate(document)
    errors = [
        {**one, "loc": ("body", *one["loc"])} for one in caught.value.errors()
    ]
    return invalid_field(errors, document)


@pytest.mark.parametrize("document, param, expected, found", [
    ({"order": "up"}, "order", ["asc", "desc"], "'up'"),
    ({"inner": [{}, {"mode": "c"}]}, "inner[1].mode", ["a", "b"], "'c'"),
    ({"salt": "x" * 5}, "salt", ["4"], "5"),
    ({"salt": ""}, "salt", ["1"], "0"),
    ({"limit": 0}, "limit", ["int", "1"], "0"),
    ({"limit": 101}, "limit", ["int", "100"], "101"),
    ({"limit": "x"}, "limit", ["int"], "'x'"),
    ({"seed": 1.5}, "seed", ["int"], "1.5"),
    ({"some": 5}, "some", ["a text or a list"], "5"),
    ({"some": [1, 2.5]}, "some[1]", ["an integer"], "2.5"),
    ({"seed": "5"}, "seed", ["an integer"], "'5'"),
    ({"inner": 5}, "inner", ["a list"], "5"),
    ({"seed": None}, "seed", ["an integer"], "null"),
])  # fmt: skip
def test_says_what_was_expected_and_what_found(
    document: dict[str, Any], param: str, expected: list[str], found: str
) -> None:
    check(refused(Shape, document), param, expected, found)


def check(
    error: RequestError, param: str, expected: list[str], found: str
) -> None:
    assert error.param == param
    before, _, after = str(error).partition("found")
    assert all(one in before for one in expected), error
    assert found in after, error


def test_of_a_query() -> None:
    error = refused(Asked, {"limit": "101"})
    check(error, "limit", ["int", "100"], "101")


_CHAT, _MESSAGES = "/v1/chat/completions", "/v1/messages"
_SAID: dict[str, Any] = {"messages": USER, "model": NAME, "max_tokens": 2}


def _block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


def _called(id: Any) -> list[dict[str, Any]]:
    """A conversation with a call and its result."""
    call = {"id": id, "function": {"name": "f", "arguments": {}}}
    return [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "a"},
    ]


@pytest.mark.parametrize(
    "path, fields, name, found",
    [
        ("/api/chat", {"format": "xml"}, "format", "'xml'"),
        ("/api/chat", {"format": 5}, "format", "5"),
        ("/api/chat", {"think": "much"}, "think", "'much'"),
        ("/api/chat", {"think": 7}, "think", "7"),
        ("/api/chat", {"top_logprobs": 2}, "top_logprobs", "none"),
        ("/api/show", {"model": ""}, "model", "''"),
        ("/api/show", {"model": None}, "model", "none"),
        (_CHAT, {"thinking": {"type": "much"}}, "thinking.type", "'much'"),
        (_CHAT, {"thinking": 5}, "thinking.type", "none"),
        (_CHAT, {"chat_template_kwargs": 5}, "chat_template_kwargs", "5"),
        (_CHAT, {"stream_options": {}}, "stream_options", "none"),
        (_CHAT, {"top_logprobs": 2}, "top_logprobs", "none"),
        ("/v1/completions", {"prompt": [1, "x"]}, "prompt", "[1, 'x']"),
        ("/v1/completions", {"prompt": {}}, "prompt", "{}"),
        ("/completion", {"prompt": 5}, "prompt", "5"),
        ("/completion", {"prompt": "x", "logit_bias": True}, "logit_bias",
         "True"),
        ("/completion", {"prompt": "x", "logit_bias": [[5, "x"]]},
         "logit_bias", "[5, 'x']"),
        (_MESSAGES, {"thinking": {"type": "much"}}, "thinking.type", "'much'"),
        (_MESSAGES, {"context_management": {"edits": 5}},
         "context_management.edits", "5"),
        (_MESSAGES, _block(type="text", text=5), "messages[0].content[0].text",
         "5"),
        (_MESSAGES, {"messages": [{"role": "user", "content": 5}]},
         "messages[0].content", "5"),
        (_MESSAGES, {"tool_choice": {"type": {}}}, "tool_choice.type", "{}"),
        (_MESSAGES + "/count_tokens", {"tool_choice": {"type": []}},
         "tool_choice.type", "[]"),
        (_MESSAGES, _block(type="tool_result", tool_use_id=[]),
         "messages[0].content[0].tool_use_id", "[]"),
        (_MESSAGES, {"messages": [
            *USER, {"role": "assistant", "content": [
                {"type": "tool_use", "name": "f", "id": {}}]}, *USER]},
         "messages[1].content[0].id", "{}"),
        (_CHAT, {"response_format": {"type": []}}, "response_format",
         "{'type': []}"),
        (_CHAT, {"messages": _called({})}, "messages[1].tool_calls[0].id",
         "{}"),
        (_CHAT, {"messages": _called([5])}, "messages[1].tool_calls[0].id",
         "[5]"),
        ("/api/chat", {"messages": _called({})},
         "messages[1].tool_calls[0].id", "{}"),
        ("/v1/cache/match", {"messages": _called({})},
         "messages[1].tool_calls[0].id", "{}"),
        ("/completion", {"prompt": [5, 10**38]}, "prompt", str(10**38)),
        ("/v1/completions", {"prompt": [-(10**38), 5]}, "prompt",
         str(-(10**38))),
        ("/v1/responses", {"input": "x", "text": {"format": "xml"}},
         "text.format", "'xml'"),
        ("/v1/responses",
         {"input": [{"type": "message", "role": "user", "content": 5}]},
         "input[0].content", "5"),
        ("/v1/responses", {"input": "x", "conversation": {"id": 5}},
         "conversation", "{'id': 5}"),
    ],
)  # fmt: skip
def test_each_api_says_what_it_found(
    app: App, path: str, fields: dict[str, Any], name: str, found: str
) -> None:
    """Some of these said what was expected alone."""
    body = {**_SAID, **fields}
    if path == "/v1/responses":
        body = fields
    answer = post(app, path, body)
    message = check_refusal(answer, name, "expected")
    assert found in message.partition("found")[2], message
