"""Messages: what is one, what is none, and what both say."""

from __future__ import annotations

import copy
import dataclasses
import types
from typing import Any

import pytest

from gemmakv import ArgumentError, Message, ToolCall
from gemmakv._support.json import plain_json
from gemmakv.chat._messages import messages_of

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def test_roles() -> None:
    for role in ("system", "user", "assistant", "tool", "developer"):
        assert Message(role, "a").role == role
    assert Message("model", "a") == Message("assistant", "a")
    assert hash(Message("model", "a")) == hash(Message("assistant", "a"))
    assert Message("user", "a", True) != Message("user", "a")
    copy = dataclasses.replace(Message("model", "a"), incomplete=True)
    assert copy == Message("assistant", "a", True)


def test_content() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert Message("user", parts).text == "a\nb"
    assert Message("user", []).text == ""
    assert Message("assistant", None, tool_calls=[CALL]).text == ""
    assert Message("tool", {"a": "\u00e9"}).text == '{"a": "\u00e9"}'
    assert Message("tool", [{"name": "f", "response": 1}]).parts == [
        '[{"name": "f", "response": 1}]'
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "incomplete": True},
        {"role": "assistant", "tool_calls": (CALL,)},
        {"role": "tool", "content": {"b": 1}, "name": "f", "tool_call_id": "1"},
        {"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]},
        {"role": "assistant", "content": "a", "reasoning_content": "b"},
        {"role": "user", "content": []},
    ],
)
def test_dicts_there_and_back(fields: dict[str, Any]) -> None:
    [message] = messages_of([fields])
    assert message.to_dict() == fields
    assert messages_of([message.to_dict(), message]) == [message, message]


def test_other_keys_change_no_field() -> None:
    fields = Message("user", "a", extra={"role": "system", "x": 1}).to_dict()
    assert fields == {"role": "user", "content": "a", "x": 1}
    with pytest.raises(ValueError, match="extra: expected a Mapping"):
        Message("user", "a", extra="x")  # type: ignore[arg-type]


def test_content_nested_too_deep_to_print() -> None:
    content: Any = "a"
    for _ in range(100_000):
        content = [content]
    with pytest.raises(ValueError, match="too long to print"):
        Message("tool", content)


def test_content_that_cannot_be_printed() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise LookupError

    with pytest.raises(ArgumentError, match="^content: .* found a Broken that"):
        Message("user", Broken())  # type: ignore[arg-type]


def test_what_the_caller_changes_later_changes_no_message() -> None:
    parts = [{"type": "text", "text": "a", "x": {"y": [1]}}]
    data = {"b": [{"c": 1}]}
    call = copy.deepcopy(CALL)
    extra = {"z": {"list": [1]}}
    said = Message("assistant", parts, tool_calls=[call], extra=extra)
    result = Message("tool", data)
    [of_dict] = messages_of([{"role": "user", "content": parts, **extra}])
    kept = [said, result, of_dict]
    before = copy.deepcopy([one.to_dict() for one in kept])

    def spoil(fields: dict[str, Any], call: dict[str, Any]) -> None:
        fields["content"][0]["x"]["y"].append(2)
        fields["content"][0]["text"] = "b"
        fields["content"].append({"type": "text", "text": "c"})
        fields["z"]["list"].append(2)
        call["function"]["arguments"]["a"] = 2
        call["function"]["name"] = "g"

    spoil({"content": parts, **extra}, call)
    data["b"][0]["c"] = 2
    assert [one.to_dict() for one in kept] == before
    assert said.text == "a" and result.text == '{"b": [{"c": 1}]}'
    # Nor does what is done to the dict that was made of it.
    given = said.to_dict()
    spoil(given, given["tool_calls"][0])
    assert said.to_dict() == before[0]


def test_content_nested_too_deep_to_copy() -> None:
    content: Any = "a"
    for _ in range(100_000):
        content = {"a": content}
    with pytest.raises(ValueError, match="content: .*nesting"):
        Message("tool", content)
    with pytest.raises(ValueError, match="extra: .*nesting"):
        Message("user", "a", extra=content)


def test_what_clients_send() -> None:
    """Keys without a value say nothing; arguments come as JSON text."""
    [message] = messages_of(
        [
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "name": None,
                "tool_calls": [
                    {
                        "id": "1",
                        "function": {"name": "f", "arguments": '{"a": 1}'},
                    }
                ],
            }
        ]
    )
    assert message.to_dict() == {
        "role": "assistant",
        "tool_calls": (
            {"id": "1", "function": {"name": "f", "arguments": {"a": 1}}},
        ),
    }
    [message] = messages_of(
        [{"role": "user", "content": "a", "tool_calls": None}]
    )
    assert message == Message("user", "a")


