"""Schemas of tools as clients send them: what a grammar cannot hold to is left
out of a tool that is not strict and named in a header; of a strict one it is
refused by its path. And what holds a reply to calls and schemas.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from typing import Any

import httpx
import pytest

import gemmakv
from gemmakv.server.app import App
from support import tiny_gguf
from support.asgi import NAME, USER, make_app, post, sse_events
from support.extras import needs
from support.kept import prompts_of

pytestmark = needs("llguidance", "jsonschema")
CHAT, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/api/chat"
RESPONSES, COUNT = "/v1/responses", f"{MESSAGES}/count_tokens"
HEADER = "x-gemmakv-not-enforced"
PIECES = tiny_gguf.vocabulary()[0]
CLOSING = {PIECES.index(c): 6.0 for c in '"}'}
ENDING = {**CLOSING, tiny_gguf.EOT: 40.0}
GOING_ON = {**CLOSING, PIECES.index("\n"): 40.0}  # stands between two calls
ENDLESS = "^(a?){300}a{300}$"  # more states than there is room for
LATE = "^.{9}(a?){300}a{300}$"  # likewise, after some letters


@pytest.fixture
def app(shared: gemmakv.Gemma) -> App:
    return _app(shared, CLOSING)


def _app(gemma: gemmakv.Gemma, bias: dict[int, float]) -> App:
    app = make_app(gemma, max_model_len=4096, default_seed=6)
    assert app.service is not None
    app.service.defaults["logit_bias"] = bias
    return app


def _schema(one: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"city": {"type": "string"}, "a": one},
        "required": ["city"],
    }


def _tool(schema: Any, name: str = "rain", **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": "Rain.", "parameters": schema}
    return {"type": "function", "function": {**function, **more}}


# By API: its path, a body with two tools, and what errors call the second's
# schema.
def _chat(schema: Any, **more: Any) -> tuple[str, dict[str, Any], str]:
    tools = [_tool(_schema({}), "snow"), _tool(schema, **more)]
    body = {"model": NAME, "messages": USER, "tools": tools, "max_tokens": 3}
    return CHAT, body, "tools[1].function.parameters"


def _responses(schema: Any, **more: Any) -> tuple[str, dict[str, Any], str]:
    tools = [{"type": "web_search"}, {
        "type": "function", "name": "rain", "parameters": schema,
        **more}]  # fmt: skip
    body = {"model": NAME, "input": "hello", "tools": tools,
            "max_output_tokens": 3}  # fmt: skip
    return RESPONSES, body, "tools[1].parameters"


def _messages(schema: Any, **more: Any) -> tuple[str, dict[str, Any], str]:
    tools = [{"name": "snow", "input_schema": _schema({})},
             {"name": "rain", "input_schema": schema, **more}]  # fmt: skip
    body = {"model": NAME, "messages": USER, "tools": tools, "max_tokens": 3}
    return MESSAGES, body, "tools[1].input_schema"


def _ollama(schema: Any, **more: Any) -> tuple[str, dict[str, Any], str]:
    _, body, field = _chat(schema, **more)
    del body["max_tokens"]
    return OLLAMA, {**body, "options": {"num_predict": 3}}, field


APIS = {"chat": _chat, "responses": _responses, "messages": _messages,
        "ollama": _ollama}  # fmt: skip


def _named(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    shown = response.headers.get(HEADER, "")
    return [urllib.parse.unquote(one) for one in shown.split(", ") if one]


def _error(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    found = response.json()["error"]
    return found if isinstance(found, dict) else {"message": found}


@pytest.mark.parametrize(
    ("one", "left"),
    [
        *(
            ({"type": "string", "pattern": pattern}, "pattern")
            for pattern in (
                "^(?=x)a", r"\bfoo\b", r"(a)\1", r"a\Z", r"\h", "a{,3}", "(",
                ENDLESS,
            )
        ),
        ({"enum": None}, "enum"),
        ({"type": "array", "items": None}, "items"),
        ({"type": "object", "required": None}, "required"),
        ({"type": "object", "properties": None}, "properties"),
        ({"type": "date"}, "type"),
        ({"type": None}, "type"),
        ({"$ref": "#/nowhere"}, "$ref"),
        ({"$ref": "http://localhost/x"}, "$ref"),
        ({"type": "string", "minLength": "3"}, "minLength"),
        ({"type": "integer", "multipleOf": 0}, "multipleOf"),
        ({"type": "integer", "minimum": 2**60}, "minimum"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "format": "mine"}, "format"),
        ({"type": "string", "not": {}}, "not"),
        # Forms of other libraries mean what they say.
        ({"type": "any"}, None),
        ({"type": "STRING"}, None),
        ({"type": "int", "minimum": 3.0}, None),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, None),
        ({"type": "number", "maximum": 3, "exclusiveMaximum": False}, None),
        ({"type": "integer", "minimum": True}, "minimum"),
        ({"type": ["OBJECT", "null"]}, None),
        ({"type": "array", "items": {"type": "float"}}, None),
        ({"description": None, "default": None}, None),
    ],
)  # fmt: skip
def test_one_keyword_is_left_out_and_named(
    app: App, monkeypatch: pytest.MonkeyPatch, one: Any, left: str | None
) -> None:
    prompts = prompts_of(app, monkeypatch)
    path, body, field = _chat(_schema(one))
    named = _named(post(app, path, body))
    assert named == ([] if left is None else [f"{field}.properties.a.{left}"])
    # The model reads the schema as it was sent.
    assert app.service is not None
    assert json.dumps(_schema(one)) in app.service.tokenizer.decode(prompts[0])
    if left is None:
        return
    # Of a strict tool it is refused, by that path.
    error = _error(post(app, path, _chat(_schema(one), strict=True)[1]))
    assert error["param"] == f"{field}.properties.a.{left}"
    assert error["message"].startswith(f"{error['param']}: ")


# As zod and other libraries write schemas: what a grammar does not know by
# name can be said otherwise, or says nothing.
SAID_OTHERWISE: dict[str, tuple[Any, str]] = {
    "base64": ({"type": "string", "format": "base64", "maxLength": 8},
               r"([\w+/]{4})*([\w+/]{2}==|[\w+/]{3}=)?"),
    "jwt": ({"type": "string", "format": "jwt", "maxLength": 20},
            r"[\w-]+\.[\w-]+\.[\w-]*"),
    "e164": ({"type": "string", "format": "e164"}, r"\+[1-9]\d{6,14}"),
    "ulid": ({"type": "string", "format": "ulid"}, r"\w{26}"),
    "nanoid": ({"type": "string", "format": "nanoid"}, r"[\w-]{21}"),
    "cuid2": ({"type": "string", "format": "cuid2", "maxLength": 9},
              r"[0-9a-z]+"),
    "cidrv4": ({"type": "string", "format": "cidrv4"}, r"[\d.]+/\d+"),
    "its own pattern": ({"type": "string", "format": "cuid2",
                         "pattern": "^[xy]{3}$"}, r"[xy]{3}"),
    "password": ({"type": "string", "format": "password", "maxLength": 3},
                 r".{0,3}"),
}  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", SAID_OTHERWISE)
def test_formats_of_other_libraries_are_enforced(
    app: App, name: str, strict: bool
) -> None:
    one, pattern = SAID_OTHERWISE[name]
    schema = {"type": "object", "properties": {"a": one}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    path, body, _ = _chat(schema, strict=strict)
    body |= {"tool_choice": "rain", "max_tokens": 200}
    response = post(app, path, body)
    assert _named(response) == []
    [call] = response.json()["choices"][0]["message"]["tool_calls"]
    said = json.loads(call["function"]["arguments"])["a"]
    assert re.fullmatch(pattern, said, re.ASCII), said
    assert post(app, path, _formatted(CHAT, schema, False)).status_code == 200


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "one",
    [
        {"type": "object", "propertyNames": {"type": "string"},
         "additionalProperties": {"type": "string"}},
        {"type": "object", "propertyNames": {}},
        {"type": "array", "uniqueItems": False},
        {"type": "array", "uniqueItems": True, "maxItems": 1},
        {"type": "object", "unevaluatedProperties": True,
         "dependentRequired": {}},
        {"type": "integer", "format": "int32"},
        {"type": "string", "not": False},
    ],
)  # fmt: skip
def test_what_says_nothing_is_no_reason(
    app: App, one: Any, strict: bool
) -> None:
    path, body, _ = _chat(_schema(one), strict=strict)
    assert _named(post(app, path, body)) == []


@pytest.mark.parametrize("strict", [False, True])
def test_names_that_are_listed_are_enforced(app: App, strict: bool) -> None:
    """As zod writes a record whose keys are an enum."""
    one = {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["x", "y"]},
        "additionalProperties": {"enum": [1, 2]},
        "required": ["y"],
    }
    schema = {"type": "object", "properties": {"a": one}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    path, body, _ = _chat(schema, strict=strict)
    body |= {"tool_choice": "rain", "max_tokens": 200}
    response = post(app, path, body)
    assert _named(response) == []
    [call] = response.json()["choices"][0]["message"]["tool_calls"]
    said = json.loads(call["function"]["arguments"])["a"]
    assert said["y"] in (1, 2) and said.keys() <= {"x", "y"}


def test_the_rest_of_the_schema_is_enforced(app: App) -> None:
    import jsonschema

    kept = {"type": "string", "enum": ["x", "y"]}
    schema = {
        "type": "object",
        "properties": {
            "b": {"type": "object", "required": ["n"], "properties": {
                "n": {"type": "string", "pattern": r"^x\b", "maxLength": 3},
                "k": kept}},
            "n": {"type": "integer", "minimum": 2, "maximum": 7},
            "m": {"type": "integer", "minimum": 2, "maximum": 4,
                  "exclusiveMinimum": True, "exclusiveMaximum": True},
        },
        "required": ["b", "n", "m"],
        "additionalProperties": False,
    }  # fmt: skip
    path, body, field = _chat(schema)
    body |= {"tool_choice": {"type": "function", "function": {"name": "rain"}},
             "max_tokens": 200}  # fmt: skip
    response = post(app, path, body)
    assert _named(response) == [f"{field}.properties.b.properties.n.pattern"]
    [call] = response.json()["choices"][0]["message"]["tool_calls"]
    del schema["properties"]["b"]["properties"]["n"]["pattern"]
    # Newer drafts have other words for these.
    schema["properties"]["m"] = {"const": 3}
    jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_each_api_names_it_in_its_own_words(
    app: App, api: str, stream: bool
) -> None:
    bad = _schema({"type": "string", "pattern": r"\b"})
    path, body, field = APIS[api](bad)
    where = f"{field}.properties.a.pattern"
    assert _named(post(app, path, {**body, "stream": stream})) == [where]
    # Again, though the grammar is ready.
    assert _named(post(app, path, {**body, "stream": stream})) == [where]
    path, body, _ = APIS[api](_schema({"type": "string"}))
    assert _named(post(app, path, {**body, "stream": stream})) == []


@pytest.mark.parametrize("stream", [False, True])
def test_turns_of_a_session_name_it(kept: App, stream: bool) -> None:
    bad = _schema({"type": "string", "pattern": r"\b"})
    for api in ("chat", "messages", "responses"):
        session = post(kept, "/v1/sessions", {}).json()["id"]
        path, body, field = APIS[api](bad)
        body |= {"session": session, "stream": stream}
        where = f"{field}.properties.a.pattern"
        assert _named(post(kept, path, body)) == [where]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_each_api_refuses_it_of_strict_tools(
    app: App, api: str, stream: bool
) -> None:
    bad = _schema({"type": "string", "pattern": ENDLESS})
    path, body, field = APIS[api](bad, strict=True)
    error = _error(post(app, path, {**body, "stream": stream}))
    assert error["message"].startswith(f"{field}.properties.a.pattern: ")
    # All of where it is: the tool's name, and the place in its schema.
    assert "'rain' at #/properties/a/pattern" in error["message"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["object", "null"], "properties": {}},
        {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}},
        {"type": "any"},
        {"type": None},
    ],
)
def test_schemas_whose_arguments_are_objects(app: App, schema: Any) -> None:
    path, body, _ = _chat(schema)
    body |= {"tool_choice": "rain", "max_tokens": 200}
    choice = post(app, path, body).json()["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert isinstance(json.loads(call["function"]["arguments"]), dict)
    other = _chat({"type": "string"})[1]
    assert _error(post(app, path, other))["param"].startswith("tools[1]")


def test_the_header_is_bounded_and_plain(app: App) -> None:
    schema = _schema({})
    schema["properties"] = {
        f"caf\u00e9, {i}\n": {"type": "string", "pattern": "(?=a)"}
        for i in range(60)
    }
    path, body, field = _chat(schema)
    response = post(app, path, body)
    shown = response.headers[HEADER]
    assert shown.isascii() and len(shown) < 1_200
    *paths, rest = _named(response)
    assert paths[0] == f"{field}.properties.caf\u00e9, 0\n.pattern"
    assert rest == f"{60 - len(paths)} more"


def test_it_is_logged(app: App, caplog: pytest.LogCaptureFixture) -> None:
    path, body, field = _chat(_schema({"type": "string", "pattern": r"\b"}))
    with caplog.at_level("INFO", logger="gemmakv.server"):
        post(app, path, body)
    assert f"not enforced {field}.properties.a.pattern" in caplog.text


def _calls(api: str, response: httpx.Response, stream: bool) -> Any:
    """Names of calls in an answer, and why it ended."""
    assert response.status_code == 200, response.text
    if not stream:
        found = response.json()
        if api == "chat":
            [choice] = found["choices"]
            calls = choice["message"].get("tool_calls") or []
            names = [call["function"]["name"] for call in calls]
            return names, choice["finish_reason"]
        if api == "messages":
            names = [one["name"] for one in found["content"]
                     if one["type"] == "tool_use"]  # fmt: skip
            return names, found["stop_reason"]
        names = [one["name"] for one in found["output"]
                 if one["type"] == "function_call"]  # fmt: skip
        return names, found["status"]
    events = [data for _, data in sse_events(response.text)]
    if api == "chat":
        choices = [e["choices"][0] for e in events if e != "[DONE]"]
        names = [call["function"]["name"] for one in choices
                 for call in one["delta"].get("tool_calls", [])
                 if "name" in call["function"]]  # fmt: skip
        return names, choices[-1]["finish_reason"]
    if api == "messages":
        names = [e["content_block"]["name"] for e in events
                 if e["type"] == "content_block_start"
                 and e["content_block"]["type"] == "tool_use"]  # fmt: skip
        [ended] = [e for e in events if e["type"] == "message_delta"]
        return names, ended["delta"]["stop_reason"]
    names = [e["item"]["name"] for e in events
             if e["type"] == "response.output_item.done"
             and e["item"]["type"] == "function_call"]  # fmt: skip
    return names, events[-1]["response"]["status"]


ENDS = {"chat": "tool_calls", "messages": "tool_use", "responses": "completed"}
CHOICES: dict[str, tuple[Any, Any]] = {  # a tool by its name, any
    "chat": ({"type": "function", "function": {"name": "rain"}}, "required"),
    "messages": ({"type": "tool", "name": "rain"}, {"type": "any"}),
    "responses": ({"type": "function", "name": "rain"}, "required"),
}
SMALL = {"type": "object", "properties": {"n": {"enum": [1, 2]}},
         "required": ["n"], "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ENDS)
def test_a_named_tool_is_called_once(
    shared: gemmakv.Gemma, api: str, stream: bool
) -> None:
    """The model would go on; the client that names a tool wants one call."""
    app = _app(shared, GOING_ON)
    path, body, _ = APIS[api](SMALL)
    most = "max_output_tokens" if api == "responses" else "max_tokens"
    body |= {most: 300, "stream": stream, "tool_choice": CHOICES[api][0]}
    found = _calls(api, post(app, path, body), stream)
    assert found == (["rain"], ENDS[api])


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("api", ENDS)
def test_required_calls_end_when_the_model_ends(
    shared: gemmakv.Gemma, api: str, parallel: bool
) -> None:
    path, body, _ = APIS[api](SMALL)
    most = "max_output_tokens" if api == "responses" else "max_tokens"
    body |= {most: 300, "tool_choice": CHOICES[api][1]}
    if api == "messages":
        body["tool_choice"]["disable_parallel_tool_use"] = not parallel
    else:
        body["parallel_tool_calls"] = parallel
    # With an end that the model likes, and with one that it does not.
    names, reason = _calls(api, post(_app(shared, ENDING), path, body), False)
    assert len(names) == 1 and reason == ENDS[api]
    names, reason = _calls(api, post(_app(shared, GOING_ON), path, body), False)
    assert (len(names) == 1) != parallel
    assert (reason == ENDS[api]) != parallel


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": SMALL},
        {"type": "json_schema", "schema": SMALL},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SMALL}},
    ],
)
def test_a_schema_is_enforced_in_each_form(app: App, form: Any) -> None:
    import jsonschema

    body = {"model": NAME, "messages": USER, "response_format": form,
            "max_tokens": 100}  # fmt: skip
    found = post(app, CHAT, body).json()["choices"][0]
    jsonschema.validate(json.loads(found["message"]["content"]), SMALL)
    sent = {"model": NAME, "input": "hello", "max_output_tokens": 100}
    if "json_schema" not in form:
        found = post(app, RESPONSES, {**sent, "text": {"format": form}}).json()
        text = found["output"][0]["content"][0]["text"]
        jsonschema.validate(json.loads(text), SMALL)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"response_format": {"type": "json_object", "regex": "a"}},
         "response_format.regex"),
        (CHAT, {"response_format": {"type": "text", "schema": SMALL}},
         "response_format.schema"),
        (CHAT, {"response_format": {"type": "json_object",
                                    "json_schema": {"schema": SMALL}}},
         "response_format.json_schema"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {
            "schema": SMALL, "regex": "a"}}},
         "response_format.json_schema.regex"),
        (CHAT, {"response_format": {"type": "json_object", "schema": 5}},
         "response_format.schema"),
        (CHAT, {"stream": True, "stream_options": {
            "continuous_usage_stats": True}},
         "stream_options.continuous_usage_stats"),
        (CHAT, {"tools": [_tool(SMALL)], "tool_choice": {
            "type": "function", "function": {"name": "rain", "arguments": {}}}},
         "tool_choice.function.arguments"),
        (RESPONSES, {"text": {"format": {"type": "json_object",
                                         "regex": "a"}}}, "text.format.regex"),
        (RESPONSES, {"text": {"regex": "a"}}, "text.regex"),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "rain",
                                     "arguments": "{}"}},
         "tool_choice.arguments"),
        (MESSAGES, {"output_config": {"style": "x"}}, "output_config.style"),
        (MESSAGES, {"output_config": {"format": {
            "type": "json_schema", "schema": SMALL, "regex": "a"}}},
         "output_config.format.regex"),
        *[(route, fields, param)
          for route in (MESSAGES, COUNT)
          for fields, param in (
              ({"output_config": 5}, "output_config"),
              ({"output_config": []}, "output_config"),
              ({"output_config": {"format": {}}},
               "output_config.format.type"),
              ({"output_config": {"format": []}}, "output_config.format"),
              ({"output_format": {"type": "json_schema"}},
               "output_format.schema"),
              ({"output_format": {"type": "json_schema", "schema": {}},
                "output_config": {"format": {
                    "type": "json_schema", "schema": SMALL}}},
               "output_format"),
          )],
        (MESSAGES, {"tool_choice": {"type": "any", "input": {}}},
         "tool_choice.input"),
        (MESSAGES, {"tool_choice": {"type": "any",
                                    "disable_parallel_tool_use": "yes"}},
         "tool_choice.disable_parallel_tool_use"),
    ],
)  # fmt: skip
def test_unknown_parts_that_ask_for_more_are_refused(
    app: App, path: str, fields: Any, param: str
) -> None:
    body: dict[str, Any] = {"model": NAME, "max_tokens": 3, **fields}
    if path == RESPONSES:
        body["max_output_tokens"] = body.pop("max_tokens")
        body["input"] = "hello"
        if "tool_choice" in fields:
            body["tools"] = _responses(SMALL)[1]["tools"]
    else:
        body["messages"] = USER
    error = _error(post(app, path, body))
    assert error["message"].startswith(f"{param}: ")
    assert error.get("param", param) == param


FORMATS = {
    CHAT: lambda schema: {"response_format": {
        "type": "json_schema", "json_schema": {"schema": schema}}},
    RESPONSES: lambda schema: {"text": {"format": {
        "type": "json_schema", "name": "x", "schema": schema}}},
    MESSAGES: lambda schema: {"output_config": {"format": {
        "type": "json_schema", "schema": schema}}},
    OLLAMA: lambda schema: {"format": schema},
}  # fmt: skip
FIELDS = {
    CHAT: "response_format.json_schema.schema",
    RESPONSES: "text.format.schema",
    MESSAGES: "output_config.format.schema",
    OLLAMA: "format",
}


def _formatted(path: str, schema: Any, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": NAME, "stream": stream}
    if path == RESPONSES:
        body |= {"input": "hello", "max_output_tokens": 40}
    elif path == OLLAMA:
        body |= {"messages": USER, "options": {"num_predict": 40}}
    else:
        body |= {"messages": USER, "max_tokens": 40}
    return {**body, **FORMATS[path](schema)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", FORMATS)
def test_what_cannot_be_followed_is_refused_before_the_answer(
    app: App, path: str, stream: bool
) -> None:
    schema = _schema({"type": "string", "pattern": ENDLESS})
    error = _error(post(app, path, _formatted(path, schema, stream)))
    where = f"{FIELDS[path]}.properties.a.pattern"
    assert error["message"].startswith(f"{where}: ")
    assert error.get("param", where) == where


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", FORMATS)
def test_what_ends_a_reply_names_the_field_that_was_sent(
    app: App, path: str, stream: bool
) -> None:
    """It shows in the midst of a text alone, as an event of a stream."""
    schema = {"type": "string", "pattern": LATE}
    response = post(app, path, _formatted(path, schema, stream))
    assert FIELDS[path] + ": " in response.text
    assert "grammar: " not in response.text


CIRCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"},
                    "c": {"type": "object", "required": ["c"], "properties": {
                        "c": {"$ref": "#/$defs/c"}}}},
          "type": "object", "required": ["n"], "additionalProperties": False,
          "properties": {"a": {"$ref": "#/$defs/a"},
                         "c": {"$ref": "#/$defs/c"},
                         "l": {"type": "array", "maxItems": 1,
                               "items": {"$ref": "#/$defs/c"}},
                         "u": {"anyOf": [{"$ref": "#/$defs/c"},
                                         {"enum": [3]}]},
                         "n": {"enum": [1, 2]}}}  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
def test_circles_in_optional_parts_are_left_out(
    app: App, strict: bool
) -> None:
    """No value satisfies them, so no text does."""
    body = _formatted(CHAT, CIRCLE, False) | {"n": 3}
    for choice in post(app, CHAT, body).json()["choices"]:
        value = json.loads(choice["message"]["content"])
        assert value["n"] in (1, 2) and not {"a", "c"} & value.keys()
    path, body, _ = _chat(CIRCLE, strict=strict)
    body |= {"tool_choice": "rain", "max_tokens": 200}
    response = post(app, path, body)
    assert _named(response) == []
    [call] = response.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["n"] in (1, 2)
