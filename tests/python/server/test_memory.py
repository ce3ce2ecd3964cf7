"""A budget for keys and values, and guesses: what they cost is counted, and
what is said stays the same.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

import gemmakv
from gemmakv.cache._kv_cache import KVCache
from gemmakv.server.app import App
from support.asgi import NAME, get, in_loop, make_app, post, sse_events
from support.waits import wait_until

CHAT = "/v1/chat/completions"
CONTEXT = 512


def least(gemma: gemmakv.Gemma) -> int:
    """Bytes below which there is no server, as the error says."""
    with pytest.raises(ValueError, match="kv_cache_memory") as info:
        make_app(gemma, max_model_len=CONTEXT, kv_cache_memory=1)
    return max(map(int, re.findall(r"\d+", str(info.value))))


def metric(app: App, name: str) -> float:
    [value] = [
        line.split()[-1]
        for line in get(app, "/metrics").text.splitlines()
        if line.startswith(name + " ")
    ]
    return float(value)


def all_at_once(app: App, count: int, stream: bool = False) -> list[str]:
    async def one(http: httpx.AsyncClient, i: int) -> str:
        body = {
            "model": NAME, "max_tokens": 150, "ignore_eos": True, "seed": i,
            "messages": [{"role": "user", "content": f"{i} words " * 15}],
        }  # fmt: skip
        response = await http.post(CHAT, json={**body, "stream": stream})
        assert response.status_code == 200, response.text
        if stream:
            *frames, _ = [data for _, data in sse_events(response.text)]
            assert not any("error" in frame for frame in frames), frames[-1]
            return "".join(
                frame["choices"][0]["delta"].get("content") or ""
                for frame in frames
                if frame.get("choices")
            )
        content: str = response.json()["choices"][0]["message"]["content"]
        return content

    async def main(http: httpx.AsyncClient) -> list[str]:
        return await asyncio.gather(*[one(http, i) for i in range(count)])

    return in_loop(app, main)


@pytest.mark.slow
def test_requests_give_way_where_memory_is_full(talker_path: Path) -> None:
    gemma = gemmakv.Gemma.load(talker_path)
    plenty = make_app(gemma, max_model_len=CONTEXT)
    expected = all_at_once(plenty, 8)
    assert metric(plenty, "gemmakv_preemptions_total") == 0
    gemma = gemmakv.Gemma.load(talker_path)
    scarce = make_app(
        gemma, max_model_len=CONTEXT, kv_cache_memory=least(gemma)
    )

    def gives_way(stream: bool) -> bool:
        before = metric(scarce, "gemmakv_preemptions_total")
        assert all_at_once(scarce, 8, stream) == expected
        return metric(scarce, "gemmakv_preemptions_total") > before

    # Several times: what has ended frees its memory a moment later. On a busy
    # machine a request may have ended before the next one is sent.
    for stream in (False, True, False, True):
        wait_until(functools.partial(gives_way, stream))


@pytest.mark.slow
def test_what_has_ended_holds_no_memory(
    talker_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that gets late to what has ended left no memory for those that
    ran: streams failed in their midst.
    """
    late: list[KVCache] = []
    close = KVCache.close
    monkeypatch.setattr(KVCache, "close", lambda cache: late.append(cache))
    gemma = gemmakv.Gemma.load(talker_path)
    scarce = make_app(
        gemma, max_model_len=CONTEXT, kv_cache_memory=least(gemma)
    )
    for n, stream in itertools.product((1, 2), (False, True)):
        body = {
            "messages": [{"role": "user", "content": "x"}], "stream": stream,
            "ignore_eos": True, "max_tokens": CONTEXT * 7 // 8 // n, "n": n,
        }  # fmt: skip
        for _ in range(2):
            found = post(scarce, CHAT, body)
            assert found.status_code == 200, found.text
            assert "out_of_memory" not in found.text
        assert len(late) >= 2 * n
        while late:
            close(late.pop())


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_conversations_for_one_request(
    talker_path: Path, prefix_cache: bool
) -> None:
    """They keep their tokens, and can be gone on with, at a price."""
    gemma = gemmakv.Gemma.load(talker_path, prefix_cache=prefix_cache)
    prompt = list(range(10, 310))
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "seed": 4}
    expected, found = (
        gemmakv.create_kv_cache(gemma.config, 1024) for _ in range(2)
    )
    found._core.for_one_request = True
    assert not found.fork()._core.for_one_request
    for tokens in (prompt, [11, 12]):
        for how in ("whole", "stream"):
            said = []
            for cache in (expected, found):
                if how == "whole":
                    result = gemma.generate(cache, tokens, **options)
                else:
                    with gemma.stream(cache, tokens, **options) as stream:
                        for _ in stream:
                            pass
                        result = stream.result()
                said.append(list(result.token_ids))
            assert said[0] == said[1]
            assert found.tokens.tolist() == expected.tokens.tolist()
            assert found.nbytes + found.shared_nbytes == 0
            assert expected.nbytes + expected.shared_nbytes > 0


def test_a_whole_context_fits_the_least(talker_path: Path) -> None:
    gemma = gemmakv.Gemma.load(talker_path)
    app = make_app(gemma, max_model_len=CONTEXT, kv_cache_memory=least(gemma))
    for text in ("a", "b"):
        body = {"prompt": text, "ignore_eos": True, "n_predict": -1}
        found = post(app, "/completion", body)
        assert found.status_code == 200, found.text
        said = found.json()
        total = said["tokens_evaluated"] + said["tokens_predicted"]
        assert total == CONTEXT


def test_guesses_are_counted(talker_path: Path) -> None:
    body: dict[str, Any] = {
        "prompt": "one two three " * 12, "n_predict": 120, "temperature": 0,
        "ignore_eos": True, "return_tokens": True,
    }  # fmt: skip
    found = {}
    for how in ("off", "lookup"):
        gemma = gemmakv.Gemma.load(talker_path, speculate=how)
        app = make_app(gemma, max_model_len=CONTEXT)
        response = post(app, "/completion", body)
        assert response.status_code == 200, response.text
        found[how] = response.json()
        drafted = metric(app, "gemmakv_drafted_tokens_total")
        accepted = metric(app, "gemmakv_accepted_tokens_total")
        timings = found[how]["timings"]
        assert timings.get("draft_n", 0) == drafted
        assert timings.get("draft_n_accepted", 0) == accepted
        assert (drafted > 0) == (how == "lookup")
        assert drafted >= accepted
    assert found["off"]["tokens"] == found["lookup"]["tokens"]
