"""The OpenAPI document, made of the types that requests are read with."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from gemmakv.server.apis import anthropic, llama, ollama, openai
from gemmakv.server.apis.http import JSON, ErrorStyle, Handler
from gemmakv.server.service.errors import RequestError
from gemmakv.server.service.requests import taken_schema

_PLACE = re.compile(r"\{(?P<name>\w+)(?::\w+)?\}")
_REF = "#/components/schemas/{name}"
_STREAM = "A stream, if `stream` asks for one (Ollama's: unless it is false)."
_STYLES: dict[str, ErrorStyle] = {
    "OpenAIError": openai.error_style,
    "AnthropicError": anthropic.error_style,
    "OllamaError": ollama.error_style,
    "LlamaError": llama.error_style,
}
_ABOUT = """\
One model over HTTP. Bodies are JSON objects; null is as good as absent, and
fields that no API knows are ignored. `Authorization: Bearer KEY` or `x-api-key`
says whose a request is, where the server has keys. Of the routes of OpenAI,
Anthropic, Ollama and llama-server this has what is read; what is answered is
theirs.
"""


@dataclasses.dataclass(frozen=True)
class RouteOf:
    """A route.

    Attributes:
      summary: what it is for.
      body, query: what it takes; None: nothing.
      answer: what it answers with, where that is ours to say; else an object
        of the API that the path belongs to. str is text, of the type `text`.
      stream: what its streams are.
      options: whether the body may have generation options.
      open: whether it needs no key: it says nothing that is a secret, and
        probes have none.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    body: Any = None
    answer: Any = dict[str, Any]
    text: str = "text/plain"
    query: type[msgspec.Struct] | None = None
    stream: str = ""
    options: bool = False
    open: bool = False


def style_of(path: str, anthropic: bool = False) -> ErrorStyle:
    """How errors of a path are said."""
    return _STYLES[_style_name(path, anthropic)]


def _style_name(path: str, anthropic: bool = False) -> str:
    if path.startswith("/v1/messages") or anthropic:
        return "AnthropicError"
    if path.startswith("/v1/"):
        return "OpenAIError"
    return "OllamaError" if path.startswith("/api/") else "LlamaError"


def document_of(routes: Sequence[RouteOf]) -> dict[str, Any]:
    """Of OpenAPI 3.1."""
    types: list[Any] = []
    for route in routes:
        types += [t for t in (route.body, route.answer) if t is not None]
    schemas, components = msgspec.json.schema_components(
        types, ref_template=_REF
    )
    found = iter(schemas)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        body = None if route.body is None else next(found)
        answer = next(found)
        path = _PLACE.sub(r"{\g<name>}", route.path)
        operations = paths.setdefault(path, {})
        operations[route.method.lower()] = _operation(route, body, answer)
    for name, style in _STYLES.items():
        components[name] = _error_schema(style)
    components["GenerationOptions"] = {
        **taken_schema(),
        "additionalProperties": True,
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "gemmakv", "version": "1", "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {
                    "type": "apiKey", "in": "header", "name": "x-api-key",
                },
            },
        },
    }  # fmt: skip


def _operation(
    route: RouteOf, body: dict[str, Any] | None, answer: dict[str, Any]
) -> dict[str, Any]:
    kind = route.text if route.answer is str else JSON
    content: dict[str, Any] = {kind: {"schema": answer}}
    if route.stream:
        about = {"type": "string", "description": _STREAM}
        content[route.stream] = {"schema": about}
    error = {"$ref": _REF.format(name=_style_name(route.path))}
    found: dict[str, Any] = {
        "summary": route.summary,
        "operationId": _operation_id(route),
        "parameters": _parameters(route),
        "responses": {
            "200": {"description": "The answer", "content": content},
            "default": {
                "description": "What is wrong, and with which field",
                "content": {JSON: {"schema": error}},
            },
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    }
    if route.open:
        found["security"] = []
    if body is not None:
        if route.options:
            options = _REF.format(name="GenerationOptions")
            body = {"allOf": [body, {"$ref": options}]}
        found["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": body}},
        }
    return found


def _operation_id(route: RouteOf) -> str:
    words = re.findall(r"\w+", _PLACE.sub(r"\g<name>", route.path))
    return "_".join([route.method.lower(), *words]).replace("-", "_")


def _parameters(route: RouteOf) -> list[dict[str, Any]]:
    found = [
        {
            "name": place["name"],
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
        }
        for place in _PLACE.finditer(route.path)
    ]
    if route.query is not None:
        schema = msgspec.json.schema(route.query)
        [fields] = schema["$defs"].values()
        for name, one in fields["properties"].items():
            found.append({"name": name, "in": "query", "schema": one})
    return found


def _error_schema(style: ErrorStyle) -> dict[str, Any]:
    """Of what a style makes of an error that says everything."""
    whole = RequestError(400, "x", param="x", code="x")
    return _schema_like(style(whole, "x")[1])


def _schema_like(value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            "type": "object",
            "required": list(value),
            "properties": {k: _schema_like(v) for k, v in value.items()},
        }
    if isinstance(value, int):
        return {"type": "integer"}
    return {"type": ["string", "null"]}
