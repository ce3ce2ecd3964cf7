"""Paths of routes in the forms that clients make of them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

import gemmakv
from gemmakv.server.app import App
from gemmakv.server.service.chat import ChatService
from gemmakv.server.settings import Settings
from support import asgi
from support.asgi import NAME, USER, in_loop, make_app

SAID = {"messages": USER, "max_tokens": 3}
CHAT = "/v1/chat/completions"
HOST = "http://localhost"  # else "//a/b" is /b of a


def get(app: App, path: str, **headers: str) -> httpx.Response:
    return asgi.get(app, HOST + path, **headers)


def post(app: App, path: str, body: Any, **headers: str) -> httpx.Response:
    return asgi.post(app, HOST + path, body, **headers)


@pytest.mark.parametrize(
    "path",
    [
        "/chat/completions", "//v1/chat/completions", "/v1//chat/completions",
        "/v1/v1/chat/completions", "/v1/chat/completions/",
        "//chat//completions//", "/v1/v1//v1/chat/completions/",
    ],
)  # fmt: skip
def test_paths_of_a_post(app: App, path: str) -> None:
    expected = post(app, CHAT, SAID).json()
    found = post(app, path, SAID)
    assert found.status_code == 200, found.text
    assert not found.history
    assert found.json()["choices"] == expected["choices"]


def test_paths_of_other_routes(app: App) -> None:
    for path in ("/models", "/models/", "//v1/models", "/v1/models/"):
        assert get(app, path).json()["object"] == "list"
    for path in (f"/models/{NAME}", f"/v1/v1/models/{NAME}/"):
        assert get(app, path).json()["id"] == NAME
    for path, body in (
        ("/completions", {"prompt": "a", "max_tokens": 1}),
        ("/responses", {"input": "a", "max_output_tokens": 1}),
        ("/messages", {**SAID}),
        ("/messages/count_tokens/", {"messages": USER}),
        ("//api//chat", {"model": NAME, "messages": USER}),
        ("/completion/", {"prompt": "a", "n_predict": 1}),
        ("/tokenize/", {"content": "a"}),
    ):
        found = post(app, path, body)
        assert found.status_code == 200, (path, found.text)
    refused = post(app, "/embeddings", {"input": "a"})
    assert refused.status_code == 400  # a model that writes
    assert "route" not in refused.text
    for path in ("/health/", "//metrics", "/props/", "/slots//"):
        assert get(app, path).status_code == 200


def test_names_of_models_may_have_slashes(shared: gemmakv.Gemma) -> None:
    names = ("/models//a", "org/repo")
    settings = Settings(served_model_name=names)
    app = App(settings, ChatService(shared, settings))
    for name in names:
        for path in (f"/v1/models/{name}", f"/models/{name}"):
            assert get(app, path).json()["id"] == name, path


def test_errors_have_the_form_of_the_api(app: App) -> None:
    found = post(app, "/chat/completions", {"messages": []})
    assert found.json()["error"]["param"] == "messages"
    found = post(app, "/messages", {**SAID, "messages": []})
    assert found.json()["type"] == "error"
    found = get(app, "/chat/completions")
    assert found.status_code == 405 and found.headers["allow"] == "POST"


def test_keys_are_asked_for(shared: gemmakv.Gemma) -> None:
    app = make_app(shared, api_keys=("one",), max_model_len=256)
    key = {"authorization": "Bearer one"}
    for path in ("/chat/completions", "//v1/chat/completions/", "/v1/v1/x"):
        assert post(app, path, SAID).status_code == 401
    assert post(app, "/chat/completions", SAID, **key).status_code == 200
    for path in ("/page//v1/models", "/page/../v1/models", "//page/v1/models"):
        assert get(app, path).status_code in (401, 404)
    assert get(app, "//health/").status_code == 200  # it is open


def test_metrics_and_logs_have_the_route(app: App) -> None:
    post(app, "//chat/completions/", SAID)
    text = get(app, "/metrics").text
    lines = [x for x in text.splitlines() if "requests_total{" in x]
    assert any(f'route="{CHAT}"' in line for line in lines)
    assert not any("//chat" in line for line in lines)


@pytest.mark.parametrize(
    "path, nearest",
    [
        ("/v1/chat/completion", "POST /v1/chat/completions"),
        ("/v1/chat/complations", "POST /v1/chat/completions"),
        ("/api/tag", "GET /api/tags"),
        ("/V1/MODELS", "GET /v1/models"),
        ("/v2/embeddings", "POST /v1/embeddings"),
        ("/nosuch", "GET /openapi.json"),
    ],
)
def test_unknown_paths_name_the_nearest(
    app: App, path: str, nearest: str
) -> None:
    found = post(app, path, SAID)
    assert found.status_code == 404
    said = found.json()["error"]
    message = said if isinstance(said, str) else said["message"]
    assert "no such route" in message and nearest in message


def test_long_unknown_paths_take_no_time(app: App) -> None:
    assert get(app, "/v1/" + "completions/" * 2000).status_code in (404, 431)


def test_preflights(shared: gemmakv.Gemma) -> None:
    origin = "https://example.org"
    app = make_app(shared, cors_origin=(origin,), max_model_len=256)
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
        "access-control-request-private-network": "true",
    }

    async def ask(http: httpx.AsyncClient) -> list[httpx.Response]:
        return [
            await http.options(HOST + path, headers=headers)
            for path in (CHAT, "/chat/completions", "//v1/models/")
        ]

    for found in in_loop(app, ask):
        assert found.status_code == 200
        allowed = {
            name.removeprefix("access-control-allow-"): value
            for name, value in found.headers.items()
            if name.startswith("access-control-allow-")
        }
        assert allowed["origin"] == origin
        assert "POST" in allowed["methods"]
        assert "authorization" in allowed["headers"]
        assert allowed["private-network"] == "true"


def test_what_clients_of_llama_server_read(app: App) -> None:
    props: dict[str, Any] = get(app, "/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["modalities"] == {"vision": False, "audio": False}
    assert props["endpoint_slots"] is True and props["build_info"]
    [model] = get(app, "/v1/models").json()["data"]
    assert model["meta"]["n_ctx"] == 4096 and model["meta"]["n_vocab"] > 0
    assert json.dumps(model)
