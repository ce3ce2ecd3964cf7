"""Tokens and texts in the forms of llama-server and of vLLM."""

from __future__ import annotations

import gemmakv
from gemmakv.server.app import App
from support.asgi import NAME, USER, get, make_app, post, sse_events
from support.kept import error


def test_both_forms_of_tokenize(app: App) -> None:
    assert app.service is not None
    bos = app.service.gemma.config.bos_id
    plain = post(app, "/tokenize", {"content": "hello there"}).json()["tokens"]
    body = {"model": NAME, "prompt": "hello there"}
    found = post(app, "/tokenize", body).json()
    assert found == {
        "count": len(plain) + 1, "max_model_len": 4096,
        "tokens": [bos, *plain], "token_strs": None,
    }  # fmt: skip
    more = {**body, "add_special_tokens": False, "return_token_strs": True}
    found = post(app, "/tokenize", more).json()
    assert found["tokens"] == plain
    assert len(found["token_strs"]) == found["count"] == len(plain)
    chat = {"messages": USER, "max_tokens": 1}
    usage = post(app, "/v1/chat/completions", chat).json()["usage"]
    found = post(app, "/tokenize", {"messages": USER}).json()
    assert found["count"] == usage["prompt_tokens"]


def test_both_forms_of_detokenize(app: App) -> None:
    tokens = post(app, "/tokenize", {"content": "hello"}).json()["tokens"]
    found = post(app, "/detokenize", {"tokens": tokens, "model": NAME}).json()
    assert found == {"content": "hello", "prompt": "hello"}


def test_one_of_them_is_to_be_there(app: App) -> None:
    for body in ({}, {"content": "a", "prompt": "b"}):
        assert error(post(app, "/tokenize", body), 400)["type"] == (
            "invalid_request_error"
        )
    body = {"messages": USER, "add_generation_prompt": False}
    found = error(post(app, "/tokenize", body), 400)
    assert found["message"].startswith("add_generation_prompt: ")


def test_a_template_with_tools(app: App) -> None:
    tool = {"type": "function", "function": {
        "name": "look", "parameters": {"type": "object"}}}  # fmt: skip
    body = {"messages": USER}
    without = post(app, "/apply-template", body).json()["prompt"]
    found = post(app, "/apply-template", {**body, "tools": [tool]}).json()
    assert "look" in found["prompt"] and "look" not in without


def test_what_clients_read_of_props_and_slots(app: App) -> None:
    settings = get(app, "/props").json()["default_generation_settings"]
    assert settings["n_ctx"] == 4096 and settings["id_task"] == -1
    assert get(app, "/slots").json()[0]["id_task"] == -1


def test_pings_can_be_turned_off(shared: gemmakv.Gemma) -> None:
    app = make_app(shared, ping_s=0, max_model_len=256)
    body = {"messages": USER, "max_tokens": 2, "stream": True}
    text = post(app, "/v1/chat/completions", body).text
    assert sse_events(text)[-1] == ("", "[DONE]") and "ping" not in text


def test_what_measuring_programs_ask_of_the_tokenizer(app: App) -> None:
    found = get(app, "/tokenizer_info").json()
    assert found["tokenizer_class"] and found["model_max_length"] == 4096
    assert found["bos_token"] and found["eos_token"]