class Dumped:
    """Looks as the models of openai's and anthropic's libraries do."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self, *, exclude_none: bool = False) -> dict[str, Any]:
        return {
            k: v
            for k, v in self.fields.items()
            if not (exclude_none and v is None)
        }


def test_what_other_libraries_give() -> None:
    """Their messages, blocks and calls, and ours, may be mixed."""
    call = ToolCall("1", "f", {"a": 1})
    given: list[Any] = [
        Dumped(role="user", content="a", name=None),
        {"role": "user", "content": [Dumped(type="text", text="b", x=None)]},
        types.SimpleNamespace(role="assistant", content="c", tool_calls=None),
        Dumped(role="assistant", content=None, tool_calls=[call.to_dict()]),
        {"role": "assistant", "tool_calls": [Dumped(**call.to_dict())]},
        {"role": "assistant", "tool_calls": [call]},
        types.SimpleNamespace(message=Message("assistant", "d")),
        call.result({"b": 2}),
    ]
    asked = Message("assistant", None, tool_calls=[call.to_dict()])
    assert messages_of(given) == [
        Message("user", "a"),
        Message("user", [{"type": "text", "text": "b"}]),
        Message("assistant", "c"),
        asked,
        asked,
        asked,
        Message("assistant", "d"),
        Message("tool", {"b": 2}, name="f", tool_call_id="1"),
    ]
    with pytest.raises(ValueError, match=r"messages\[1\]: expected .*class"):
        messages_of([given[0], Dumped])


USER = {"role": "user", "content": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([], "messages: expected at least one, found none"),
        ("Hi", "messages: expected a list, found 'Hi'"),
        (USER, "messages: expected a list, found {'role'"),
        (None, "messages: expected a list, found None"),
        ([USER, "Hi"], r"messages\[1\]: expected a Message or a dict"),
        ([{"content": "a"}], r"messages\[0\]: expected a Message or a dict"),
        ([{**USER, "role": "bot"}], r"messages\[0\].role: .* found 'bot'"),
        ([{**USER, "role": None}], r"messages\[0\].role: .* found None"),
        ([{"role": "user"}], r"messages\[0\].content: .* found None"),
        ([{**USER, "content": b"a"}], r"content: expected a str or a list"),
        ([{**USER, "content": {"a": 1}}], r"content: expected a str or a list"),
        ([{**USER, "content": ["a"]}], r"content\[0\]: expected {'type"),
        (
            [{**USER, "content": [{"type": "text", "text": "a"}, IMAGE]}],
            r"messages\[0\].content\[1\].type: expected 'text' \(images and "
            "other kinds are not supported\\), found 'image_url'",
        ),
        ([{"role": "tool", "content": [IMAGE]}], r"content\[0\].type"),
        ([{**USER, "content": [{"type": "text"}]}], r"\[0\]: .* found {'ty"),
        ([{**USER, "incomplete": 1}], "incomplete: expected a bool, found 1"),
        ([{**USER, "name": 3}], r"messages\[0\].name: expected a str, found 3"),
        ([{**USER, "tool_calls": "f"}], "tool_calls: expected a list"),
        ([{**USER, "tool_calls": [{}]}], r"tool_calls\[0\]: expected {'func"),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"function": {"name": "f", "arguments": "[1"}}
                    ],
                }
            ],
            r"\[0\].function.arguments: expected a dict or the JSON text of "
            r"one, found '\[1'",
        ),
        *(
            (
                [{"role": "assistant", "tool_calls": [
                    {"function": {"name": "f", "arguments": bad}}]}],
                r"\[0\].function.arguments: expected a dict or the JSON text",
            )
            for bad in (5, 1.5, True, [], ["a"], "null", "5")
        ),
    ],
)  # fmt: skip
def test_what_is_no_message(messages: Any, found: str) -> None:
    with pytest.raises(ValueError, match=found) as error:
        messages_of(messages)
    assert "\n" not in str(error.value)


def test_only_what_json_can_say_reaches_a_template() -> None:
    class Loud(str):
        def __str__(self) -> str:
            return "loud"

        __format__ = __html__ = __str__  # type: ignore[assignment]

    [copy] = plain_json("x", (Loud("a"),))
    assert type(copy) is str and copy == "a"
    deep: Any = "a"
    for _ in range(200_000):
        deep = [deep]
    around: list[Any] = []
    around.append(around)
    for value, found in [
        (deep, "x: expected what JSON can say, found maximum recursion"),
        (around, "x: expected what JSON can say, found Circular"),
        ({"a": [object()]}, "x: expected what JSON can say, found <object"),
        ({"a": {(): 2}}, "x: expected what JSON can say, found keys must be"),
        ({"a": "\ud800"}, r"x: expected Unicode text, found a .* \(U\+D800\)"),
        ({"\udfff": 1}, r"x: expected Unicode text, found a .* \(U\+DFFF\)"),
        (["\ud83d", "\ude00"], "x: expected Unicode text, found a lone"),
        (b"a", "found b'a'"),
    ]:
        with pytest.raises(ValueError, match=found) as error:
            plain_json("x", value)
        assert len(str(error.value)) < 200
