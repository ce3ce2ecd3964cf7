"""What comes in with a response: items as messages, tools, formats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gemmakv.server.apis.call import Call
from gemmakv.server.apis.openai import thinks
from gemmakv.server.service.errors import (
    invalid,
    missing,
    refuse_others,
    unexpected,
)

_TEXTS = ("input_text", "output_text", "text")


def messages_in(
    given: str | list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Input items as messages; calls become part of the message before. And
    what the client calls these and the calls.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}], {"messages[0]": "input"}
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    thoughts = ""
    for i, item in enumerate(given):
        where = f"input[{i}]"
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            content = _content(item.get("content"), f"{where}.content")
            messages.append({"role": item.get("role"), "content": content})
            if thoughts and item.get("role") == "assistant":
                messages[-1]["reasoning"] = thoughts
            thoughts = ""
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
                if thoughts:
                    messages[-1]["reasoning"] = thoughts
            thoughts = ""
            calls = messages[-1].setdefault("tool_calls", [])
            place = f"messages[{len(messages) - 1}].tool_calls[{len(calls)}]"
            names[place] = names[f"{place}.function"] = where
            calls.append(_call_of(item, where))
        elif kind == "function_call_output":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": _text(item, "call_id", where),
                    "content": _content(item.get("output"), f"{where}.output"),
                }
            )
        elif kind == "reasoning":
            parts = _parts_of_thought(item, where)
            thoughts = "\n\n".join([*([thoughts] if thoughts else []), *parts])
        else:
            raise missing(f"{where}.type", str(kind)[:60])
        names.setdefault(f"messages[{len(messages) - 1}]", where)
    if not messages:
        raise invalid("input", "expected at least one message, found none")
    return messages, names


_FIRST = re.compile(r"messages\[(\d+)\]")


def shifted(names: Mapping[str, str]) -> dict[str, str]:
    """Of messages after the instructions."""
    found = {
        _FIRST.sub(lambda at: f"messages[{int(at[1]) + 1}]", ours): theirs
        for ours, theirs in names.items()
    }
    return found | {"messages[0]": "instructions"}


def _parts_of_thought(item: Mapping[str, Any], where: str) -> list[str]:
    """Of an item that another model may have made, without its text."""
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
        if kind not in _TEXTS:
            raise missing(f"{where}[{i}].type", str(kind)[:60])
        text = _text(part, "text", f"{where}[{i}]")
        parts.append({"type": "text", "text": text})
    return parts


def _call_of(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {
        "id": _text(item, "call_id", where),
        "type": "function",
        "function": {
            "name": _text(item, "name", where),
            "arguments": _text(item, "arguments", where),
        },
    }


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise unexpected(f"{where}.{name}", "a text", value)
    return value


def functions_of(
    tools: Sequence[Mapping[str, Any]] | None,
) -> list[Mapping[str, Any]]:
    """Those that are functions: others run elsewhere, and nowhere here."""
    return [tool for tool in tools or () if tool.get("type") == "function"]


def tools_of(
    given: Sequence[Mapping[str, Any]] | None,
) -> list[dict[str, Any]] | None:
    names = ("name", "description", "parameters", "strict")
    found: list[dict[str, Any]] = [
        {
            "type": "function",
            "function": {n: t[n] for n in names if t.get(n) is not None},
        }
        for t in functions_of(given)
    ]
    return found or None


def tool_names(
    given: Sequence[Mapping[str, Any]] | None,
) -> dict[str, str]:
    """What the client calls the fields of functions."""
    found: dict[str, str] = {}
    for i, tool in enumerate(given or ()):
        if tool.get("type") == "function":
            ours = f"tools[{len(found) // 2}]"
            found[ours] = found[f"{ours}.function"] = f"tools[{i}]"
    return found


def choice_of(given: str | dict[str, Any] | None) -> Any:
    if isinstance(given, dict):
        if given.get("type") != "function":
            raise missing("tool_choice.type", str(given.get("type"))[:60])
        refuse_others("tool_choice", given, ("type", "name"))
        return {"type": "function", "function": {"name": given.get("name")}}
    return given


def think_of(call: Call, given: Mapping[str, Any] | None) -> bool | None:
    """Agents ask any model for some effort, also one that cannot think."""
    effort = (given or {}).get("effort")
    if effort is None:
        return None
    wanted = thinks("reasoning.effort", effort)
    return wanted if call.service.can_think else None


def format_of(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise unexpected("text.format", "an object", given)
    if given.get("type") != "json_schema":
        return given
    schema = {k: v for k, v in given.items() if k != "type"}
    return {"type": "json_schema", "json_schema": schema}
