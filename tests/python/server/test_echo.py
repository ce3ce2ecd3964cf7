"""Log-probabilities of prompts: OpenAI's `echo` with `logprobs`, as programs
that measure models send it, and vLLM's `prompt_logprobs`.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv.generation._scores import log_softmax
from gemmakv.server.app import App
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

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PIECES = tiny_gguf.vocabulary()[0]
TEXT = "hello there"
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def ids_of(app: App, text: str = TEXT) -> list[int]:
    assert app.service is not None
    return [int(one) for one in app.service.prompts.text_ids(text)]


def ask(app: App, path: str = COMPLETIONS, **fields: Any) -> Any:
    said = {"messages": USER} if path == CHAT else {"prompt": TEXT}
    return post(app, path, {"model": NAME, "max_tokens": 1, **said, **fields})


def found(response: Any) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def expected(gemma: gemmakv.Gemma, ids: list[int]) -> Any:
    rows = gemma.logits(gemma.new_cache(), ids, all_positions=True)
    return log_softmax(rows)


def measured(choice: Any, context: int) -> tuple[float, bool]:
    """What lm-evaluation-harness makes of an answer: the log-likelihood of
    what follows the context, and whether the model would say it. The last
    token is the sampled one.
    """
    logprobs = choice["logprobs"]["token_logprobs"][context:-1]
    top = choice["logprobs"]["top_logprobs"][context:-1]
    greedy = all(one == max(t.values()) for one, t in zip(logprobs, top))
    return sum(logprobs), greedy


def test_as_a_harness_asks(shared: gemmakv.Gemma, app: App) -> None:
    prompts = [ids_of(app, text) for text in (TEXT, "he", "hello there you")]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1,
            "temperature": 0, "seed": 1234}  # fmt: skip
    whole = found(ask(app, **body))
    assert whole["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert [one["index"] for one in whole["choices"]] == [0, 1, 2]
    for ids, choice in zip(prompts, whole["choices"]):
        lists = choice["logprobs"]
        assert {len(lists[name]) for name in LISTS} == {len(ids) + 1}
        assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
        rows = expected(shared, ids)
        for context in range(1, len(ids)):
            score, greedy = measured(choice, context)
            places = range(context, len(ids))
            own = [rows[at - 1][ids[at]] for at in places]
            assert math.isclose(score, sum(own), abs_tol=1e-4)
            assert greedy == all(
                ids[at] == int(np.argmax(rows[at - 1])) for at in places
            )


def test_what_the_model_says_is_greedy(app: App) -> None:
    said = found(ask(app, max_tokens=6, logprobs=1, echo=True, temperature=0))
    text = said["choices"][0]["text"]
    assert text.startswith(TEXT)
    again = found(ask(app, prompt=text, logprobs=1, echo=True))["choices"][0]
    context = len(ids_of(app))
    assert measured(again, context)[1]
    lists, before = again["logprobs"], said["choices"][0]["logprobs"]
    np.testing.assert_allclose(
        lists["token_logprobs"][context:-1],
        before["token_logprobs"][context:],
        atol=1e-5,
    )


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("top", [0, 2])
def test_streams_and_whole_answers_agree(
    app: App, max_tokens: int, top: int
) -> None:
    body: dict[str, Any] = {
        "prompt": [TEXT, "hello"], "n": 2, "echo": True, "logprobs": top,
        "max_tokens": max_tokens, "temperature": 1.0, "seed": 3,
    }  # fmt: skip
    whole = found(ask(app, **body))
    plain = found(ask(app, **{**body, "logprobs": None}))
    usages = [one["usage"] for one in (whole, plain)]
    assert usages[0]["completion_tokens"] == 4 * max_tokens
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usages[0][name] == usages[1][name]
    response = ask(app, **body, stream=True)
    events = [data for _, data in sse_events(response.text)][:-1]
    for i, choice in enumerate(whole["choices"]):
        assert choice["text"] == plain["choices"][i]["text"]
        lists = choice["logprobs"]
        own = [
            one["logprobs"]
            for event in events
            for one in event["choices"]
            if one["index"] == i and one["logprobs"] is not None
        ]
        for name in LISTS:
            parts = [lists[name] for lists in own if lists[name] is not None]
            assert sum(parts, []) == (lists[name] or [])
        assert (lists["top_logprobs"] is None) == (top == 0)
        # A place where each token stands, but for control tokens.
        text = choice["text"]
        for token, offset in zip(lists["tokens"], lists["text_offset"]):
            assert text[offset:].startswith(token) or token == "<bos>"


def test_a_token_that_ends_the_text_is_listed(shared: gemmakv.Gemma) -> None:
    """All are, as the last one of a list counts as the sampled one."""
    app = make_app(shared, max_model_len=4096, default_seed=5)
    assert app.service is not None
    app.service.defaults["logit_bias"] = {
        one: 60.0 for one in shared.config.eos_ids
    }
    body = {"echo": True, "logprobs": 1}
    choice = found(ask(app, **body))["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["text"] == TEXT
    lists = choice["logprobs"]
    assert {len(lists[name]) for name in LISTS} == {len(ids_of(app)) + 1}
    response = ask(app, **body, stream=True)
    tokens = [
        token
        for _, data in sse_events(response.text)[:-1]
        for one in data["choices"]
        for token in (one["logprobs"] or {"tokens": []})["tokens"]
    ]
    assert tokens == lists["tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("top", [0, 1, 3])
def test_as_vllm_has_them(
    shared: gemmakv.Gemma, app: App, path: str, top: int
) -> None:
    whole = found(ask(app, path, prompt_logprobs=top))
    holder = whole if path == CHAT else whole["choices"][0]
    places = holder["prompt_logprobs"]
    assert app.service is not None
    ids = ids_of(app)
    if path == CHAT:
        ids = [int(one) for one in app.service.prompts.render(USER)]
    assert len(places) == len(ids) and places[0] is None
    rows = expected(shared, ids)
    for at, place in enumerate(places[1:], 1):
        order = np.argsort(-rows[at - 1], kind="stable").tolist()
        wanted = dict.fromkeys([ids[at], *order[:top]])
        assert [*map(int, place)] == [*wanted]
        for token, one in place.items():
            logprob = rows[at - 1][int(token)]
            assert math.isclose(one["logprob"], logprob, abs_tol=1e-5)
            assert one["rank"] == order.index(int(token)) + 1
            assert isinstance(one["decoded_token"], str)
    assert whole["choices"][0]["logprobs"] is None
    plain = found(ask(app, path))
    assert "prompt_logprobs" not in plain
    assert "prompt_logprobs" not in plain["choices"][0]


def test_both_at_once(app: App) -> None:
    body = {"echo": True, "logprobs": 1, "prompt_logprobs": 3}
    choice = found(ask(app, **body))["choices"][0]
    assert max(map(len, choice["logprobs"]["top_logprobs"][1:])) == 1
    assert {len(one) for one in choice["prompt_logprobs"][1:]} <= {3, 4}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": "1"}, "prompt_logprobs"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_refused(app: App, path: str, fields: Any, param: str) -> None:
    response = ask(app, path, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_prompt_that_is_one_token(app: App) -> None:
    [bos, *_] = ids_of(app)
    body = {"prompt": [bos], "echo": True, "logprobs": 2, "max_tokens": 0}
    choice = found(ask(app, **body, prompt_logprobs=1))["choices"][0]
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["token_logprobs"] == [None]


def test_many_at_once_and_beside_a_stream(app: App) -> None:
    """The answers are the same, and a stream that runs gives its tokens."""
    body = {"model": NAME, "prompt": TEXT, "echo": True, "logprobs": 2,
            "max_tokens": 2}  # fmt: skip
    alone = found(post(app, COMPLETIONS, body))["choices"]
    endless = {"model": NAME, "messages": USER, "stream": True,
               "max_tokens": 4000, "ignore_eos": True}  # fmt: skip

    async def work(http: Any) -> Any:
        stream = Exchange(app, CHAT, endless)
        await stream.holds(b'"content":"')
        answers = await asyncio.gather(
            *(http.post(COMPLETIONS, json=body) for _ in range(5))
        )
        assert not stream.task.done()
        stream.leave()
        await stream.done()
        return answers

    for response in in_loop(app, work):
        assert found(response)["choices"] == alone


def test_a_client_that_leaves_ends_it(app: App) -> None:
    async def work(http: Any) -> None:
        del http
        body = {"model": NAME, "prompt": TEXT * 200, "echo": True,
                "logprobs": 1}  # fmt: skip
        asked = Exchange(app, COMPLETIONS, body)
        await until(lambda: asked.is_taken, "the body is read")
        asked.leave()
        await asked.done()

    in_loop(app, work)
    assert app.service is not None and app.service.live == 0
    assert found(ask(app))["choices"]


def test_its_deadline(app: App) -> None:
    response = ask(app, echo=True, logprobs=1, deadline=0)
    assert response.status_code == 503, response.text
    assert response.json()["error"]["param"] == "deadline"
