"""Ollama's routes, in its client's types; and those of llama-server."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv.server.app import App
from support.asgi import NAME, USER, get, in_loop, make_app, post
from support.extras import needs

pytestmark = needs("ollama")

SAID = {"temperature": 1, "num_predict": 6}


def lines(app: App, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = post(app, path, body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_chat(app: App, shared: gemmakv.Gemma) -> None:
    import ollama

    expected = shared.chat(USER, temperature=1, seed=5, max_tokens=6)
    body = {"model": NAME, "messages": USER, "options": SAID, "tools": []}
    found = lines(app, "/api/chat", body)
    parsed = [ollama.ChatResponse.model_validate(one) for one in found]
    assert "".join(p.message.content or "" for p in parsed) == expected.text
    assert [p.done for p in parsed] == [False] * (len(parsed) - 1) + [True]
    whole = post(app, "/api/chat", {**body, "stream": False}).json()
    last = ollama.ChatResponse.model_validate(whole)
    assert last.message.content == expected.text
    for end in (parsed[-1], last):
        assert end.done_reason == "length"
        assert end.prompt_eval_count == shared.count_tokens(USER)
        assert end.eval_count == 6
        assert end.total_duration and end.eval_duration is not None
        assert end.total_duration >= end.eval_duration > 0


def test_generate(app: App, shared: gemmakv.Gemma) -> None:
    import ollama

    body = {"model": NAME, "prompt": "hello there", "options": SAID}
    found = lines(app, "/api/generate", body)
    parsed = [ollama.GenerateResponse.model_validate(one) for one in found]
    expected = shared.chat(USER, temperature=1, seed=5, max_tokens=6)
    assert "".join(p.response for p in parsed) == expected.text
    raw = post(app, "/api/generate", {**body, "raw": True, "stream": False})
    cache = gemmakv.create_kv_cache(shared.config)
    expected = shared.generate(
        cache, "hello there", temperature=1, seed=5, max_tokens=6
    )
    assert raw.json()["response"] == expected.text
    system = post(
        app, "/api/generate", {**body, "system": "S", "stream": False}
    )
    expected = shared.chat(
        [{"role": "system", "content": "S"}, *USER],
        temperature=1, seed=5, max_tokens=6,
    )  # fmt: skip
    assert system.json()["response"] == expected.text


def test_nothing_to_say_loads(app: App) -> None:
    for path in ("/api/chat", "/api/generate"):
        found = post(app, path, {"model": NAME}).json()
        assert found["done"] is True and found["done_reason"] == "load"
        for kept, reason in (
            (0, "unload"), ("0", "unload"), ("0s", "unload"), (0.0, "unload"),
            ("0h0m", "unload"), (-1, "load"), ("5m", "load"), (10, "load"),
            ("0.5s", "load"), ("0m10s", "load"), (None, "load"),
        ):  # fmt: skip
            body = {"model": NAME, "keep_alive": kept}
            assert post(app, path, body).json()["done_reason"] == reason


def test_logprobs(app: App) -> None:
    body = {
        "model": NAME, "messages": USER, "options": SAID, "stream": False,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    found = post(app, "/api/chat", body).json()
    assert len(found["logprobs"]) == 6
    assert all(len(one["top_logprobs"]) == 2 for one in found["logprobs"])


def test_what_is_there(app: App) -> None:
    import ollama

    found = ollama.ListResponse.model_validate(get(app, "/api/tags").json())
    assert [m.model for m in found.models] == [NAME]
    ps = ollama.ProcessResponse.model_validate(get(app, "/api/ps").json())
    assert [m.name for m in ps.models] == [NAME]
    for body in ({"model": NAME}, {"name": NAME}, {"model": NAME + ":latest"}):
        shown = post(app, "/api/show", body).json()
        ollama.ShowResponse.model_validate(shown)
        assert shown["model_info"]["gemma3.context_length"] == 4096
    refused = post(app, "/api/show", {})
    assert refused.status_code == 400 and "model" in refused.json()["error"]
    assert shown["model_info"]["general.architecture"] == "gemma3"
    assert "completion" in shown["capabilities"]
    assert shown["details"]["family"] == "gemma3"
    for model in (found.models[0], ps.models[0]):
        assert model.size is not None and model.digest and model.details
    [loaded] = get(app, "/api/ps").json()["models"]
    assert loaded["context_length"] == 4096 and loaded["size_vram"] == 0
    assert datetime.datetime.fromisoformat(loaded["expires_at"]).year == 9999
    assert "expires_at" not in get(app, "/api/tags").json()["models"][0]


def test_the_version_is_of_the_api(app: App) -> None:
    """Editors refuse versions before 0.6.4."""
    version = get(app, "/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


def test_what_clients_send_by_default(app: App) -> None:
    """All options at the values that they have there change nothing."""
    body = {"model": NAME, "messages": USER, "stream": False}
    plain = post(app, "/api/chat", {**body, "options": SAID}).json()
    options = {
        "repeat_last_n": 64, "num_keep": 4, "typical_p": 1.0, "tfs_z": 1,
        "min_p": 0.0, "repeat_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "mirostat": 0, "mirostat_tau": 5.0,
        "mirostat_eta": 0.1, "penalize_newline": False, "num_ctx": 2048,
        "num_batch": 512, "num_gpu": -1, "main_gpu": 0, "use_mmap": True,
        "num_thread": 0, "stop": [], "temperature": 1.0, "num_predict": 6.0,
    }  # fmt: skip
    for last in (64, 64.0, 0, -1, 7):
        said = {**body, "options": {**options, "repeat_last_n": last}}
        found = post(app, "/api/chat", said)
        assert found.status_code == 200, found.text
        assert found.json()["message"] == plain["message"]
    ignored = found.headers["x-gemmakv-ignored"].split(", ")
    assert "options.num_ctx" in ignored
    assert not {"options.num_predict", "options.stop"} & {*ignored}


def test_penalties_of_no_tokens_are_off(app: App) -> None:
    def said(**more: Any) -> Any:
        options = {**SAID, "num_predict": 20, **more}
        body = {"model": NAME, "messages": USER, "options": options}
        found = post(app, "/api/chat", {**body, "stream": False})
        assert found.status_code == 200, found.text
        return found.json()["message"]["content"]

    assert said(presence_penalty=100) != said()
    assert said(presence_penalty=100, repeat_last_n=0) == said()
    assert said(presence_penalty=100, repeat_last_n=64) == (
        said(presence_penalty=100)
    )


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"format": "xml"}, "format"),
        ({"format": {"not": {}}}, "format.not"),
        ({"think": True}, "think"),
        ({"tools": [{}]}, "tools[0]"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"repeat_last_n": 32, "repeat_penalty": 1.1}},
         "options.repeat_last_n"),
        ({"options": {"repeat_last_n": 1.5}}, "options.repeat_last_n"),
        ({"options": {"penalize_newline": False, "presence_penalty": 1}},
         "options.penalize_newline"),
        ({"options": {"num_predict": 20.5}}, "options.num_predict"),
        ({"options": {"seed": 1.5}}, "options.seed"),
        ({"options": {"temperature": "x"}}, "options.temperature"),
        ({"options": {"num_predict": -7}}, "options.num_predict"),
        ({"options": []}, "options"),
        ({"messages": [{"role": "user", "content": "x", "images": ["a"]}]},
         "messages[0].images"),
        ({"messages": [{"role": "x", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]},
         "messages[0].content"),
        ({"messages": [*USER, {"role": "assistant", "thinking": 5}]},
         "messages[1].thinking"),
        ({"options": {"stop": 5}}, "options.stop"),
        ({"options": {"xtc_probability": 0.5}}, "options.xtc_probability"),
        ({"keep_alive": []}, "keep_alive"),
    ],
)  # fmt: skip
def test_refused_by_name(app: App, fields: dict[str, Any], words: str) -> None:
    body = {"model": NAME, "messages": USER, **fields}
    response = post(app, "/api/chat", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"].startswith(words + ": ")


def test_other_model(app: App) -> None:
    response = post(app, "/api/chat", {"model": "llama9", "messages": USER})
    assert response.status_code == 404
    assert "llama9" in response.json()["error"]


@pytest.mark.parametrize("fields", [
    {"images": ["aGk="]}, {"suffix": "x"}, {"template": "x"},
    {"context": [5]}, {"session": "x"},
])  # fmt: skip
def test_generate_refuses_by_name(app: App, fields: dict[str, Any]) -> None:
    body = {"model": NAME, "prompt": "x", **fields}
    response = post(app, "/api/generate", body)
    assert response.status_code == 400, response.text
    [name] = fields
    assert response.json()["error"].startswith(f"{name}: ")


def test_any_name_if_the_operator_says_so(shared: gemmakv.Gemma) -> None:
    app = make_app(shared, served_model_name=(NAME, "*"), max_model_len=256)
    name = "gemma3:latest"
    body = {"model": name, "messages": USER, "options": SAID}
    for line in lines(app, "/api/chat", body):
        assert line["model"] == name
    [tag] = get(app, "/api/tags").json()["models"]
    assert tag["name"] == NAME
    assert post(app, "/api/show", {"model": name}).status_code == 200


# Of llama-server.


def test_tokenize_and_back(app: App, shared: gemmakv.Gemma) -> None:
    assert shared.tokenizer is not None
    text = "the a\u20ac \u4f60"
    ids = shared.tokenizer.encode(text)
    assert post(app, "/tokenize", {"content": text}).json() == {"tokens": ids}
    found = post(app, "/tokenize", {"content": text, "add_special": True})
    assert found.json() == {"tokens": [shared.config.bos_id, *ids]}
    found = post(app, "/tokenize", {"content": "<bos>a", "add_special": True})
    assert found.json()["tokens"].count(shared.config.bos_id) == 1
    body = {"content": "\u4f60<eos>", "with_pieces": True}
    pieces = [p["piece"] for p in post(app, "/tokenize", body).json()["tokens"]]
    assert pieces[-1] == "<eos>"
    assert b"".join(bytes(p) for p in pieces[:-1]).decode() == "\u4f60"
    body = {"content": "<eos>", "parse_special": False}
    assert len(post(app, "/tokenize", body).json()["tokens"]) == 5
    found = post(app, "/detokenize", {"tokens": ids})
    assert found.json() == {"content": text, "prompt": text}
    bad = post(app, "/detokenize", {"tokens": [1 << 30]})
    assert bad.status_code == 400
    assert bad.json()["error"]["message"].startswith("tokens: ")


def test_apply_template(app: App, shared: gemmakv.Gemma) -> None:
    found = post(app, "/apply-template", {"messages": USER}).json()["prompt"]
    assert shared.tokenizer is not None
    assert shared.tokenizer.encode(found, True) == (
        shared.apply_chat_template(USER).tolist()
    )
    body = {"messages": USER, "tools": [{"type": "function"}]}
    assert post(app, "/apply-template", body).status_code == 400


def test_props_and_health(app: App) -> None:
    props = get(app, "/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["total_slots"] == 16
    for path in ("/health", "/health/live", "/health/ready"):
        assert get(app, path).json() == {"status": "ok"}


def test_metrics(app: App) -> None:
    post(app, "/api/chat", {
        "model": NAME, "messages": USER, "options": SAID, "stream": False,
    })  # fmt: skip
    post(app, "/api/chat", b"{")
    response = get(app, "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    text = response.text
    label = r'[a-z_]+="[^"]*"'
    for line in text.splitlines():  # one bad line makes a scrape fail
        assert line.startswith("# ") or re.fullmatch(
            rf"[a-z_]+(\{{{label}(,{label})*\}})? [0-9.e+-]+", line
        ), line
    assert 'gemmakv_prefix_cache_evictions_total{tier="ram"}' in text
    values = {
        series: float(value)
        for series, _, value in (
            line.rpartition(" ")
            for line in text.splitlines()
            if not line.startswith("#")
        )
    }
    assert values['gemmakv_completion_tokens_total{key="none"}'] == 6
    chat = 'key="none",route="/api/chat"'
    assert values[f'gemmakv_requests_total{{{chat},status="200"}}'] == 1
    assert values[f'gemmakv_requests_total{{{chat},status="400"}}'] == 1
    assert values["gemmakv_time_to_first_token_seconds_count"] == 1
    assert values["gemmakv_inter_token_seconds_count"] == 5
    assert values['gemmakv_time_to_first_token_seconds_bucket{le="+Inf"}'] == 1
    assert values["gemmakv_rows_running"] == 0


def test_series_are_there_from_the_start(
    talker_path: Path, tmp_path: Path
) -> None:
    prefix = gemmakv.PrefixCache(ram="1MiB", disk=tmp_path / "disk")
    gemma = gemmakv.Gemma.load(talker_path, prefix_cache=prefix)
    text = get(make_app(gemma), "/metrics").text
    for tier in ("ram", "disk"):
        for name in ("tokens_total", "bytes", "evictions_total"):
            series = f'gemmakv_prefix_cache_{name}{{tier="{tier}"}} 0.0'
            assert series in text.splitlines(), series
    for series in (
        "gemmakv_requests_cancelled_total",
        'gemmakv_prompt_tokens_total{key="none"}',
        'gemmakv_cache_misses_total{reason="divergent"}',
    ):
        assert f"{series} 0.0" in text.splitlines(), series
    prefix.close()


def test_loading(app: App) -> None:
    app.service = None
    for path in ("/health", "/v1/models", "/api/tags"):
        response = get(app, path)
        assert response.status_code == 503
    assert get(app, "/health").status_code == 503
    assert "Loading model" in get(app, "/health").text
    assert get(app, "/health/live").status_code == 200
    body = {"model": NAME, "messages": USER}
    response = post(app, "/v1/chat/completions", body)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert in_loop(app, lambda http: http.head("/")).status_code == 200
