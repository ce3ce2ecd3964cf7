"""The input of responses: its items as messages, its format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from gemmakv.server.apis.call import Call
from gemmakv.server.apis.openai import thinks
from gemmakv.server.apis.tools import arguments_of
from gemmakv.server.service.errors import (
    invalid,
    unexpected,
    unsupported,
)

# The fields of parts of a message that are texts, by the part's type.
_TEXTS = {
    "input_text": "text", "output_text": "text", "text": "text",
    "refusal": "refusal",
}  # fmt: skip
# What a compaction of this server begins with; its summary follows, as text.
COMPACTED = "gemmakv summary: "
_SUMMARY = "What was said before, in short:\n"


def messages_in(given: str | list[dict[str, Any]]) -> InputMessages:
    """Reads input items as messages. Raises RequestError."""
    found = InputMessages()
    if isinstance(given, str):
        found.messages.append({"role": "user", "content": given})
        found.names["messages[0]"] = "input"
        return found
    for i, item in enumerate(given):
        found.take(item, f"input[{i}]")
    if not found.messages:
        raise invalid("input", "expected at least one message, found none")
    return found


class InputMessages:
    """Messages of input items. Calls become part of the message before them.

    The types of items are an open set. Items of unknown types, and those that
    say nothing to a model, are left out, and named in `ignored`.

    Attributes:
      messages: as the service has them.
      names: the client's names for them and their calls.
      ignored: the items that were left out.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.names: dict[str, str] = {}
        self.ignored: list[str] = []
        self._thoughts: list[str] = []

    def take(self, item: Mapping[str, Any], where: str) -> None:
        """Reads one item. Raises RequestError."""
        kind = item.get("type") or ("message" if "role" in item else None)
        if not isinstance(kind, str):
            raise unexpected(f"{where}.type", "the type of an item", kind)
        if kind == "message":
            self._add_message(item, where)
        elif kind in _CALLS:
            self._add_call(_CALLS[kind](item, where), where)
        elif kind in _OUTPUTS:
            self._add_output(item, where)
        elif kind == "reasoning":
            self._thoughts += _parts_of_thought(item, where)
        elif kind in _SUMMARIES:
            self._add_summary(item, where)
        else:
            self.ignored.append(where)

    def _add(self, message: dict[str, Any], where: str) -> None:
        thoughts, self._thoughts = self._thoughts, []
        if thoughts and message["role"] == "assistant":
            message["reasoning"] = "\n\n".join(thoughts)
        self.names.setdefault(f"messages[{len(self.messages)}]", where)
        self.messages.append(message)

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        content = _content(item.get("content"), f"{where}.content")
        self._add({"role": item.get("role"), "content": content}, where)

    def _add_call(self, call: dict[str, Any], where: str) -> None:
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant":
            self._add({"role": "assistant", "content": None}, where)
        self._thoughts = []
        calls = self.messages[-1].setdefault("tool_calls", [])
        ours = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self.names[ours] = self.names[f"{ours}.function"] = where
        calls.append(call)

    def _add_output(self, item: Mapping[str, Any], where: str) -> None:
        output = item.get("output")
        content = _content("" if output is None else output, f"{where}.output")
        called = _text(item, "call_id", where)
        self._add(
            {"role": "tool", "tool_call_id": called, "content": content}, where
        )

    def _add_summary(self, item: Mapping[str, Any], where: str) -> None:
        """Reads a compaction that this server made."""
        content = str(item.get("encrypted_content"))
        if content.startswith(COMPACTED):
            text = _SUMMARY + content.removeprefix(COMPACTED)
            self._add({"role": "user", "content": text}, where)
        else:
            self.ignored.append(where)  # another server's


_FIRST = re.compile(r"messages\[(\d+)\]")


def shifted(names: Mapping[str, str]) -> dict[str, str]:
    """Gives the `names` of messages after the instructions."""
    found = {
        _FIRST.sub(lambda at: f"messages[{int(at[1]) + 1}]", ours): theirs
        for ours, theirs in names.items()
    }
    return found | {"messages[0]": "instructions"}


def _parts_of_thought(item: Mapping[str, Any], where: str) -> list[str]:
    """Gives the thoughts of an item; one that another model made may have none.
    """
    content = item.get("content") or []
    if not isinstance(content, list):
        raise unexpected(f"{where}.content", "a list of parts", content)
    return [
        _text(part, "text", f"{where}.content[{j}]")
        for j, part in enumerate(content)
        if isinstance(part, dict)
    ]


def _content(given: Any, where: str) -> Any:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise unexpected(where, "a text or a list of parts", given)
    parts = []
    for i, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        name = _TEXTS.get(str(kind))
        if name is None:
            raise unsupported(f"{where}[{i}].type", str(kind)[:60])
        text = _text(part, name, f"{where}[{i}]")
        parts.append({"type": "text", "text": text})
    return parts


def _call(item: Mapping[str, Any], arguments: str, where: str) -> Any:
    return {
        "id": _text(item, "call_id", where),
        "type": "function",
        "function": {
            "name": _text(item, "name", where),
            "arguments": arguments,
        },
    }


def _function_call(item: Mapping[str, Any], where: str) -> Any:
    return _call(item, _text(item, "arguments", where), where)


def _custom_call(item: Mapping[str, Any], where: str) -> Any:
    return _call(item, arguments_of(_text(item, "input", where)), where)


def _shell_call(item: Mapping[str, Any], where: str) -> Any:
    action = item.get("action")
    if not isinstance(action, Mapping):
        raise unexpected(f"{where}.action", "an object", action)
    arguments = {k: v for k, v in action.items() if v is not None}
    named = {**item, "name": "local_shell"}
    named.setdefault("call_id", item.get("id"))
    return _call(named, json.dumps(arguments), where)


_CALLS = {
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "local_shell_call": _shell_call,
}
_OUTPUTS = (
    "function_call_output", "custom_tool_call_output",
    "local_shell_call_output",
)  # fmt: skip
_SUMMARIES = ("compaction", "compaction_summary")


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise unexpected(f"{where}.{name}", "a text", value)
    return value


def think_of(call: Call, given: Mapping[str, Any] | None) -> bool | None:
    """Says whether the model is to think; None if the request does not say.
    Agents ask any model for some effort, also one that cannot think.
    """
    effort = (given or {}).get("effort")
    if effort is None:
        return None
    wanted = thinks("reasoning.effort", effort)
    return wanted if call.service.prompts.can_think else None


def format_of(given: Any) -> dict[str, Any]:
    """Makes a `response_format` of `text.format`. Raises RequestError."""
    if not isinstance(given, dict):
        raise unexpected("text.format", "an object", given)
    if given.get("type") != "json_schema":
        return given
    schema = {k: v for k, v in given.items() if k != "type"}
    return {"type": "json_schema", "json_schema": schema}
