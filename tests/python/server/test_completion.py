"""llama-server's /completion and /slots."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import gemmakv
from gemmakv.server.app import App
from gemmakv.server.service.threads import count_texts
from support.asgi import Exchange, get, make_app, post, sse_events

PATH = "/completion"
SAID: dict[str, Any] = {
    "prompt": "hello there", "n_predict": 6, "temperature": 1, "seed": 3,
}  # fmt: skip
TIMINGS = {
    "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms",
    "prompt_per_second", "predicted_n", "predicted_ms",
    "predicted_per_token_ms", "predicted_per_second",
}  # fmt: skip
DRAFTS = {"draft_n", "draft_n_accepted"}  # where guesses were made


def complete(app: App, **fields: Any) -> Any:
    response = post(app, PATH, {**SAID, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(app: App, **fields: Any) -> list[dict[str, Any]]:
    response = post(app, PATH, {**SAID, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [data for _, data in sse_events(response.text)]


def test_whole(app: App, shared: gemmakv.Gemma) -> None:
    expected = shared.generate(
        gemmakv.create_kv_cache(shared.config), "hello there",
        max_tokens=6, temperature=1, seed=3,
    )  # fmt: skip
    found = complete(app, return_tokens=True)
    assert found["content"] == expected.text
    assert found["tokens"] == list(expected.token_ids)
    assert (found["stop"], found["stop_type"]) == (True, "limit")
    assert found["prompt"] == "hello there"
    assert found["tokens_predicted"] == 6
    assert found["tokens_evaluated"] == expected.usage.prompt_tokens
    assert found["truncated"] is False
    assert found["generation_settings"]["seed"] == 3
    assert complete(app)["tokens"] == []


def test_timings(app: App) -> None:
    text = "one two three " * 20
    complete(app, prompt=text)
    again = complete(app, prompt=text)
    took = again["timings"]
    assert set(took) - DRAFTS == TIMINGS
    assert took["cache_n"] == again["tokens_cached"] > 0
    assert took["cache_n"] + took["prompt_n"] == again["tokens_evaluated"]
    fresh = complete(app, prompt=text, cache_prompt=False)
    assert fresh["tokens_cached"] == 0
    assert fresh["content"] == again["content"]


def test_stream_says_the_same(app: App) -> None:
    whole = complete(app, return_tokens=True)
    *chunks, last = stream(app)
    assert not any(chunk["stop"] for chunk in chunks)
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    tokens = [token for chunk in chunks for token in chunk["tokens"]]
    assert tokens == whole["tokens"]
    assert last["stop"] is True and last["content"] == ""
    for name in ("stop_type", "tokens_predicted", "prompt", "model"):
        assert last[name] == whole[name]
    assert set(last["timings"]) - DRAFTS == TIMINGS


def test_stream_has_the_token_that_ends_it(
    app: App, shared: gemmakv.Gemma
) -> None:
    end = shared.config.eos_ids[0]
    bias = {"logit_bias": [[end, 1000]]}
    whole = complete(app, return_tokens=True, **bias)
    assert (whole["tokens"], whole["stop_type"]) == ([end], "eos")
    chunks = stream(app, **bias)
    assert [token for chunk in chunks for token in chunk["tokens"]] == [end]


def test_prompts(app: App, shared: gemmakv.Gemma) -> None:
    """Texts, token ids, both in one, and several of them."""
    assert shared.tokenizer is not None
    ids = [shared.config.bos_id, *shared.tokenizer.encode("hello there")]
    one = complete(app)["content"]
    assert complete(app, prompt=ids)["content"] == one
    mixed = ["hello", *shared.tokenizer.encode(" there")]
    if [*shared.tokenizer.encode("hello"), *mixed[1:]] == ids[1:]:
        assert complete(app, prompt=mixed)["content"] == one
    several = complete(app, prompt=["hello there", ids, "the"])
    assert [x["index"] for x in several] == [0, 1, 2]
    assert [x["content"] for x in several[:2]] == [one, one]
    assert several[2]["content"] == complete(app, prompt="the")["content"]
    chunks = stream(app, prompt=["hello there", "the"])
    for i in range(2):
        text = "".join(c["content"] for c in chunks if c["index"] == i)
        assert text == several[2 * i]["content"]


def test_control_tokens_and_one_bos(app: App, shared: gemmakv.Gemma) -> None:
    said = {"messages": [{"role": "user", "content": "hello there"}]}
    prompt = post(app, "/apply-template", said).json()["prompt"]
    found = complete(app, prompt=prompt)
    ids = shared.apply_chat_template(said["messages"])
    assert found["tokens_evaluated"] == len(ids)
    text = complete(app, prompt="<eos>x")["tokens_evaluated"]
    assert text == 3


def test_one_bos_in_other_routes(app: App) -> None:
    for prompt in ("hello there", "<bos>hello there"):
        body = {"prompt": prompt, "max_tokens": 1, "parse_special": True}
        usage = post(app, "/v1/completions", body).json()["usage"]
        assert usage["prompt_tokens"] == complete(app)["tokens_evaluated"]


def test_ends(app: App) -> None:
    first = complete(app, n_predict=8)["content"]
    found = complete(app, n_predict=8, stop=[first[2]])
    assert found["content"] == first[:2]
    assert found["stop_type"] == "word"
    assert found["stopping_word"] == first[2]
    assert complete(app, n_predict=0)["tokens_predicted"] == 0


def test_as_much_as_fits(shared: gemmakv.Gemma) -> None:
    app = make_app(shared, max_model_len=64)
    for more in ({"n_predict": -1}, {"n_predict": None}, {"n_predict": -2}):
        found = complete(app, ignore_eos=True, **more)
        total = found["tokens_evaluated"] + found["tokens_predicted"]
        assert total == 64


def test_probabilities(app: App) -> None:
    found = complete(app, n_probs=2)
    entries = found["completion_probabilities"]
    assert len(entries) == 6
    for entry in entries:
        top = entry["top_logprobs"]
        assert len(top) == 2 and {"id", "token", "bytes", "logprob"} == set(
            top[0]
        )
    ids = complete(app, return_tokens=True)["tokens"]
    assert [entry["id"] for entry in entries] == ids
    chunks = stream(app, n_probs=1)[:-1]
    assert [c["completion_probabilities"][0]["id"] for c in chunks] == ids


def test_bias(app: App) -> None:
    [first, *_] = complete(app, return_tokens=True)["tokens"]
    for bias in ([[first, False]], {str(first): False}, [[first, -1e9]]):
        found = complete(app, logit_bias=bias, return_tokens=True)
        assert first not in found["tokens"]


def test_json_schema(app: App) -> None:
    pytest.importorskip("llguidance", reason="the extra `grammar`")
    schema = {"enum": [[], {}]}
    found = complete(app, json_schema=schema, n_predict=40)
    assert found["content"] in ("[]", "{}") and found["stop_type"] == "eos"
    bad = post(app, PATH, {**SAID, "json_schema": {"not": {}}})
    assert bad.status_code == 400
    assert bad.json()["error"]["message"].startswith("json_schema")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1 << 30]}, "prompt"),
        ({"prompt": {"prompt_string": "x"}}, "prompt"),
        ({"n_predict": -3}, "n_predict"),
        ({"n_probs": 21}, "n_probs"),
        ({"logit_bias": [[5, 1], ["5", 2]]}, "logit_bias 5"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias 5"),
        ({"temperature": -1}, "temperature"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 32}, "repeat_last_n"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"mirostat": 2}, "mirostat"),
        ({"logit_bias": [["x", 1]]}, "logit_bias"),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"logit_bias": True}, "logit_bias"),
        ({"n_cmpl": 2}, "n_cmpl"),
        ({"session": "x"}, "session"),
        ({"prompt": "long " * 4000}, "prompt"),
    ],
)
def test_refused_by_name(app: App, fields: dict[str, Any], words: str) -> None:
    response = post(app, PATH, {**SAID, **fields})
    assert response.status_code == 400, response.text
    found = response.json()["error"]
    assert all(one in found["message"] for one in words.split()), found
    assert found["code"] == 400


def test_progress_of_the_prompt(app: App) -> None:
    """It rises from what the cache had to all of it, before any text."""
    fields = {"prompt": "one two three " * 60, "return_progress": True}
    told = [chunk.get("prompt_progress") for chunk in stream(app, **fields)]
    count = sum(one is not None for one in told)
    assert count and None not in told[:count]
    assert not any("prompt_progress" in chunk for chunk in stream(app))
    again = stream(app, **fields)
    said = [c["prompt_progress"] for c in again if "prompt_progress" in c]
    total, cached = again[-1]["tokens_evaluated"], again[-1]["tokens_cached"]
    done = [one["processed"] for one in said]
    assert done == sorted(set(done)) and done[-1] == total > cached > 0
    assert said[-1]["cache"] == cached and said[-1]["time_ms"] >= 0
    assert {one["total"] for one in said} == {total}
    whole = complete(app, **fields)  # no stream: nothing to tell
    assert whole["content"] == "".join(chunk["content"] for chunk in again)


def test_client_vanishes(app: App) -> None:
    async def main() -> None:
        body = {**SAID, "n_predict": -1, "ignore_eos": True, "stream": True}
        running = Exchange(app, PATH, body)
        await running.holds(b'"content"')
        running.leave()
        await running.done()

    asyncio.run(main())
    assert app.service is not None
    assert app.service.live == app.service.admission.running == 0


def test_slots(shared: gemmakv.Gemma) -> None:
    app = make_app(shared, max_running=2, max_model_len=100_000)

    async def main() -> tuple[Any, Any]:
        running = [
            Exchange(app, PATH, {**SAID, "n_predict": 90_000, "stream": True,
                                 "ignore_eos": True})
            for _ in "12"
        ]  # fmt: skip
        for one in running:
            await one.holds(b'"content"')
        seen = []
        for query in (b"", b"fail_on_no_slot=1"):
            asked = Exchange(app, "/slots", b"", method="GET", query=query)
            await asked.done()
            seen.append((asked.status, asked.data))
        for one in running:
            one.leave()
            await one.done()
        return seen[0], seen[1]

    (status, data), (full, said) = asyncio.run(main())
    assert status == 200 and data.count(b'"is_processing":true') == 2
    assert full == 503 and b"slots" in said
    idle = get(app, "/slots?fail_on_no_slot=1").json()
    assert [slot["is_processing"] for slot in idle] == [False, False]
    assert {slot["n_ctx"] for slot in idle} == {100_000}


def test_timings_of_the_others(app: App) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    found = post(app, "/v1/chat/completions", body).json()
    assert found["timings"]["predicted_n"] == 3
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = post(app, "/v1/chat/completions", body)
    frames = [data for _, data in sse_events(response.text)]
    assert set(frames[-2]["timings"]) - DRAFTS == TIMINGS


def test_how_long_a_request_is() -> None:
    """What is short stays on the event loop; nothing long may."""
    assert count_texts("word", 9) == 4
    assert count_texts([1, 2, 3], 9) == 2 * 3
    message = {"role": "user", "content": [{"type": "text", "text": "x" * 50}]}
    assert 50 < count_texts([message], 100) < 100
    for long in ("x" * 101, [1] * 101, [[1] * 60, [1] * 60], [message] * 2):
        assert count_texts(long, 100) > 100
    assert count_texts((None, object(), b"x" * 99), 100) > 100
