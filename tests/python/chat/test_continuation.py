"""Tokens that go on from a reply."""

from __future__ import annotations

import random
from typing import Any

import pytest

import gemmakv
from gemmakv import Message, Tokenizer
from gemmakv.chat._continuation import continuation, kept_reply, moved
from gemmakv.chat._file_template import FileTemplate
from gemmakv.chat._templates import GemmaTemplate, PlainTemplate, render
from gemmakv.chat._transcript import Encoder
from support.chat_cases import SOURCES, TEXTS, call, tool

DROPS = """{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}
{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
REFUSES = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}"
    "{% endif %}{{ messages | length }}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny: gemmakv.Gemma) -> Tokenizer:
    assert tiny.tokenizer is not None
    return tiny.tokenizer


def file_template(tokenizer: Tokenizer, source: str) -> FileTemplate:
    return FileTemplate(source, tokenizer, bos_id=2, eos_ids=[1])


def whole(template: Any, tokenizer: Tokenizer, messages: Any) -> list[int]:
    segments = render(template, messages, add_generation_prompt=True)
    return [int(t) for t in Encoder(tokenizer, 2).encode(segments)]


@pytest.mark.parametrize("name", ["gemma", "turns", "parts"])
@pytest.mark.parametrize("reply", TEXTS)
def test_turns(tokenizer: Tokenizer, name: str, reply: str) -> None:
    template: Any = GemmaTemplate()
    if name != "gemma":
        template = file_template(tokenizer, SOURCES[name])
    for text in TEXTS:
        said = Message("assistant", reply)
        new = [Message("user", text)]
        found = continuation(template, tokenizer, said, new)
        assert found is not None
        before = [Message("system", "S"), Message("user", "Q")]
        all_ids = whole(template, tokenizer, [*before, said, *new])
        assert all_ids[-len(found) :] == found.tolist()
        # The end of the reply, and of the new turn.
        end = tokenizer.id_of("<end_of_turn>")
        assert found[0] == end and found.tolist().count(end) == 2


def test_plain(tokenizer: Tokenizer) -> None:
    found = continuation(
        PlainTemplate(),
        tokenizer,
        Message("assistant", "yes"),
        [Message("user", "why")],
    )
    assert found is not None
    text = "\n\nUser: why\n\nAssistant:"
    assert found.tolist() == tokenizer.encode(text)


def test_calls_and_results(tokenizer: Tokenizer) -> None:
    said = Message("assistant", None, tool_calls=[call("rain", "x")])
    new = [Message("tool", {"mm": 3}, name="rain")]
    for template in (GemmaTemplate(), PlainTemplate()):
        found = continuation(
            template, tokenizer, said, new, [tool("rain", "x")]
        )
        assert found is not None
        before = [Message("user", "Q")]
        all_ids = whole(template, tokenizer, [*before, said, *new])
        assert all_ids[-len(found) :] == found.tolist()
        text = tokenizer.decode(found.tolist())
        assert "<tool_response>" in text and "<tool_call>" not in text


@pytest.mark.parametrize("source", [DROPS, REFUSES])
def test_where_there_is_none(tokenizer: Tokenizer, source: str) -> None:
    template = file_template(tokenizer, source)
    said, new = Message("assistant", "yes"), [Message("user", "why")]
    assert continuation(template, tokenizer, said, new) is None


def test_kept_reply_is_what_was_sampled(tiny: gemmakv.Gemma) -> None:
    """Also where it is no Unicode, and where nothing ended it."""
    tokenizer = tiny.tokenizer
    assert tokenizer is not None
    random_ids = random.Random(4)
    table = tokenizer.token_bytes
    texts = [i for i, piece in enumerate(table) if piece.strip()]
    for count in range(60):
        ids = [random_ids.choice(texts) for _ in range(count % 12)]
        text = b"".join(table[i] for i in ids).decode("utf-8", "replace")
        if text == text.rstrip():
            assert kept_reply(ids, text, tokenizer).tolist() == ids
            eos = tiny.config.eos_ids[0]
            assert kept_reply([*ids, eos], text, tokenizer).tolist() == ids


def test_kept_reply_is_cut(tokenizer: Tokenizer) -> None:
    for text, said in (
        ("hello \n\n", "hello"),
        ("hello", "hel"),  # "lo" was a stop string
        ("caf\u00e9 \u65e5\u672c", "caf\u00e9 \u65e5"),
        ("hello", ""),
    ):
        ids = tokenizer.encode(text)
        kept = kept_reply(ids, said, tokenizer).tolist()
        assert tokenizer.decode(kept) == said
    spaced = kept_reply(tokenizer.encode("a  \n"), "a  \n", tokenizer)
    assert tokenizer.decode(spaced.tolist()) == "a"


def test_moved() -> None:
    error = ValueError("messages[12].role: expected 'user', not messages[3]")
    assert str(moved(error, -10)) == (
        "messages[2].role: expected 'user', not messages[0]"
    )
