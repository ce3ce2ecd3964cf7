"""Clients that go away, wherever their request is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

import gemmakv
from gemmakv.server.app import App
from support.asgi import (
    NAME,
    USER,
    Exchange,
    make_app,
    post,
    steps_at_rest,
    steps_of,
    until,
)

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {
    "model": NAME,
    "messages": USER,
    "max_tokens": 100_000,
    "ignore_eos": True,
}
LEFT_EARLY = LONG["max_tokens"] // 2  # steps: a reply that ends takes more
ENDLESS_PROMPT = [{"role": "user", "content": "ab" * 100_000}]


@pytest.fixture
def one_row(shared: gemmakv.Gemma) -> App:
    """With one row, so that the second request waits."""
    return make_app(shared, max_running=1, default_seed=5)


def run(work: Awaitable[None]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work, 120)

    asyncio.run(main())


def service(app: App) -> Any:
    assert app.service is not None
    return app.service


def the_row(app: App) -> AbstractAsyncContextManager[None]:
    """Holds the one row of an engine that is idle."""
    held: AbstractAsyncContextManager[None] = service(app).admission.slot(
        "somebody", 1, None
    )
    return held


async def gone(app: App, exchange: Exchange) -> None:
    """The client leaves, and nothing of its request is left soon."""
    exchange.leave()
    await exchange.done()
    assert service(app).live == 0
    assert service(app).admission.running == 0
    [cancelled] = service(app).counts.cancelled.collect()
    assert [one.value for one in cancelled.samples] == [1]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_decoding(shared: gemmakv.Gemma, stream: bool, n: int) -> None:
    app = make_app(shared)

    async def main() -> None:
        exchange = Exchange(app, CHAT, {**LONG, "stream": stream, "n": n})
        steps = steps_of(shared)
        if stream:
            await exchange.holds(b'"content":"')
            assert b"[DONE]" not in exchange.data
        await until(lambda: steps_of(shared) > steps + 20, "it decoded")
        await gone(app, exchange)

    before = steps_of(shared)
    run(main())
    assert steps_at_rest(shared) < before + LEFT_EARLY


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_is_read(shared: gemmakv.Gemma, stream: bool, n: int) -> None:
    app = make_app(shared)
    body = {**LONG, "messages": ENDLESS_PROMPT, "stream": stream, "n": n}

    async def main() -> None:
        steps = steps_of(shared)
        exchange = Exchange(app, CHAT, body)
        # One step may be the last of a request that left before.
        await until(lambda: steps_of(shared) > steps + 1, "it was read")
        await gone(app, exchange)
        assert b'"content":"a' not in exchange.data

    before = steps_of(shared)
    run(main())
    assert steps_at_rest(shared) < before + LEFT_EARLY


def test_queued(one_row: App) -> None:
    async def main() -> None:
        first = Exchange(one_row, CHAT, {**LONG, "stream": True})
        await first.holds(b'"role"')
        second = Exchange(one_row, CHAT, LONG)
        admission = service(one_row).admission
        await until(lambda: admission.waiting == 1, "it waited")
        second.leave()
        await second.done()
        assert admission.waiting == 0 and admission.running == 1
        assert not second.data
        first.leave()
        await first.done()
        assert admission.running == 0

    run(main())
    found = post(one_row, CHAT, {**LONG, "max_tokens": 2})
    assert found.status_code == 200


def test_while_the_body_comes(app: App) -> None:
    async def main() -> None:
        exchange = Exchange(app, CHAT, b"{", whole=False)
        await until(lambda: exchange.is_taken, "it was read")
        assert not exchange.task.done()
        exchange.leave()
        await exchange.done()
        assert not exchange.status

    run(main())


def test_at_every_event(app: App) -> None:
    """A stream that is cut behind any of its frames leaves nothing behind."""
    body = {**LONG, "max_tokens": 8, "stream": True, "seed": 3}
    whole = post(app, CHAT, body).content
    frames = whole.count(b"\n\n")
    assert frames >= 8

    async def cut(after: int) -> None:
        exchange = Exchange(app, CHAT, body, leaves_after=after)
        await exchange.done()
        assert service(app).live == 0
        assert service(app).admission.running == 0

    for after in range(1, frames + 2):
        run(cut(after))
    again = post(app, CHAT, body)
    assert again.status_code == 200
    assert again.content.count(b"\n\n") == frames


def test_one_leaves_others_stay(app: App) -> None:
    body = {**LONG, "max_tokens": 60, "seed": 3}
    alone = post(app, CHAT, body).json()["choices"]

    async def main() -> None:
        stays = [Exchange(app, CHAT, body) for _ in range(3)]
        leaves = [Exchange(app, CHAT, {**LONG, "stream": True}) for _ in "123"]
        for exchange in leaves:
            await exchange.holds(b'"role"')
            exchange.leave()
        for exchange in [*stays, *leaves]:
            await exchange.done()
        for exchange in stays:
            assert json.loads(exchange.data)["choices"] == alone

    run(main())


def test_full_queue_says_when(one_row: App) -> None:
    app = one_row
    service(app).admission.max_queue = 1

    async def main() -> None:
        first = Exchange(app, CHAT, {**LONG, "stream": True})
        await first.holds(b'"role"')
        second = Exchange(app, CHAT, {**LONG, "max_tokens": 2})
        admission = service(app).admission
        await until(lambda: admission.waiting == 1, "it waited")
        third = Exchange(app, CHAT, {**LONG, "stream": True})
        await third.done()
        assert third.status == 429
        assert b"rate_limit_exceeded" in third.data
        first.leave()
        await first.done()
        await second.done()
        assert second.status == 200

    run(main())


def test_deadlines(one_row: App) -> None:
    found = post(one_row, CHAT, {**LONG, "deadline": 0.2})
    assert found.status_code == 200
    assert found.json()["choices"][0]["finish_reason"] == "length"

    def said(prompt: Any, n: int, seconds: float) -> set[str]:
        app = make_app(
            service(one_row).gemma, request_timeout=seconds, max_running=2
        )
        body = {**LONG, "n": n, "messages": prompt}
        choices = post(app, CHAT, body).json()["choices"]
        assert [c["finish_reason"] for c in choices] == ["length"] * n
        return {c["message"]["content"] for c in choices}

    for n in (1, 2):
        assert said(ENDLESS_PROMPT, n, 0.1) == {""}, "it ends in the prompt"
        # In the reply, once the machine has the time to begin it.
        times = (0.1 * 2**i for i in range(8))
        assert any(said(USER, n, seconds) != {""} for seconds in times)

    async def main() -> None:
        async with the_row(one_row):
            second = Exchange(one_row, CHAT, {**LONG, "deadline": 0.1})
            await second.done()
            assert second.status == 503
            assert b"deadline_exceeded" in second.data

    run(main())


def test_keys_take_turns(shared: gemmakv.Gemma) -> None:
    """One with many requests does not keep one with one waiting."""
    app = make_app(shared, max_running=1, api_keys=("many", "few"))
    ended: list[str] = []

    async def main() -> None:
        async def come(key: str) -> None:
            body = {**LONG, "max_tokens": 5}
            exchange = Exchange(app, CHAT, body, {"x-api-key": key})
            await exchange.done()
            assert exchange.status == 200
            ended.append(key)

        body = {**LONG, "stream": True}
        first = Exchange(app, CHAT, body, {"x-api-key": "many"})
        await first.holds(b'"role"')
        admission = service(app).admission
        tasks = [asyncio.ensure_future(come("many")) for _ in range(8)]
        await until(lambda: admission.waiting == 8, "all waited")
        tasks.append(asyncio.ensure_future(come("few")))
        await until(lambda: admission.waiting == 9, "it waited, too")
        first.leave()
        await asyncio.gather(first.task, *tasks)
        assert len(ended) == 9
        assert ended.index("few") <= 1

    run(main())


def test_abort_tells_everybody(one_row: App) -> None:
    async def main() -> None:
        streamed = Exchange(one_row, CHAT, {**LONG, "stream": True})
        await streamed.holds(b'"role"')
        queued = Exchange(one_row, CHAT, LONG)
        admission = service(one_row).admission
        await until(lambda: admission.waiting == 1, "it waited")
        service(one_row).drain()
        late = Exchange(one_row, CHAT, LONG)
        await late.done()
        assert late.status == 503
        service(one_row).abort()
        await streamed.done()
        await queued.done()
        assert queued.status == 503
        assert b'"code":"server_stopping"' in streamed.data
        assert service(one_row).live == 0

    run(main())


def test_pings_in_silence(shared: gemmakv.Gemma) -> None:
    app = make_app(shared, ping_s=0.05)
    body = {**LONG, "messages": ENDLESS_PROMPT, "stream": True}

    async def main() -> None:
        exchange = Exchange(app, CHAT, body)
        await exchange.holds(b": ping\n\n: ping\n\n")
        exchange.leave()
        await exchange.done()
        del body["ignore_eos"]  # which this route does not take
        other = Exchange(app, "/v1/messages", body)
        await other.holds(b"event: ping\n" + b'data: {"type":"ping"}\n\nevent')
        other.leave()
        await other.done()

    run(main())


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/messages", "/api/chat", "/v1/responses", "/completion"]
)
def test_a_long_wait_has_a_head(shared: gemmakv.Gemma, path: str) -> None:
    """Streams that waited in the queue said nothing at all."""
    app = make_app(shared, ping_s=0.05, max_running=1)
    body: dict[str, Any] = {**LONG, "max_tokens": 2}
    del body["ignore_eos"]  # which most of the routes do not take
    if path == "/v1/responses":
        body = {"input": "hi", "max_output_tokens": 2}
    elif path == "/completion":
        body = {"prompt": "hi", "n_predict": 2}
    elif path == "/api/chat":
        body |= {"options": {"num_predict": 2}}

    async def main() -> None:
        async with the_row(app):
            waits = Exchange(app, path, {**body, "stream": True})
            if path == "/api/chat":  # has no pings
                await until(lambda: waits.status == 200, "it has a head")
                assert not waits.data
            else:
                await waits.holds(b": ping\n\n: ping\n\n")
                assert waits.data.replace(b": ping\n\n", b"") == b""
            assert service(app).admission.waiting == 1
        await waits.done()
        assert waits.status == 200
        ends = {
            CHAT: b"[DONE]", "/v1/messages": b"message_stop",
            "/api/chat": b'"done":true', "/completion": b'"stop":true',
            "/v1/responses": b"response.incomplete",
        }  # fmt: skip
        assert ends[path] in waits.data

    run(main())


def test_what_fails_after_a_long_wait_is_an_event(
    shared: gemmakv.Gemma,
) -> None:
    async def is_event(seconds: float) -> bool:
        app = make_app(shared, ping_s=0.05, max_running=1)
        body = {**LONG, "stream": True, "deadline": seconds}
        async with the_row(app):
            late = Exchange(app, CHAT, body)
            await late.done()
        [rejected] = service(app).counts.rejected.collect()
        assert [one.value for one in rejected.samples] == [1]
        if late.status == 503:  # its time was over before it waited
            return False
        assert late.status == 200
        assert late.data.startswith(b": ping\n\n")
        assert b'"code":"deadline_exceeded"' in late.data
        return True

    async def main() -> None:
        # Once the machine has the time to let it wait.
        for seconds in (1, 2, 4, 8, 16, 32):
            if await is_event(seconds):
                return
        raise AssertionError("it never waited")

    run(main())
