"""Replies that follow a JSON schema, in each API's own words."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

import gemmakv
from gemmakv.chat import _tools
from gemmakv.generation import _trial
from gemmakv.generation._requests import requests_of
from gemmakv.server.app import App
from gemmakv.server.settings import Limits
from support import tiny_gguf
from support.asgi import (
    NAME,
    USER,
    Exchange,
    in_loop,
    make_app,
    post,
    sse_events,
    until,
)
from support.extras import needs
from support.schemas import SCHEMAS, UNSUPPORTED
from support.waits import LIMIT_S

pytestmark = needs("llguidance", "jsonschema")
CHAT, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/api/chat"
SCHEMA = SCHEMAS["list of objects"]
FORMAT = {"type": "json_schema",
          "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
PIECES = tiny_gguf.vocabulary()[0]
BIAS = {str(PIECES.index(c)): 6 for c in '"}]'}
SAID: dict[str, Any] = {
    "model": NAME, "messages": USER, "temperature": 1, "max_tokens": 150,
}  # fmt: skip


@pytest.fixture
def app(shared: gemmakv.Gemma) -> App:
    return make_app(shared, max_model_len=4096, default_seed=6)


def test_openai(app: App) -> None:
    import jsonschema

    body = {**SAID, "response_format": FORMAT, "logit_bias": BIAS}
    whole = post(app, CHAT, {**body, "n": 2}).json()
    for choice in whole["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    events = sse_events(post(app, CHAT, {**body, "stream": True}).text)
    text = "".join(
        data["choices"][0]["delta"].get("content") or ""
        for _, data in events[:-1]
    )
    assert text == whole["choices"][0]["message"]["content"]
    body["response_format"] = {"type": "json_object"}
    found = post(app, CHAT, body).json()["choices"][0]
    assert found["message"]["content"].startswith("{")


def test_anthropic(app: App) -> None:
    small = SCHEMAS["tagged union"]
    for name in ("output_format", "output_config"):
        form: Any = {"type": "json_schema", "schema": SCHEMAS["nested"]}
        if name == "output_config":
            form = {"format": form}
        found = post(app, MESSAGES, {**SAID, name: form, "max_tokens": 400})
        [block] = found.json()["content"]
        assert block["text"].startswith('{"a": {"b": {"c": {"d": ')
    bad = {**SAID, "output_config": {"format": {"type": "x", "schema": small}}}
    assert "output_config.format" in post(app, MESSAGES, bad).text


def test_ollama(app: App) -> None:
    import jsonschema

    body = {"model": NAME, "messages": USER, "stream": False,
            "options": {"num_predict": 60, "seed": 2}}  # fmt: skip
    found = post(app, OLLAMA, {**body, "format": SCHEMAS["enum"]}).json()
    value = json.loads(found["message"]["content"])
    jsonschema.validate(value, SCHEMAS["enum"])
    assert found["done_reason"] == "stop"
    found = post(app, OLLAMA, {**body, "format": "json"}).json()
    assert found["message"]["content"].startswith("{")


@pytest.mark.parametrize("keyword", ["uniqueItems", "not", "if"])
def test_unsupported_schema_is_a_400(app: App, keyword: str) -> None:
    schema = UNSUPPORTED[keyword]
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    response = post(app, CHAT, {**SAID, "response_format": form})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == f"response_format.json_schema.schema.{keyword}"
    response = post(app, OLLAMA, {**SAID, "format": schema})
    assert response.status_code == 400 and keyword in response.text
    assert response.json()["error"].startswith(f"format.{keyword}: ")
    form = {"format": {"type": "json_schema", "schema": schema}}
    response = post(app, MESSAGES, {**SAID, "output_config": form})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith(f"output_config.format.schema.{keyword}: ")


def compiling(app: App, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of requests whose grammar is looked at from now on."""
    service = app.service
    assert service is not None
    found: list[str] = []
    real = service.grammars.compile

    async def noting(label: str, options: Any) -> Any:
        found.append(label)
        return await real(label, options)

    monkeypatch.setattr(service.grammars, "compile", noting)
    return found


class Held:
    """Holds up what takes all the time that a grammar has, and with `all` any,
    after its process has answered and before that is known here.
    """

    def __init__(
        self, app: App, monkeypatch: pytest.MonkeyPatch, *, all: bool
    ) -> None:
        assert app.service is not None
        self._all = all
        self._over = threading.Event()
        trials = requests_of(app.service.gemma).compiler._trials
        self._real = trials.refusals
        monkeypatch.setattr(trials, "refusals", self._refusals)

    def _refusals(self, *tried: Any) -> Any:
        found = self._real(*tried)
        if self._all or found is None:
            assert self._over.wait(LIMIT_S)
        return found

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        self._over.set()


