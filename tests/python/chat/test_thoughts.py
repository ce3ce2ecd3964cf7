"""Thoughts and calls of Gemma 4's form, told apart in replies."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from gemmakv import Message, Session
from gemmakv.chat._native_calls import QUOTE_MARK, read_call
from gemmakv.chat._reply import CallPart, Part, ReplyReader, Thought, said
from gemmakv.generation._requests import requests_of
from support import gemma4_files
from support.extras import needs
from support.gemma4_files import IDS, script

pytestmark = needs("tokenizers", "llguidance")

USER = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "rain", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}  # fmt: skip
CALL = '<|tool_call>call:rain{city:<|"|>a, "b" {}<|"|>,n:[1,-2.5e1,true],'
CALL += "o:{x:null,y:{}}}<tool_call|>"
ARGUMENTS = {"city": 'a, "b" {}', "n": [1, -25.0, True],
             "o": {"x": None, "y": {}}}  # fmt: skip


@pytest.fixture(scope="module", params=["own", "file"])
def gemma(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> gemmakv.Gemma:
    source = gemma4_files.TEMPLATE if request.param == "file" else None
    path = tmp_path_factory.mktemp("gemma4") / "tiny-it.gguf"
    gemma4_files.write(path, source)
    return gemmakv.Gemma.load(path, packed_cache=False, prefix_cache=False)


@pytest.fixture(scope="module")
def tokenizer(gemma: gemmakv.Gemma) -> gemmakv.Tokenizer:
    assert gemma.tokenizer is not None
    return gemma.tokenizer


def late(
    tokenizer: gemmakv.Tokenizer, reply: str, rng: random.Random
) -> Iterator[tuple[int, str]]:
    """Tokens of a reply with the text that came with them, at times late."""
    data, held = b"", 0
    for token in tokenizer.encode(reply, parse_special=True):
        data += tokenizer.token_bytes[token]
        whole = data.decode("utf-8", "ignore")
        come = len(whole) - rng.choice((0, 0, 1, 3, 6))
        yield token, whole[held : max(come, held)]
        held = max(come, held)
    yield -1, data.decode("utf-8", "replace")[held:]


def joined(parts: list[Part]) -> tuple[str, str, list[Any]]:
    text, thoughts = said(parts)
    calls = [p.end for p in parts if isinstance(p, CallPart) and p.end]
    return text, thoughts, [(call.name, call.arguments) for call in calls]


# Replies, their text, thoughts and calls.
REPLIES: list[tuple[str, str, str, list[Any]]] = [
    ("Yes.", "Yes.", "", []),
    ("<|channel>thought\nHm, \u4f60\n<channel|> \nYes.", "Yes.", "Hm, \u4f60",
     []),
    ("<|channel>thought\n<channel|>Yes", "Yes", "", []),
    ("<|channel>thought<channel|>Yes", "Yes", "", []),
    ("<|channel>Hm<channel|>Yes", "Yes", "Hm", []),
    ("<|channel>thou<channel|>Yes", "Yes", "thou", []),
    ("<|channel>thought\nNo end", "", "No end", []),
    ("<|channel>thou", "", "", []),
    ("a<channel|>b<channel|>", "ab", "", []),
    ("a <|channel>thought\nx<channel|> b<|channel>thought\ny<channel|>",
     "a  b", "x\n\ny", []),
    (f"<|channel>thought\nx<channel|>{CALL}", "", "x", [("rain", ARGUMENTS)]),
    (f"A moment.\n{CALL}{CALL}<|tool_response>", "A moment.", "",
     [("rain", ARGUMENTS)] * 2),
    (f"<|channel>thought\nx{CALL}", "", "x", [("rain", ARGUMENTS)]),
    ("<|tool_call>call:rain{}<tool_call|>", "", "", [("rain", {})]),
    # No call: shown as it is.
    ("<|tool_call>call:rain{city:Rome}<tool_call|>.",
     "<|tool_call>call:rain{city:Rome}<tool_call|>.", "", []),
    ('a <|tool_call>rain(<|"|>b<|"|>)<tool_call|>',
     'a <|tool_call>rain(<|"|>b<|"|>)<tool_call|>', "", []),
    # Cut short.
    ('a <|tool_call>call:rain{city:<|"|>Ro', "a", "", []),
]  # fmt: skip


@pytest.mark.parametrize("reply, text, thoughts, calls", REPLIES)
def test_cut_anywhere(
    tokenizer: gemmakv.Tokenizer,
    reply: str,
    text: str,
    thoughts: str,
    calls: list[Any],
) -> None:
    for seed in range(12):
        reader = ReplyReader(tokenizer, "native")
        parts: list[Part] = []
        for token, came in late(tokenizer, reply, random.Random(seed)):
            parts += reader.push(token, came)
        parts += reader.end()
        found = joined(parts)
        assert found == (text, thoughts, calls)
        assert reader.calls == len(calls)


def test_the_same_characters_are_text(tokenizer: gemmakv.Tokenizer) -> None:
    reader = ReplyReader(tokenizer, "native")
    reply = f"<|channel>thought\nx<channel|>{CALL}"
    parts: list[Part] = []
    for token in tokenizer.encode(reply):
        parts += reader.push(token, tokenizer.decode([token]))
    assert joined([*parts, *reader.end()]) == (reply, "", [])


def test_thoughts_come_at_once(tokenizer: gemmakv.Tokenizer) -> None:
    """They do not wait for their end, and their tokens are counted."""
    reader = ReplyReader(tokenizer)
    ids = tokenizer.encode("<|channel>thought\nthe", parse_special=True)
    shown: list[Part] = []
    for token in ids:
        shown += reader.push(token, tokenizer.decode([token]))
    assert shown == [Thought("the")]
    assert reader.reasoning_tokens == len(ids) - 1
    reader.push(IDS["<channel|>"], "")
    assert reader.push(tokenizer.encode("a")[0], "a") == ["a"]
    assert reader.reasoning_tokens == len(ids) - 1


@pytest.mark.parametrize(
    "text",
    [
        "", "rain{}", "call:rain", "call:rain{", "call:rain{}}", "call:rain[]",
        "call:{}", "call:rain{a}", "call:rain{a:}", "call:rain{a:1,}",
        "call:rain{a:1,a:2}", "call:rain{a:nan}", "call:rain{a:01x}",
        "call:rain{a:truest}", "call:rain{a:[1 2]}", 'call:rain{a:"b"}',
        "call:rain{a:Qb}", "call:rain{Qa:1}", "call:a b{}",
        "call:rain{a:" + "[" * 3000 + "]" * 3000 + "}",
    ],
)  # fmt: skip
def test_no_call(text: str) -> None:
    assert read_call(text.replace("Q", QUOTE_MARK)) is None


def test_calls_as_they_may_be_written() -> None:
    text = " call: get.it-2 { Qa:bQ : QxQ , c d : [ QQ , 0 ] } "
    call = read_call(text.replace("Q", QUOTE_MARK))
    assert call is not None and call.name == "get.it-2"
    assert call.arguments == {"a:b": "x", "c d": ["", 0]}
    assert call.id.startswith("call_")


def test_chat(gemma: gemmakv.Gemma) -> None:
    reply = "<|channel>thought\nthe\n<channel|> Yes\n"
    found = gemma.chat(USER, think=True, grammar=script(reply), max_tokens=99)
    assert (found.text, found.reasoning) == ("Yes", "the")
    assert found.finish_reason == "stop" and str(found) == "Yes"
    assert IDS["<|channel>"] in found.token_ids
    again = gemma.chat(
        [*USER, {"role": "assistant", "content": found.text,
                 "reasoning": found.reasoning}, *USER],
        max_tokens=2,
    )  # fmt: skip
    without = gemma.chat(
        [*USER, {"role": "assistant", "content": found.text}, *USER],
        max_tokens=2,
    )
    assert again.usage.prompt_tokens == without.usage.prompt_tokens
    assert again.token_ids == without.token_ids


def test_calls_of_a_chat(
    gemma: gemmakv.Gemma, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = f"<|channel>thought\nthe<channel|>{CALL}<|tool_response>"
    requests = requests_of(gemma)
    whole = requests.reply

    def scripted(cache: Any, ids: Any, options: Any, *more: Any) -> Any:
        return whole(cache, ids, {**options, "grammar": script(reply)}, *more)

    monkeypatch.setattr(requests, "reply", scripted)
    found = gemma.chat(USER, tools=[TOOL], think=True, max_tokens=200)
    assert (found.text, found.reasoning) == ("", "the")
    [call] = found.tool_calls
    assert (call.name, call.arguments) == ("rain", ARGUMENTS)
    asked = {"role": "assistant", "reasoning": "the",
             "tool_calls": [call.to_dict()]}  # fmt: skip
    result = {"role": "tool", "name": "rain", "tool_call_id": call.id,
              "content": "3 mm"}  # fmt: skip
    ids = list(gemma.apply_chat_template([*USER, asked, result], tools=[TOOL]))
    # The turn goes on, and says the thought again.
    assert ids[-1] == IDS["<tool_response|>"]
    assert ids.count(IDS["<|turn>"]) == 3
    assert ids.count(IDS["<|channel>"]) == 1


def test_no_tools_are_said(gemma: gemmakv.Gemma) -> None:
    none = gemma.chat(USER, tools=[TOOL], tool_choice="none", max_tokens=1)
    assert none.usage.prompt_tokens == gemma.count_tokens(USER)


REPLY = "<|channel>thought\nthe in\n<channel|>Yes and no"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_session_forgets_thoughts(
    gemma: gemmakv.Gemma, streamed: bool
) -> None:
    """Each turn goes back to before the last reply, and has the results of a
    conversation that never had its thoughts.
    """
    session = Session(gemma, think=True, options={"max_tokens": 60})
    for turn in range(3):
        if streamed:
            stream = session.stream("Hello", grammar=script(REPLY))
            pieces = list(stream)
            assert "".join(p.text for p in pieces) == "Yes and no"
            assert "".join(p.reasoning for p in pieces) == "the in"
            # Each comes by itself, in its order.
            kinds = ["t" * bool(p.reasoning) + "a" * bool(p.text)
                     for p in pieces]  # fmt: skip
            order = "".join(kinds)
            assert order.strip("a").strip("t") == "" and "ta" in order
            generation = stream.result()
        else:
            generation = session.send("Hello", grammar=script(REPLY))
        assert generation.text == "Yes and no"
        assert generation.reasoning == "the in"
        message = session.messages[-1]
        assert message.content == "Yes and no"
        assert message.reasoning == "the in"
        # What the next turn keeps says what the template will say.
        held = list(session.cache.tokens)
        assert IDS["<|channel>"] not in held[:-1]
        bare = [Message(m.role, m.content) for m in session.messages]
        wanted = list(
            gemma.apply_chat_template(
                [*bare, Message("user", "x")], enable_thinking=True
            )
        )
        assert held == wanted[: len(held)]
        if turn:
            # The reply before was computed again, and that shows.
            plain = len(gemma.tokenizer.encode("Yes and no"))  # type: ignore[union-attr]
            assert generation.usage.prompt_tokens > plain
            assert generation.usage.cached_tokens > 8
    fresh = Session(gemma, think=True, messages=session.messages)
    one = session.send("the", max_tokens=6, temperature=0)
    other = fresh.send("the", max_tokens=6, temperature=0)
    assert one.token_ids == other.token_ids


def test_a_reply_that_is_stopped_while_it_thinks(gemma: gemmakv.Gemma) -> None:
    session = Session(gemma, think=True)
    reply = "<|channel>thought\n" + "the " * 50 + "<channel|>Yes"
    stream = session.stream("Hello", grammar=script(reply), max_tokens=200)
    given = ""
    for piece in stream:
        given += piece.reasoning
        if len(given) > 20:
            stream.cancel()
    assert stream.result().text == ""
    message = session.messages[-1]
    assert message.incomplete and message.content == ""
    assert message.reasoning.startswith("the the")
    assert session.send("Hello", max_tokens=3).usage.completion_tokens == 3


def test_a_stop_string_in_a_thought(gemma: gemmakv.Gemma) -> None:
    found = gemma.chat(
        USER, think=True, grammar=script(REPLY), stop=["in"], max_tokens=60
    )
    assert (found.text, found.reasoning) == ("", "the")
    half = gemma.chat(
        USER, think=True, grammar=script(REPLY), stop=["in\nY"], max_tokens=60
    )
    assert (half.text, half.reasoning) == ("", "the")


def test_think_may_change(gemma: gemmakv.Gemma) -> None:
    session = Session(gemma)
    assert session.think is None
    session.send("Hello", max_tokens=4)
    assert IDS["<|think|>"] not in session.cache.tokens
    session.think = True
    session.send("Hello", max_tokens=4, grammar=script("Yes"))
    held = session.cache.tokens
    assert IDS["<|think|>"] in held and held[0] == IDS["<bos>"]
    session.think = False
    session.send("Hello", max_tokens=4)
    assert IDS["<|think|>"] not in session.cache.tokens
    with pytest.raises(ValueError, match="think: .*True"):
        session.think = 1  # type: ignore[assignment]
    assert session.think is False
    assert session.fork().think is False


@pytest.mark.parametrize("think", [None, True, False])
def test_saved(
    gemma: gemmakv.Gemma, tmp_path: Path, think: bool | None
) -> None:
    session = Session(gemma, think=think, system="the")
    session.send("Hello", grammar=script(REPLY), max_tokens=60)
    data = session.to_bytes()
    # Files without a choice are those of versions that knew none.
    assert (b'"think"' in data) == (think is not None)
    session.save(tmp_path / "a.session")
    for rebuild in (False, True):
        other = Session.load(tmp_path / "a.session", gemma, rebuild=rebuild)
        assert other.messages == session.messages and other.think is think
        assert other.messages[-1].reasoning == "the in"
        copy = Session.from_bytes(data, gemma)
        assert other.send("the", max_tokens=5, temperature=0).token_ids == (
            copy.send("the", max_tokens=5, temperature=0).token_ids
        )
