"""Gemma 4's turns: as the published template renders them, and safe."""

from __future__ import annotations

import json
from typing import Any

import pytest

import gemmakv
from gemmakv import Message
from gemmakv.chat._templates import call_form, knows_thinking, template_for
from gemmakv.chat._transcript import Encoder
from gemmakv.templates import Gemma4Template, Segment
from support import gemma4_files
from support.extras import needs
from support.folders import GOLDEN
from support.gemma4_cases import CASES, TOOLS
from support.gemma4_files import IDS

pytestmark = needs("tokenizers")
GOLDENS = json.loads((GOLDEN / "gemma4_template.json").read_text("utf-8"))


@pytest.fixture(scope="module", params=["own", "file"])
def gemma(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> gemmakv.Gemma:
    source = gemma4_files.TEMPLATE if request.param == "file" else None
    path = tmp_path_factory.mktemp("gemma4") / "tiny-it.gguf"
    gemma4_files.write(path, source)
    return gemmakv.Gemma.load(path, packed_cache=False)


@pytest.mark.parametrize("number", range(max(len(CASES), len(GOLDENS))))
def test_as_the_published_template(number: int) -> None:
    segments = Gemma4Template().render(**CASES[number])
    assert [[s.text, s.special] for s in segments] == GOLDENS[number]
    # No text is cut in two: it would have other tokens.
    for one, other in zip(segments, segments[1:]):
        assert one.special or other.special


def test_which_template_a_model_gets(gemma: gemmakv.Gemma) -> None:
    chosen = template_for(gemma)
    own = gemma.chat_template is None
    assert chosen.name == ("gemma4" if own else "file")
    assert call_form(chosen) == "native" and knows_thinking(chosen)


def ids_of(gemma: gemmakv.Gemma, text: str, **more: Any) -> list[int]:
    messages: list[Any] = [
        {"role": "system", "content": text},
        {"role": "user", "content": text},
        {"role": "assistant", "content": "", "tool_calls": [
            {"function": {"name": "f", "arguments": {"a": text}}}]},
        {"role": "tool", "name": "f", "content": text},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": text},
    ]  # fmt: skip
    tool = {"type": "function", "function": {
        "name": "f", "description": text, "parameters": {
            "type": "object", "properties": {
                "a": {"type": "string", "description": text}}}}}  # fmt: skip
    ids = gemma.apply_chat_template(messages, tools=[tool], **more)
    return [int(token) for token in ids]


@pytest.mark.parametrize("name", IDS)
def test_text_never_becomes_a_control_token(
    gemma: gemmakv.Gemma, name: str
) -> None:
    marked, plain = ids_of(gemma, f"a{name}b"), ids_of(gemma, "ab")
    for token in IDS.values():
        assert marked.count(token) == plain.count(token), name
    assert gemma.tokenizer is not None
    assert gemma.tokenizer.decode(marked).count(f"a{name}b") >= 5


def test_thoughts_that_somebody_kept_in_a_reply(gemma: gemmakv.Gemma) -> None:
    """As characters: a template takes them out, and they are no tokens."""
    messages = [
        Message("user", "Hi"),
        Message("assistant", "<|channel>thought\nNo<channel|>Yes"),
        Message("user", "the"),
    ]
    ids = list(gemma.apply_chat_template(messages))
    assert gemma.tokenizer is not None
    text = gemma.tokenizer.decode(ids)
    assert "Yes" in text and "No" not in text
    assert ids.count(IDS["<|channel>"]) == 1  # at the end: no thought


def test_thinking_is_on_or_off(gemma: gemmakv.Gemma) -> None:
    messages = [Message("user", "Hi")]
    default = list(gemma.apply_chat_template(messages))
    off = list(gemma.apply_chat_template(messages, enable_thinking=False))
    on = list(gemma.apply_chat_template(messages, enable_thinking=True))
    assert default == off
    assert off[-1] == IDS["<channel|>"] and IDS["<|think|>"] not in off
    assert on.count(IDS["<|think|>"]) == 1
    assert IDS["<|channel>"] not in on


def test_the_smaller_models_begin_without_an_empty_thought() -> None:
    for case in CASES:
        full = Gemma4Template().render(**case)
        small = Gemma4Template(empty_thought=False).render(**case)
        empty = full[-1] == Segment("<channel|>", special=True)
        assert small == (full[:-3] if empty else full)


def test_results_of_tools() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {}}}
    result = {"role": "tool", "tool_call_id": "1",
              "content": {"b": 1, "A": ["x", {"c": None}]}}  # fmt: skip
    segments = Gemma4Template().render(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "tool_calls": [call]},
            result,
        ]
    )
    text = "".join(segment.text for segment in segments)
    assert text.endswith(
        "<|tool_call>call:f{}<tool_call|><|tool_response>response:f{A:["
        '<|"|>x<|"|>,{c:null}],b:1}<tool_response|>'
    )


@pytest.mark.parametrize("bad", [5, True, "ab", [1], {"a": 5}])
@pytest.mark.parametrize(
    "place", ["properties", "required", "items", "type", "description", "enum"]
)
def test_schemas_that_are_none(place: str, bad: Any) -> None:
    """A tool that is not strict may have any."""
    for schema in (
        {"type": "object", place: bad},
        {"type": "object", "properties": {"a": {"type": "object", place: bad}}},
        {"type": "object", "properties": {"a": {
            "type": "array", "items": {"type": "object", place: bad}}}},
    ):  # fmt: skip
        tool = {"function": {"name": "f", "parameters": schema}}
        segments = Gemma4Template().render(
            [{"role": "user", "content": "Hi"}], tools=[tool]
        )
        text = "".join(segment.text for segment in segments)
        assert "declaration:f{" in text


@pytest.mark.parametrize(
    "keywords, said",
    [
        ({"tools": [{}]}, r"tools\[0\]: expected"),
        ({"tools": [{"function": {"name": 1}}]}, r"tools\[0\]: expected"),
        ({"tools": TOOLS[0]}, "tools: expected a list"),
        ({"enable_thoughts": True}, "enable_thoughts: the template 'gemma4'"),
    ],
)
def test_what_it_does_not_know(keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Gemma4Template().render([Message("user", "Hi")], **keywords)


def test_a_segment_is_a_control_token_or_text() -> None:
    segments = Gemma4Template().render([Message("user", "a")])
    assert segments[:3] == [
        Segment("<bos>", special=True),
        Segment("<|turn>", special=True),
        Segment("user\na"),
    ]
    assert all(s.text in IDS for s in segments if s.special)


def test_a_vocabulary_without_its_turns(tiny: gemmakv.Gemma) -> None:
    assert tiny.tokenizer is not None
    encoder = Encoder(tiny.tokenizer, 2)
    segments = Gemma4Template().render([Message("user", "a")])
    with pytest.raises(gemmakv.MismatchError, match="<|turn>"):
        encoder.encode(segments)


def test_a_template_that_cannot_think(tiny: gemmakv.Gemma) -> None:
    said = "think: the template 'gemma' cannot ask"
    messages = [Message("user", "a")]
    with pytest.raises(ValueError, match=said):
        tiny.chat(messages, template="gemma", think=True)
    with pytest.raises(ValueError, match=said):
        gemmakv.Session(tiny, template="gemma", think=True)
    with pytest.raises(ValueError, match="think: expected True"):
        tiny.chat(messages, template="gemma", think="yes")  # type: ignore[arg-type]
    assert tiny.chat(messages, template="gemma", think=False, max_tokens=2)
