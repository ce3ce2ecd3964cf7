"""Vectors of texts over HTTP: OpenAI's routes and Ollama's."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv.generation._embeddings import Embedder
from gemmakv.generation._requests import requests_of
from gemmakv.server.app import App
from gemmakv.server.settings import Limits
from support import tiny_gguf
from support.asgi import (
    NAME,
    USER,
    get,
    in_loop,
    make_app,
    post,
    steps_at_rest,
    steps_of,
    until,
)
from support.refusals import check_refusal

ROUTE = "/v1/embeddings"

MANY = Limits(json_values=1 << 21)  # token ids of what takes a while


def ids_of(gemma: gemmakv.Gemma, texts: list[str], **options: int) -> Any:
    """Gives the token ids that vectors of texts are made of."""
    embedder = Embedder(requests_of(gemma))
    return embedder.prepare(texts, None, None, **options).ids  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> gemmakv.Gemma:
    folder = tmp_path_factory.mktemp("embed")
    return gemmakv.Gemma.load(
        tiny_gguf.write_embedding(folder / "embed.gguf"))


@pytest.fixture
def served(embedder: gemmakv.Gemma) -> App:
    return make_app(embedder, limits=MANY)


def vectors_of(found: dict[str, Any]) -> list[list[float]]:
    assert found["object"] == "list" and found["model"] == NAME
    data = found["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    assert {entry["object"] for entry in data} == {"embedding"}
    return [entry["embedding"] for entry in data]


@pytest.mark.parametrize("given, texts", [
    ("the cat", ["the cat"]),
    (["the cat", "a hat"], ["the cat", "a hat"]),
    ([2, 300, 301], [[2, 300, 301]]),
    ([[2, 300], [2, 301, 1]], [[2, 300], [2, 301, 1]]),
])
def test_openai_s_inputs(
    served: App, embedder: gemmakv.Gemma, given: Any, texts: Any
) -> None:
    response = post(served, ROUTE, {"input": given, "model": NAME})
    assert response.status_code == 200, response.text
    found = response.json()
    expected = embedder.embed(texts)
    # JSON has as many digits as it takes.
    assert np.array_equal(np.array(vectors_of(found), np.float32), expected)
    tokens = found["usage"]["prompt_tokens"]
    assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    ids = ids_of(embedder, texts)
    assert tokens == sum(map(len, ids))


def test_openai_s_options(served: App, embedder: gemmakv.Gemma) -> None:
    body = {
        "input": ["the cat"], "model": NAME, "dimensions": 128,
        "encoding_format": "base64", "prompt": "query", "user": "me",
    }
    found = post(served, ROUTE, body).json()
    data = base64.b64decode(vectors_of(found)[0], validate=True)
    vector = np.frombuffer(data, "<f4")
    expected = embedder.embed(["the cat"], dim=128, prompt="query")[0]
    assert np.array_equal(vector, expected)


def test_openai_s_client(served: App, embedder: gemmakv.Gemma) -> None:
    openai = pytest.importorskip("openai")
    found = post(served, ROUTE, {"input": "x", "encoding_format": "float"})
    parsed = openai.types.CreateEmbeddingResponse.model_validate(found.json())
    expected = embedder.embed(["x"])[0]
    assert np.array_equal(np.array(parsed.data[0].embedding, np.float32),
                          expected)


@pytest.mark.parametrize("body, param, parts", [
    ({}, "input", []),
    ({"input": ""}, "input[0]", ["empty"]),
    ({"input": []}, "input", ["2048", "found 0"]),
    ({"input": ["x"] * 2049}, "input", ["2048", "found 2049"]),
    ({"input": ["x", ""]}, "input[1]", ["text"]),
    ({"input": ["x", 5]}, "input", ["texts", "token ids"]),
    ({"input": [[5], []]}, "input[1]", ["token ids"]),
    ({"input": [999999]}, "input[0]", ["token ids"]),
    ({"input": "x" * 2000}, "input[0]", ["512"]),
    ({"input": "x", "dimensions": 64}, "dimensions", ["160, 128", "64"]),
    ({"input": "x", "dimensions": 0}, "dimensions", ["160, 128", "0"]),
    ({"input": "x", "encoding_format": "int8"}, "encoding_format",
     ["float", "base64", "'int8'"]),
    ({"input": "x", "prompt": "nothing"}, "prompt", ["query", "nothing"]),
    ({"input": [5], "prompt": "query"}, "input[0]", ["text"]),
    ({"input": "x", "dimensions": "many"}, "dimensions", []),
])
def test_bad_fields_are_named(
    served: App, body: dict[str, Any], param: str, parts: list[str]
) -> None:
    response = post(served, ROUTE, {"model": NAME, **body})
    check_refusal(response, param, *parts)
    assert response.json()["error"]["param"] == param


def test_ollama_s_embed(served: App, embedder: gemmakv.Gemma) -> None:
    texts = ["the cat", "a hat"]
    body = {"model": NAME, "input": texts, "keep_alive": "5m", "options": {}}
    found = post(served, "/api/embed", body).json()
    expected = embedder.embed(texts)
    assert np.array_equal(np.array(found["embeddings"], np.float32), expected)
    assert found["model"] == NAME and found["total_duration"] > 0
    ids = ids_of(embedder, texts)
    assert found["prompt_eval_count"] == sum(map(len, ids))
    ollama = pytest.importorskip("ollama")
    assert ollama.EmbedResponse.model_validate(found).embeddings
    one = post(served, "/api/embed",
               {"model": NAME, "input": "a hat", "dimensions": 128}).json()
    expected = embedder.embed(["a hat"], dim=128)
    assert np.array_equal(np.array(one["embeddings"], np.float32), expected)


@pytest.mark.parametrize("given", [None, "", []])
def test_ollama_loads_the_model_for_nothing(served: App, given: Any) -> None:
    body = {"model": NAME, "input": given}
    assert post(served, "/api/embed", body).json()["embeddings"] == []
    body = {"model": NAME, "prompt": ""}
    assert post(served, "/api/embeddings", body).json() == {"embedding": []}


def test_ollama_cuts_texts_that_are_too_long(
    served: App, embedder: gemmakv.Gemma
) -> None:
    text = "x" * 2000
    body = {"model": NAME, "input": [text, "x"]}
    found = post(served, "/api/embed", body).json()
    [ids] = ids_of(embedder, [text], longest=1 << 21)
    kept = [*ids[:511].tolist(), 1]
    expected = embedder.embed([kept, *ids_of(embedder, ["x"])])
    assert np.array_equal(np.array(found["embeddings"], np.float32), expected)
    assert found["prompt_eval_count"] == 512 + 3
    refused = post(served, "/api/embed", {**body, "truncate": False})
    check_refusal(refused, "input[0]", "512")


def test_texts_much_too_long_are_not_encoded(
    served: App, embedder: gemmakv.Gemma, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"input": ["a", "a b " * 200_000]}

    def encode(text: str) -> list[int]:
        assert len(text) < 1000, "it is encoded"
        return [5]

    monkeypatch.setattr(embedder.tokenizer, "_encode_plain", encode)
    answer = post(served, "/v1/embeddings", body)
    check_refusal(answer, "input[1]", "at least")  # none were counted


def test_ollama_s_former_route(served: App, embedder: gemmakv.Gemma) -> None:
    body = {"model": NAME, "prompt": "the cat"}
    found = post(served, "/api/embeddings", body).json()
    expected = embedder.embed(["the cat"])[0]
    assert list(found) == ["embedding"]
    assert np.array_equal(np.array(found["embedding"], np.float32), expected)


@pytest.mark.parametrize("path, body", [
    ("/v1/chat/completions", {"messages": USER}),
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/responses", {"input": "x"}),
    ("/v1/messages", {"messages": USER, "max_tokens": 3}),
    ("/api/chat", {"messages": USER}),
    ("/api/generate", {"prompt": "x"}),
    ("/completion", {"prompt": "x"}),
    ("/v1/messages/count_tokens", {"messages": USER}),
    ("/v1/responses/input_tokens", {"input": "x"}),
    ("/apply-template", {"messages": USER}),
    ("/v1/cache/match", {"prompt": "x"}),
    ("/v1/cache/match", {"messages": USER}),
    ("/v1/cache/pins", {"prompt": "x"}),
    ("/v1/cache/pins", {"messages": USER}),
])
def test_conversations_are_refused(
    served: App, path: str, body: dict[str, Any]
) -> None:
    if "tokens" not in path:
        body = {"stream": False, **body}
    response = post(served, path, {"model": NAME, **body})
    check_refusal(response, "model", "text")


def test_what_the_model_is_and_did(served: App) -> None:
    shown = post(served, "/api/show", {"model": NAME}).json()
    assert shown["capabilities"] == ["embedding"]
    info = shown["model_info"]
    assert info["general.architecture"] == "gemma-embedding"
    assert info["gemma-embedding.embedding_length"] == 160
    post(served, ROUTE, {"input": ["x", "y"]})
    metrics = get(served, "/metrics").text
    assert 'gemmakv_embeddings_total{key="none"} 2' in metrics
    assert 'gemmakv_prompt_tokens_total{key="none"} 6' in metrics
    # Slots, properties and tokens are there as for any model.
    for path in ("/props", "/v1/models", "/health", "/slots"):
        assert get(served, path).status_code == 200, path
    assert post(served, "/tokenize", {"content": "x"}).status_code == 200


def test_many_at_once_get_their_own(
    served: App, embedder: gemmakv.Gemma
) -> None:
    texts = [f"text {number}" for number in range(24)]
    expected = embedder.embed(texts)

    async def ask(client: Any) -> list[Any]:
        return list(await asyncio.gather(*[
            client.post(ROUTE, json={"input": text}) for text in texts]))

    for vector, response in zip(
        expected, in_loop(served, ask), strict=True
    ):
        [found] = vectors_of(response.json())
        assert np.array_equal(np.array(found, np.float32), vector)


def test_a_client_that_goes_away_ends_its_call(
    served: App, embedder: gemmakv.Gemma
) -> None:
    async def leave(client: Any) -> None:
        first = steps_of(embedder)
        body = {"input": [[5] * 512] * 2000}  # a step each
        task = asyncio.create_task(client.post(ROUTE, json=body))
        await until(lambda: steps_of(embedder) > first, "it began")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = steps_of(embedder)
    in_loop(served, leave)
    assert steps_at_rest(embedder) - before < 2000


def test_a_request_has_a_time(embedder: gemmakv.Gemma) -> None:
    app = make_app(embedder, request_timeout=0.1, limits=MANY)
    response = post(app, ROUTE, {"input": [[5] * 512] * 1000})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "deadline_exceeded"
    # The next one is served, however long that takes.
    assert app.service is not None
    app.service.settings = replace(app.service.settings, request_timeout=None)
    assert post(app, ROUTE, {"input": "x"}).status_code == 200


def test_a_model_that_writes_text_refuses(app: App) -> None:
    for path in (ROUTE, "/api/embed", "/api/embeddings"):
        body = {"model": NAME, "input": "x", "prompt": "query"}
        response = post(app, path, body)
        check_refusal(response, "model", "embeddings")


def test_shorter_contexts_count(embedder: gemmakv.Gemma) -> None:
    app = make_app(embedder, max_model_len=16)
    response = post(app, ROUTE, {"input": [[5] * 17]})
    check_refusal(response, "16", "17")


def test_the_path_of_a_file_is_no_part_of_it(tmp_path: Path) -> None:
    path = tiny_gguf.write_embedding(tmp_path / "short.gguf", dense=False)
    with pytest.warns(gemmakv.PartialModelWarning):
        gemma = gemmakv.Gemma.load(path)
    found = post(make_app(gemma), ROUTE, {"input": "x"}).json()
    assert len(vectors_of(found)[0]) == 160
