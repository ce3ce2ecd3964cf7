"""Servers in this process that keep conversations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import gemmakv
from gemmakv.conversations._store import Conversations
from gemmakv.server.app import App
from gemmakv.server.service.history import History
from support.asgi import in_loop, make_app

KEYS = ("one", "two")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def serving(
    gemma: gemmakv.Gemma, folder: Path, **settings: Any
) -> Iterator[App]:
    """An application that keeps conversations, until it is closed."""
    chosen: dict[str, Any] = {
        "max_model_len": 4096, "default_max_tokens": 8, "default_seed": 5,
    }  # fmt: skip
    app = make_app(gemma, **{**chosen, **settings})
    assert app.service is not None
    History(app.service, Conversations.open(folder))
    yield app
    app.service.close()


def history(app: App) -> History:
    assert app.service is not None
    assert isinstance(app.service.keeper, History)
    return app.service.keeper


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return dict(response.json()["error"])


def prompts_of(app: App, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Token ids of the prompts that run from now on."""
    found: list[list[int]] = []
    service = app.service
    assert service is not None
    real = service.prompts.prompt_ids

    async def noting(*args: Any) -> Any:
        ids, dropped = await real(*args)
        found.extend(one.tolist() for one in ids)
        return ids, dropped

    monkeypatch.setattr(service.prompts, "prompt_ids", noting)
    return found


def delete(app: App, path: str, **headers: str) -> httpx.Response:
    return in_loop(app, lambda http: http.delete(path, headers=headers))
