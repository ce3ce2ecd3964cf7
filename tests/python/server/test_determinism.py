"""The same request gives the same tokens alone and among many, streamed or
not, cached or not.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

import gemmakv
from gemmakv.server.app import App
from support.asgi import NAME, client, in_loop, make_app, sse_events

CHAT = "/v1/chat/completions"
STREAMS = 16


def body(i: int, **fields: Any) -> dict[str, Any]:
    words = "some words that all of them begin with " * 8
    return {
        "model": NAME,
        "messages": [
            {"role": "system", "content": words},
            {"role": "user", "content": f"and number {i} " * (1 + i % 5)},
        ],
        "max_tokens": 20 + i,
        "temperature": 1.2,
        "seed": i,
        "ignore_eos": True,
        "logprobs": True,
        **fields,
    }


async def one(http: httpx.AsyncClient, i: int, stream: bool) -> Any:
    """Tokens and log-probabilities."""
    response = await http.post(CHAT, json=body(i, stream=stream))
    assert response.status_code == 200, response.text
    if not stream:
        [choice] = response.json()["choices"]
        return choice["message"]["content"], choice["logprobs"]["content"]
    text, entries = "", []
    for _, data in sse_events(response.text)[:-1]:
        [choice] = data["choices"]
        text += choice["delta"].get("content") or ""
        entries += (choice["logprobs"] or {"content": []})["content"]
    return text, entries


@pytest.fixture(scope="module")
def alone(talker_path: Path) -> list[Any]:
    """Each by itself, without a prefix cache."""
    gemma = gemmakv.Gemma.load(talker_path, prefix_cache=False)
    app = make_app(gemma)

    async def main() -> list[Any]:
        async with client(app) as http:
            return [await one(http, i, False) for i in range(STREAMS)]

    return asyncio.run(main())


@pytest.mark.parametrize("running", [1, 5, STREAMS])
def test_among_many(talker_path: Path, alone: list[Any], running: int) -> None:
    app = make_app(gemmakv.Gemma.load(talker_path), max_running=running)

    async def all_at_once(http: httpx.AsyncClient) -> list[Any]:
        work = [one(http, i, i % 2 == 0) for i in range(STREAMS)]
        return await asyncio.gather(*work)

    assert len({text for text, _ in alone}) == STREAMS
    for _ in range(2):  # then the cache has them
        assert in_loop(app, all_at_once) == alone
    assert app.service is not None
    stats = app.service.gemma.prefix_cache
    assert stats is not None and stats.stats().cached["ram"] > 0


def test_samples_among_many(app: App) -> None:
    async def main(http: httpx.AsyncClient) -> None:
        async def texts(n: int, seed: int) -> list[str]:
            fields = {"n": n, "seed": seed, "max_tokens": 20}
            response = await http.post(CHAT, json=body(0, **fields))
            return [c["message"]["content"] for c in response.json()["choices"]]

        together, *singles = await asyncio.gather(
            texts(4, 40), *[texts(1, 40 + i) for i in range(4)]
        )
        assert together == [text for [text] in singles]
        assert len(set(together)) == 4

    in_loop(app, main)