def form_of(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def test_hostile_schema_stalls_nobody(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop and other requests go on while one is compiled."""
    slow = {"type": "object", "properties": {
        f"k{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i + 1}}}$"}
        for i in range(900)}}  # fmt: skip
    body = {**SAID, "response_format": form_of(slow), "max_tokens": 2}
    plain = {**SAID, "max_tokens": 2}
    begun = compiling(app, monkeypatch)
    held = Held(app, monkeypatch, all=True)

    async def work(http: Any) -> tuple[list[str], list[int]]:
        order = []

        async def one(name: str, body: Any) -> int:
            response = await http.post(CHAT, json=body)
            order.append(name)
            status: int = response.status_code
            return status

        begin = asyncio.create_task(one("slow", body))
        with held:
            await until(lambda: bool(begun), "it is compiled")
            codes = [await one("plain", plain)]
        codes.append(await begin)
        return order, codes

    order, codes = in_loop(app, work)
    assert order == ["plain", "slow"]
    assert codes[0] == 200 and codes[1] in (200, 400)


@pytest.mark.slow
def test_streams_go_on_while_one_takes_all_its_time(
    shared: gemmakv.Gemma, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of one key: the other key's schema is compiled meanwhile, and a
    stream's tokens come.
    """
    keys = ("one", "two")

    async def ready(http: Any) -> None:
        """Starts two processes that compile, which the others find."""
        for found in await asyncio.gather(
            *(ask(http, key, {"const": key}) for key in keys)
        ):
            assert found.status_code == 200, found.text

    async def ask(http: Any, key: str, schema: Any) -> Any:
        return await http.post(
            CHAT,
            json={**SAID, "response_format": form_of(schema)},
            headers={"authorization": f"Bearer {key}"},
        )

    in_loop(make_app(shared, max_model_len=4096, api_keys=keys), ready)
    app = make_app(
        shared, max_model_len=600_000, api_keys=keys,
        limits=Limits(compile_s=0.5),
    )  # fmt: skip
    begun = compiling(app, monkeypatch)
    held = Held(app, monkeypatch, all=False)
    # Seconds of a processor end them, however long these take.
    monkeypatch.setattr(_trial, "_WALL", LIMIT_S / 0.5)
    numbers = {
        f"p{i}": {"type": "integer", "multipleOf": 99_991 + 2 * i}
        for i in range(1500)
    }
    hostile = {"type": "object", "properties": numbers}
    stream = {
        **SAID, "stream": True, "max_tokens": 500_000, "ignore_eos": True,
    }  # fmt: skip
    order: list[str] = []

    async def work(http: Any) -> Any:
        async def one(name: str, key: str, schema: Any) -> Any:
            found = await ask(http, key, schema)
            order.append(name)
            return found

        shown = Exchange(app, CHAT, stream, {"authorization": "Bearer two"})
        await shown.holds(b'"content":"')
        tasks = [
            asyncio.create_task(one(f"slow {i}", "one", hostile))
            for i in (0, 1)
        ]
        with held:
            await until(lambda: len(begun) == 2, "both are compiled")
            before = len(shown.data)
            await until(lambda: len(shown.data) > before, "the stream goes on")
            found = await one("quick", "two", {"enum": [1, 2]})
        shown.leave()
        await shown.done()
        refused = [await task for task in tasks]
        return found, refused

    found, refused = in_loop(app, work)
    assert order[0] == "quick" and found.status_code == 200
    for one in refused:
        assert one.status_code == 400
        error = one.json()["error"]
        assert error["param"] == "response_format"
        assert "0.5 s" in error["message"]


class Name(str):
    """Counts what it is compared with."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)


def test_many_tools_are_told_apart_at_once(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names were compared each with each, on the event loop."""
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": Name(f"t{i}")}}
        for i in range(300)
    ]
    # Or copies would be compared.
    monkeypatch.setattr(_tools, "plain_json", lambda name, tool: tool)
    use = _tools.tool_use(tools)
    assert use is not None
    assert all(type(one["function"]["name"]) is Name for one in use.tools)
    assert Name.compared < 10 * len(tools)
    again = post(app, CHAT, {**SAID, "tools": [*tools[:3], tools[1]]})
    message = again.json()["error"]["message"]
    assert "tools[3]" in message and "'t1'" in message


def test_constrained_beside_free(app: App) -> None:
    """The same tokens as alone."""
    bodies = [
        {**SAID, "max_tokens": 24},
        {**SAID, "response_format": FORMAT, "max_tokens": 24},
        {**SAID, "response_format": {"type": "json_object"},
         "max_tokens": 24, "stream": True},
    ]  # fmt: skip
    alone = [_said(post(app, CHAT, body)) for body in bodies]

    async def work(http: Any) -> list[Any]:
        return list(
            await asyncio.gather(
                *(http.post(CHAT, json=body) for body in bodies * 2)
            )
        )

    together = [_said(response) for response in in_loop(app, work)]
    assert together == alone * 2


def _said(response: Any) -> Any:
    if response.headers["content-type"] != "text/event-stream":
        return response.json()["choices"]
    return [
        data["choices"] for _, data in sse_events(response.text)[:-1]
    ]
