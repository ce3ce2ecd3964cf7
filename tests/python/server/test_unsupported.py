"""Fields that other servers know: honoured, refused by name, or, where they
ask for nothing, ignored.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

import gemmakv
from gemmakv.options import GenerationOptions
from gemmakv.server.apis.unsupported import UNSUPPORTED, check_supported
from gemmakv.server.app import App
from gemmakv.server.service.errors import RequestError
from gemmakv.server.service.requests import ALIASES
from support import tiny_gguf
from support.asgi import NAME, USER, make_app, post
from support.extras import needs

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PIECES = tiny_gguf.vocabulary()[0]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}},
          "required": ["n"], "additionalProperties": False}  # fmt: skip
# As llama-server's page, LM Studio and SillyTavern send them where nothing
# was chosen.
PAGES: list[dict[str, Any]] = [
    {"dynatemp_range": 0, "dynatemp_exponent": 1.0, "xtc_probability": 0.0,
     "xtc_threshold": 0.1, "typical_p": 1, "repeat_last_n": 64,
     "repeat_penalty": 1.0, "dry_multiplier": 0.0, "dry_base": 1.75,
     "dry_allowed_length": 2, "dry_penalty_last_n": -1,
     "samplers": "edkypmxt", "mirostat": 0, "mirostat_tau": 5.0,
     "mirostat_eta": 0.1, "n_keep": 0, "min_keep": 0, "cache_prompt": True,
     "reasoning_format": "auto", "timings_per_token": True, "id_slot": -1},
    {"ttl": 300, "repeat_penalty": 1.1, "draft_model": "x"},
    {"tfs": 1, "typical": 1, "top_a": 0, "epsilon_cutoff": 0, "eta_cutoff": 0,
     "rep_pen": 1, "no_repeat_ngram_size": 0, "num_beams": 1,
     "do_sample": True, "penalty_alpha": 0, "smoothing_factor": 0,
     "guidance_scale": 1, "negative_prompt": "", "ban_eos_token": False,
     "custom_token_bans": "", "banned_strings": [], "sampler_priority": []},
    {"use_beam_search": False, "length_penalty": 1.0, "bad_words": [],
     "skip_special_tokens": True, "spaces_between_special_tokens": True,
     "include_stop_str_in_output": False, "min_tokens": 0, "priority": 0,
     "ignore_eos": False, "stop_token_ids": [], "structured_outputs": {},
     "guided_json": None, "add_special_tokens": False, "request_id": "x"},
]  # fmt: skip


def ask(app: App, path: str, **fields: Any) -> Any:
    said = {"messages": USER} if path == CHAT else {"prompt": "hello"}
    return post(app, path, {"model": NAME, "max_tokens": 8, **said, **fields})


def error_of(response: Any) -> Any:
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("page", range(len(PAGES)))
def test_what_asks_for_nothing_is_taken(
    app: App, path: str, page: int
) -> None:
    response = ask(app, path, **PAGES[page])
    assert response.status_code == 200, response.text
    ignored = response.headers.get("x-gemmakv-ignored", "").split(", ")
    assert not {*ignored} & {*ALIASES, "repeat_last_n", "min_tokens"}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_asks_for_more_is_refused_by_name(name: str) -> None:
    for value in (*UNSUPPORTED[name], None):
        check_supported({name: value})
    for value in (0.37, "what", ["what"], {"what": 1}):
        with pytest.raises(RequestError) as found:
            check_supported({name: value})
        assert found.value.param == name
        assert found.value.code == "unsupported_field"
    check_supported({name: 0.37}, {name: (0.37,)})


def test_other_names_are_of_options() -> None:
    assert {*ALIASES.values()} <= GenerationOptions.table.keys()


BASES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
    "/completion": {"prompt": "hello", "n_predict": 4},
    "/api/generate": {"prompt": "hello", "options": {"num_predict": 4}},
}


@pytest.mark.parametrize("path", BASES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("typical_p", 0.5), ("xtc_probability", 0.5), ("guided_regex", "a"),
        ("prompt_logprobs", 1), ("bad_words", ["x"]),
    ],
)  # fmt: skip
def test_it_is_refused_on_all_routes(
    app: App, path: str, field: str, value: Any
) -> None:
    response = post(app, path, {"model": NAME, **BASES[path], field: value})
    error = error_of(response)
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"{field}: ")


@pytest.mark.parametrize("field", ["repeat_penalty", "presence_penalty"])
def test_options_are_refused_where_they_are_none(
    app: App, field: str
) -> None:
    body = {"model": NAME, **BASES["/v1/messages"], field: 1.5}
    assert error_of(post(app, "/v1/messages", body))["message"].startswith(
        f"{field}: "
    )


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("typical_p", 0.5), ("xtc_probability", 0.1), ("dry_multiplier", 0.8),
        ("mirostat", 2), ("samplers", ["temperature"]), ("min_keep", 2),
        ("bad_words", ["x"]), ("use_beam_search", True),
        ("repeat_last_n", 7), ("lora", [{"id": 0, "scale": 1}]),
    ],
)  # fmt: skip
def test_a_request_with_it_is_refused(
    app: App, path: str, field: str, value: Any
) -> None:
    more = {"repeat_penalty": 1.5} if field == "repeat_last_n" else {}
    assert error_of(ask(app, path, **{field: value, **more}))["param"] == field


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_options_by_their_names_elsewhere(app: App, path: str) -> None:
    def text(**fields: Any) -> str:
        response = ask(app, path, temperature=1.5, seed=4, **fields)
        assert response.status_code == 200, response.text
        return json.dumps(response.json()["choices"])

    assert text(repeat_penalty=9.0) == text(repetition_penalty=9.0) != text()
    assert text(repeat_penalty=9.0, repeat_last_n=0) == text()
    assert text(n_predict=3, max_tokens=None) == text(max_tokens=3) != text()
    both = ask(app, path, repeat_penalty=1.5, repetition_penalty=1.2)
    assert error_of(both)["param"] == "repeat_penalty"
    bad = ask(app, path, repeat_penalty=-1)
    assert error_of(bad)["param"] == "repeat_penalty"


def test_a_prompt_without_what_begins_a_text(app: App) -> None:
    tokens = [
        ask(app, COMPLETIONS, **fields).json()["usage"]["prompt_tokens"]
        for fields in ({}, {"add_special_tokens": True},
                       {"add_special_tokens": False})
    ]  # fmt: skip
    assert tokens == [tokens[0], tokens[0], tokens[0] - 1]
    error = error_of(ask(app, CHAT, add_special_tokens=True))
    assert error["param"] == "add_special_tokens"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_min_tokens_are_sampled(shared: gemmakv.Gemma, path: str) -> None:
    app = make_app(shared, max_model_len=4096, default_seed=5)
    assert app.service is not None
    app.service.defaults["logit_bias"] = {tiny_gguf.EOT: 60.0}
    for least, field in ((0, "min_tokens"), (5, "min_tokens"),
                         (5, "min_new_tokens")):  # fmt: skip
        usage = ask(app, path, **{field: least}).json()["usage"]
        if least:
            assert usage["completion_tokens"] >= least
        elif path == CHAT:
            assert usage["completion_tokens"] == 1


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": SCHEMA}, "json"),
    ({"guided_json": json.dumps(SCHEMA)}, "json"),
    ({"json_schema": json.dumps(SCHEMA)}, "json"),
    ({"structured_outputs": {"json": SCHEMA}}, "json"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA),
                             "disable_any_whitespace": True}}, "json"),
    ({"guided_regex": "ab{2}c"}, "abbc"),
    ({"regex": "ab{2}c"}, "abbc"),
    ({"structured_outputs": {"regex": "ab{2}c"}}, "abbc"),
    ({"guided_choice": ["a\"\n{/|x"]}, "a\"\n{/|x"),
    ({"structured_outputs": {"choice": ["a.c", "a.c"]}}, "a.c"),
    ({"guided_grammar": 'start: "x" "y"'}, "xy"),
    ({"structured_outputs": {"grammar": 'start: "x" "y"'}}, "xy"),
    ({"ebnf": 'start: "x" "y"'}, "xy"),
    ({"structured_outputs": {"json_object": True}}, "{"),
]  # fmt: skip


@needs("llguidance")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("fields", "text"), FORMS)
def test_forms_in_the_words_of_other_servers(
    app: App, path: str, fields: Any, text: str
) -> None:
    bias = {str(PIECES.index(c)): 6 for c in '"}'}
    response = ask(app, path, max_tokens=60, logit_bias=bias, **fields)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    found = choice["message"]["content"] if path == CHAT else choice["text"]
    if text == "json":
        assert json.loads(found)["n"] in (1, 2)
    elif text == "{":
        assert found.startswith("{")
    else:
        assert found == text


@needs("llguidance")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": {"properties": {"a": {"not": {}}}}},
         "guided_json.properties.a.not"),
        ({"structured_outputs": {"json": {"properties": {"a": {"not": {}}}}}},
         "structured_outputs.json.properties.a.not"),
        ({"guided_regex": "a("}, "guided_regex"),
        # More states than there is room for: the first mask shows it.
        ({"guided_regex": "(a?){300}a{300}"}, "guided_regex"),
        ({"guided_grammar": "start: /(a?){300}a{300}/"}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "ab"}, "guided_choice"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar"),
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}},
         "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}},
         "structured_outputs.choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}},
         "guided_regex"),
    ],
)  # fmt: skip
def test_a_form_that_is_bad_is_named(
    app: App, stream: bool, fields: Any, param: str
) -> None:
    assert error_of(ask(app, CHAT, stream=stream, **fields))["param"] == param
