"""Numbers and stop strings in the forms that servers of local models take, in
all APIs.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

import gemmakv
from gemmakv.server.app import App
from support.asgi import NAME, USER, make_app, post

CONTEXT = 64


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, **fields}


# Route, body of a request by the names of options, and where the answer has
# its text and its tokens.
def in_chat(**options: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", chat(**options)


def in_completions(**options: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "hello", **options}


def in_responses(**options: Any) -> tuple[str, dict[str, Any]]:
    if "max_tokens" in options:
        options["max_output_tokens"] = options.pop("max_tokens")
    return "/v1/responses", {"input": "hello", **options}


def in_messages(**options: Any) -> tuple[str, dict[str, Any]]:
    if "stop" in options:
        stop = options.pop("stop")
        options["stop_sequences"] = stop if isinstance(stop, list) else [stop]
    return "/v1/messages", chat(**{"max_tokens": 8, **options})


def in_ollama(**options: Any) -> tuple[str, dict[str, Any]]:
    if "max_tokens" in options:
        options["num_predict"] = options.pop("max_tokens")
    body = {"model": NAME, "messages": USER, "stream": False}
    return "/api/chat", {**body, "options": options}


def in_completion(**options: Any) -> tuple[str, dict[str, Any]]:
    if "max_tokens" in options:
        options["n_predict"] = options.pop("max_tokens")
    return "/completion", {"prompt": "hello", **options}


APIS = [
    in_chat, in_completions, in_responses, in_messages, in_ollama,
    in_completion,
]  # fmt: skip


def texts(found: Any) -> list[str]:
    """All texts of an answer."""
    if isinstance(found, dict):
        said = [
            found[name]
            for name in ("content", "text", "response")
            if isinstance(found.get(name), str)
        ]
        return said + [one for x in found.values() for one in texts(x)]
    if isinstance(found, list):
        return [one for x in found for one in texts(x)]
    return []


def spent(found: dict[str, Any]) -> int:
    """The tokens of an answer."""
    usage = found.get("usage", found)
    names = (
        "completion_tokens", "output_tokens", "eval_count", "tokens_predicted",
    )  # fmt: skip
    [count] = [usage[name] for name in names if name in usage]
    return int(count)


def answer(app: App, api: Any, **options: Any) -> dict[str, Any]:
    response = post(app, *api(**options))
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.fixture
def endless(shared: gemmakv.Gemma) -> App:
    """A server whose replies are as long as the context."""
    return make_app(shared, max_model_len=CONTEXT, default_seed=5)


@pytest.mark.parametrize("api", APIS)
def test_minus_one_is_no_limit(shared: gemmakv.Gemma, api: Any) -> None:
    app = make_app(
        shared, max_model_len=CONTEXT, default_seed=5, default_max_tokens=3
    )
    for most in (-1, -1.0):
        found = answer(app, api, max_tokens=most)
        assert spent(found) > 20
    assert spent(answer(app, api, max_tokens=2.0)) == 2


@pytest.mark.parametrize("api", APIS)
def test_whole_floats_are_integers(app: App, api: Any) -> None:
    said = {"max_tokens": 8, "top_k": 40, "temperature": 1.0}
    expected = answer(app, api, **said)
    found = answer(app, api, **said | {"max_tokens": 8.0, "top_k": 40.0})
    assert spent(found) == spent(expected) == 8
    assert texts(found) == texts(expected)


@pytest.mark.parametrize("api", APIS)
def test_no_top_k_and_the_likeliest_alone(app: App, api: Any) -> None:
    said = {"max_tokens": 8, "temperature": 1.0}
    off = texts(answer(app, api, **said, top_k=0))
    assert texts(answer(app, api, **said, top_k=-1)) == off
    greedy = texts(answer(app, api, **said | {"temperature": 0.0}))
    assert greedy != off
    assert texts(answer(app, api, **said, top_p=0)) == greedy
    assert texts(answer(app, api, **said, top_p=0.0, top_k=-1)) == greedy


@pytest.mark.parametrize("api", [one for one in APIS if one != in_messages])
def test_seeds_have_64_bits_with_a_sign_or_without(app: App, api: Any) -> None:
    """Anthropic's API has no seed; llama-server's calls -1 a random one."""
    said = {"max_tokens": 8, "temperature": 1.0}
    expected = texts(answer(app, api, **said, seed=(1 << 64) - 2))
    assert texts(answer(app, api, **said, seed=-2)) == expected
    assert texts(answer(app, api, **said, seed=-2.0)) == expected
    path, body = api(**said, seed=1 << 64)
    assert post(app, path, body).status_code == 400


@pytest.mark.parametrize("api", APIS)
def test_empty_stop_strings_stop_nothing(app: App, api: Any) -> None:
    said = {"max_tokens": 8, "temperature": 1.0}
    expected = texts(answer(app, api, **said))
    for stop in ("", [], [""], ["", "\u20ac", ""]):
        assert texts(answer(app, api, **said, stop=stop)) == expected


BAD = [
    ("max_tokens", "8.5"), ("max_tokens", "1e400"), ("max_tokens", "NaN"),
    ("max_tokens", "-Infinity"), ("max_tokens", "-3"), ("max_tokens", "true"),
    ("top_k", "1.5"), ("top_k", "-2"), ("temperature", "NaN"),
    ("top_p", "-0.5"), ("top_p", "1e999"), ("top_k", "9" * 41),
    ("max_tokens", "-" + "9" * 500),
]  # fmt: skip


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name, value", BAD)
def test_other_numbers_are_refused(
    app: App, api: Any, name: str, value: str
) -> None:
    """The error says what the field is called there."""
    mark = 12345.678
    path, body = api(**{name: mark})
    if path == "/v1/messages" and name == "max_tokens":
        body["max_tokens"] = mark
    text = json.dumps(body).replace(str(mark), value)
    response = post(app, path, text.encode())
    assert response.status_code == 400, response.text
    inside = body.get("options", body)
    [field] = [key for key, one in inside.items() if one == mark]
    field = f"options.{field}" if "options" in body else field
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"{field}: ")
    if isinstance(error, dict) and "param" in error:
        assert error["param"] == field


def test_token_ids_and_counts_of_other_routes(app: App) -> None:
    body = {"tokens": [300.0, 301]}
    assert post(app, "/detokenize", body).json() == (
        post(app, "/detokenize", {"tokens": [300, 301]}).json()
    )
    assert post(app, "/detokenize", {"tokens": [300.5]}).status_code == 400
    body = {"prompt": [2.0, 300.0], "n": 2.0, "max_tokens": 2}
    found = answer(app, lambda: ("/v1/completions", body))
    assert len(found["choices"]) == 2


def test_numbers_of_a_conversation_stay(app: App) -> None:
    """Arguments of a call are what was said, and no options."""
    call = {"function": {"name": "f", "arguments": {"x": 1.0}}}
    messages = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_name": "f"},
    ]
    body = {"model": NAME, "messages": messages, "stream": False}
    whole = post(app, "/api/chat", body).json()["prompt_eval_count"]
    call["function"]["arguments"]["x"] = 1
    short = post(app, "/api/chat", body).json()["prompt_eval_count"]
    assert whole > short
