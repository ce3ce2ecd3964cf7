"""The OpenAPI document: what it says is what is served."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

import gemmakv
from gemmakv.options import GenerationOptions
from gemmakv.server.app import OPENAPI, App
from support.asgi import get, in_loop, make_app, post
from support.kept import KEYS, bearer

OURS = ("/v1/sessions", "/v1/cache", "/health", "/slots", "/tokenize",
        "/detokenize", "/props", "/v1/models", "/v1/responses/input_tokens",
        "/v1/responses/.*/input_items")  # fmt: skip


def test_it_is_served_to_anybody(keyed: App, shared: gemmakv.Gemma) -> None:
    response = get(keyed, OPENAPI)
    assert response.status_code == 200
    found = response.json()
    assert found == json.loads(json.dumps(keyed.openapi()))
    said = {
        (method.upper(), path)
        for path, operations in found["paths"].items()
        for method in operations
    }
    assert {
        ("POST", "/v1/chat/completions"), ("GET", "/v1/models/{model}"),
        ("DELETE", "/v1/sessions/{session}"), ("POST", "/api/embed"),
    } <= said  # fmt: skip
    assert len(said) > 45
    ids = [
        operation["operationId"]
        for operations in found["paths"].values()
        for operation in operations.values()
    ]
    assert len(set(ids)) == len(ids)
    loading = make_app(shared)
    loading.service = None
    assert get(loading, OPENAPI).status_code == 200


def test_options_are_those_of_the_table(app: App) -> None:
    import jsonschema

    known = app.openapi()["components"]["schemas"]["CompletionBody"]
    table = GenerationOptions.json_schema()["properties"]
    assert table.keys() <= known["properties"].keys()
    known = {**known, "required": []}
    jsonschema.Draft202012Validator.check_schema(known)
    validator = jsonschema.Draft202012Validator(known)
    for name, good, bad in (
        ("temperature", [0, 1.5], [-1, "hot"]), ("top_k", [-1, 0], [-2]),
        ("top_p", [0, 1.0], [-0.1, 1.1]), ("stop", ["", [""], None], [5, [5]]),
    ):  # fmt: skip
        assert all(validator.is_valid({name: one}) for one in good)
        assert not any(validator.is_valid({name: one}) for one in bad)


def test_errors_are_as_they_are_said(keyed: App) -> None:
    import jsonschema

    found = keyed.openapi()
    for method, path in (
        ("get", "/v1/sessions"), ("post", "/v1/messages"),
        ("post", "/api/chat"), ("post", "/completion"),
    ):  # fmt: skip
        call = get if method == "get" else (lambda a, p: post(a, p, {}))
        schema = found["paths"][path][method]["responses"]["default"][
            "content"
        ]["application/json"]["schema"]
        answer = call(keyed, path)
        assert answer.status_code == 401
        jsonschema.validate(
            answer.json(), {**schema, "components": found["components"]}
        )
    allowed = get(keyed, "/v1/sessions", **bearer(KEYS[0]))
    assert allowed.status_code == 200


@pytest.mark.slow
def test_schemathesis(kept: App) -> None:
    """No 5xx, and every answer conforms, of all that it makes up."""
    schemathesis = pytest.importorskip(
        "schemathesis", reason="schemathesis makes the requests up"
    )
    import hypothesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    made = post(kept, "/v1/sessions", {"name": "x"}).json()["id"]
    said = {"input": "x", "max_output_tokens": 1}
    response = post(kept, "/v1/responses", said).json()["id"]
    schema = schemathesis.openapi.from_dict(kept.openapi())
    schema = schema.include(path_regex="^(" + "|".join(OURS) + ")")
    seen: set[int] = set()
    paths: set[str] = set()
    count = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        count += 1
        paths.add(operation.path)

        @hypothesis.given(case=operation.as_strategy())
        @hypothesis.settings(
            max_examples=5, deadline=None, database=None, derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        def check(case: Any) -> None:
            if case.path_parameters.get("session"):
                case.path_parameters["session"] = made
            if case.path_parameters.get("response"):
                case.path_parameters["response"] = response
            answer = sent(kept, case)
            seen.add(answer.status_code)
            case.validate_response(
                answer,
                checks=[
                    not_a_server_error, content_type_conformance,
                    response_schema_conformance, status_code_conformance,
                ],
            )  # fmt: skip

        check()
    assert count > 20
    assert {
        "/v1/responses/input_tokens",
        "/v1/responses/{response}/input_items",
    } <= paths
    assert {200, 400, 404} <= seen and max(seen) < 500


def sent(app: App, case: Any) -> httpx.Response:
    import requests

    given = case.as_transport_kwargs(base_url="http://localhost")
    names = ("method", "url", "headers", "params", "json", "data")
    request = requests.Request(**{k: given.get(k) for k in names}).prepare()
    body: Any = request.body
    return in_loop(
        app,
        lambda http: http.request(
            str(request.method),
            str(request.url),
            headers=dict(request.headers),
            content=body,
        ),
    )
