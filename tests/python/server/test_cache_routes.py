"""/v1/cache: what the prefix cache has, for whom, and how it stays."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv.server.apis import cache as _cache
from gemmakv.server.app import App
from support.asgi import USER, Exchange, get, make_app, post, until
from support.kept import KEYS, bearer, delete, error

CACHE = "/v1/cache"
TEXT = "one two three " * 20
CHAT = "/v1/chat/completions"
NOBODY: dict[str, str] = {}


@pytest.fixture
def own(talker_path: Path) -> Iterator[App]:
    yield from serving_own(talker_path, "8MiB")


def serving_own(path: Path, ram: str, **settings: Any) -> Iterator[App]:
    gemma = gemmakv.Gemma.load(
        path, prefix_cache=gemmakv.PrefixCache(ram=ram)
    )
    app = make_app(gemma, max_model_len=4096, **settings)
    yield app
    assert app.service is not None
    app.service.close()
    gemma.close()


def match(app: App, headers: Any = NOBODY, **body: Any) -> tuple[int, int]:
    response = post(app, CACHE + "/match", body, **headers)
    assert response.status_code == 200, response.text
    found = response.json()
    return found["prompt_tokens"], found["cached_tokens"]


def pin(app: App, headers: Any = NOBODY, **body: Any) -> dict[str, Any]:
    response = post(app, CACHE + "/pins", body, **headers)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_match_says_what_would_hit(own: App) -> None:
    length, cached = match(own, prompt=TEXT)
    assert cached == 0
    body = {"prompt": TEXT, "max_tokens": 1}
    assert post(own, "/v1/completions", body).status_code == 200
    cached = match(own, prompt=TEXT)[1]
    assert length > cached > 200
    found = post(own, "/v1/completions", body).json()
    details = found["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == cached
    said = [{"role": "user", "content": TEXT}]
    assert match(own, messages=said)[1] == 0
    body = {"messages": said, "max_tokens": 1}
    assert post(own, CHAT, body).status_code == 200
    assert match(own, messages=said)[1] > 200
    stats = get(own, CACHE).json()
    assert stats["tiers"] == ["ram"] and stats["ram_bytes"] == 8 << 20
    assert stats["stats"]["bytes"]["ram"] > 0


def test_pins_stay(own: App) -> None:
    made = pin(own, prompt=TEXT)
    assert made["tokens"] > 100 and made["bytes"] > 0
    assert match(own, prompt=TEXT)[1] == made["tokens"]
    assert get(own, CACHE + "/pins").json()["data"] == [made]
    path = f"{CACHE}/pins/{made['id']}"
    assert delete(own, path).json()["deleted"] is True
    assert error(delete(own, path), 404)["param"] == "pin"
    assert get(own, CACHE).json()["stats"]["pinned_bytes"] == 0


def test_a_system_message_is_pinned_for_whatever_follows(own: App) -> None:
    assert own.service is not None
    own.service.prompts.template = gemmakv.templates.GemmaTemplate()
    system = {"role": "system", "content": TEXT}
    made = pin(own, messages=[system])
    for text in ("hello", "7 days", "\n"):
        said = {"role": "user", "content": text}
        _, cached = match(own, messages=[system, said])
        assert cached >= made["tokens"] - 2 > 100


def test_full(talker_path: Path) -> None:
    for app in serving_own(talker_path, "256KiB"):
        found = error(
            post(app, CACHE + "/pins", {"prompt": "a b c " * 600}), 409
        )
        assert found["code"] == "pins_full"
        assert get(app, CACHE).json()["stats"]["pinned_bytes"] == 0
        assert get(app, CACHE + "/pins").json()["data"] == []


def test_each_key_has_its_own(talker_path: Path) -> None:
    one, two = (bearer(key) for key in KEYS)
    for app in serving_own(talker_path, "8MiB", api_keys=KEYS):
        made = pin(app, one, prompt=TEXT)
        assert match(app, one, prompt=TEXT)[1] == made["tokens"]
        assert match(app, two, prompt=TEXT)[1] == 0
        assert get(app, CACHE + "/pins", **two).json()["data"] == []
        path = f"{CACHE}/pins/{made['id']}"
        error(delete(app, path, **two), 404)
        refused = error(delete(app, CACHE, **one), 403)
        assert refused["code"] == "cache_is_shared"
        delete(app, path, **one)


def test_clear(own: App) -> None:
    pin(own, prompt=TEXT)
    assert error(delete(own, CACHE + "?tier=disk"), 400)["param"] == "tier"
    for query in ("teir=ram", "tier=ram&tier=ram", "tier=ram&x=1", "tier="):
        error(delete(own, f"{CACHE}?{query}"), 400)
    assert match(own, prompt=TEXT)[1] > 0
    assert delete(own, CACHE).json()["tiers"] == ["ram"]
    assert match(own, prompt=TEXT)[1] == 0
    assert get(own, CACHE + "/pins").json()["data"] == []
    assert get(own, CACHE).json()["stats"]["pinned_bytes"] == 0


def test_what_is_not_cleared_is_said(talker_path: Path) -> None:
    """A tier of a client that cannot tell what it holds."""

    class Client:
        def get_many(self, keys: list[str]) -> list[None]:
            return [None for _ in keys]

        def put_many(self, items: list[Any]) -> None:
            pass

        def has_many(self, keys: list[str]) -> list[bool]:
            return [False for _ in keys]

    gemma = gemmakv.Gemma.load(
        talker_path,
        prefix_cache=gemmakv.PrefixCache(ram="8MiB", remote=Client()),
    )
    app = make_app(gemma, max_model_len=4096)
    pin(app, prompt=TEXT)
    found = error(delete(app, CACHE), 503)
    assert found["code"] == "cache_not_cleared"
    assert "remote" in found["message"]
    assert match(app, prompt=TEXT)[1] == 0
    assert delete(app, CACHE + "?tier=ram").json()["tiers"] == ["ram"]
    assert app.service is not None
    app.service.close()
    gemma.close()


def test_off(talker_path: Path) -> None:
    gemma = gemmakv.Gemma.load(talker_path, prefix_cache=False)
    app = make_app(gemma)
    for response in (
        get(app, CACHE), delete(app, CACHE), get(app, CACHE + "/pins"),
        post(app, CACHE + "/match", {"prompt": "x"}),
        post(app, CACHE + "/pins", {"prompt": "x"}),
    ):  # fmt: skip
        assert error(response, 400)["code"] == "cache_off"


@pytest.mark.parametrize("route", ["/match", "/pins"])
@pytest.mark.parametrize(
    "body, name",
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": USER}, "prompt"),
        ({"prompt": "x", "tools": [{}]}, "tools"),
        ({"prompt": [1 << 40]}, "prompt"),
        ({"prompt": "long " * 4000}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "x", "content": "x"}]}, "messages[0].role"),
        ({"messages": USER, "tools": [{}]}, "tools[0]"),
    ],
)
def test_refused_by_name(app: App, route: str, body: Any, name: str) -> None:
    found = error(post(app, CACHE + route, body), 400)
    assert (found["param"] or "").startswith(name), found


def test_a_pin_waits_its_turn_and_ends_with_its_client(
    shared: gemmakv.Gemma,
) -> None:
    app = make_app(shared, max_running=1, max_model_len=600_000)

    async def main() -> None:
        body = {
            "messages": USER, "max_tokens": 500_000, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        running = Exchange(app, CHAT, body)
        await running.holds(b'"content"')
        waiting = Exchange(app, CACHE + "/pins", {"prompt": TEXT})
        service = app.service
        assert service is not None
        await until(lambda: service.admission.waiting == 1, "it waits")
        waiting.leave()
        await waiting.done()
        running.leave()
        await running.done()

    asyncio.run(main())
    assert get(app, CACHE + "/pins").json()["data"] == []


def test_a_client_that_goes_while_its_pin_is_made_leaves_none(
    own: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, made = (threading.Event() for _ in range(3))
    pinned = _cache._pinned

    def slowly(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        try:
            return pinned(*args)
        finally:
            made.set()

    monkeypatch.setattr(_cache, "_pinned", slowly)

    async def main() -> None:
        leaves = Exchange(own, CACHE + "/pins", {"prompt": TEXT})
        await until(begun.is_set, "the pin is being made")
        leaves.leave()
        await leaves.done()
        go_on.set()
        await until(made.is_set, "it is made")
        assert own.service is not None
        prefix = own.service.gemma.prefix_cache
        assert prefix is not None
        await until(
            lambda: prefix.stats().pinned_bytes == 0, "nothing is pinned"
        )

    asyncio.run(main())
    assert get(own, CACHE + "/pins").json()["data"] == []
