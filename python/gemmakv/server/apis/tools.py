"""The tools of OpenAI's requests, as the service has them.

Both of its APIs have functions and custom tools, which take one text: a
function here with the one argument `input`. Chat completions write a tool
inside `function` or `custom`, responses write it flat.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gemmakv.server.service.errors import refuse_others, unexpected, unsupported

_INPUT = "input"  # the argument of a custom tool
_FIELDS = ("name", "description", "parameters", "strict")
_ONE_TEXT = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}
_MODES = ("auto", "required")


@dataclasses.dataclass(frozen=True)
class RequestTools:
    """The tools of a request.

    Attributes:
      functions: as the service has them; None if there are none.
      choice: which of them are to be called.
      custom: names of those that take one text.
      names: the client's names for fields, by the service's.
      ignored: fields of tools that run elsewhere, and so nowhere here.
      not_enforced: fields that a call is not held to.
    """

    functions: list[dict[str, Any]] | None
    choice: str | Mapping[str, Any] | None
    custom: frozenset[str]
    names: dict[str, str]
    ignored: list[str]
    not_enforced: list[str]


def read_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    flat: bool,
) -> RequestTools:
    """Reads tools and which of them are to be called. `flat`: as responses
    write them. Raises RequestError.
    """
    functions: list[dict[str, Any]] = []
    custom: set[str] = set()
    names: dict[str, str] = {}
    ignored: list[str] = []
    not_enforced: list[str] = []
    allowed, choice = _choice(choice, flat)
    for i, tool in enumerate(tools or ()):
        kind, where = tool.get("type"), f"tools[{i}]"
        inner = tool
        if not flat:
            found = tool.get(str(kind))
            inner = found if isinstance(found, Mapping) else {}
            where += f".{kind}"
        if kind == "custom":
            function = {
                "name": inner.get("name"),
                "description": inner.get("description"),
                "parameters": _ONE_TEXT,
            }
            custom.add(str(inner.get("name")))
            form = inner.get("format")
            if isinstance(form, Mapping) and form.get("type") != "text":
                not_enforced.append(f"{where}.format")
        elif kind == "function" and flat:
            function = {name: inner.get(name) for name in _FIELDS}
        elif flat:
            ignored.append(where)
            continue
        else:  # the service says what is wrong with others
            names[f"tools[{len(functions)}]"] = f"tools[{i}]"
            functions.append(dict(tool))
            continue
        if allowed is not None and inner.get("name") not in allowed:
            continue
        ours = f"tools[{len(functions)}]"
        names[ours], names[f"{ours}.function"] = f"tools[{i}]", where
        said = {k: v for k, v in function.items() if v is not None}
        functions.append({"type": "function", "function": said})
    if allowed is not None and not flat:
        functions = [
            one
            for one in functions
            if (one.get("function") or {}).get("name") in allowed
        ]
    return RequestTools(
        functions or None, choice, frozenset(custom), names, ignored,
        not_enforced,
    )  # fmt: skip


def _choice(
    given: str | Mapping[str, Any] | None, flat: bool
) -> tuple[Sequence[str] | None, str | Mapping[str, Any] | None]:
    """Gives the names of the tools that may be called, None for all, and the
    choice among them, as the service has it.
    """
    if given is None or isinstance(given, str):
        return None, given
    kind = given.get("type")
    if kind == "allowed_tools":
        inner = given if flat else given.get("allowed_tools")
        if not isinstance(inner, Mapping):
            raise unexpected("tool_choice.allowed_tools", "an object", inner)
        where = "tool_choice" if flat else "tool_choice.allowed_tools"
        mode = inner.get("mode", "auto")
        if mode not in _MODES:
            raise unexpected(f"{where}.mode", "'auto' or 'required'", mode)
        listed = inner.get("tools")
        if not isinstance(listed, list):
            raise unexpected(f"{where}.tools", "a list of tools", listed)
        return [_name_in(one) for one in listed], str(mode)
    if kind == "custom":
        return None, _name_in(given)
    if kind != "function":
        if flat:
            raise unsupported("tool_choice.type", str(kind)[:60])
        return None, given
    if "name" in given:
        refuse_others("tool_choice", given, ("type", "name"))
        return None, {
            "type": "function",
            "function": {"name": given.get("name")},
        }
    return None, given


def _name_in(tool: Any) -> str:
    """Gives the name of a tool, flat or not."""
    if not isinstance(tool, Mapping):
        return ""
    inner = tool.get(str(tool.get("type")))
    found = inner if isinstance(inner, Mapping) else tool
    return str(found.get("name"))


def arguments_of(text: str) -> str:
    """Writes the arguments of a custom tool's call with a text, as JSON."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def text_of(arguments: str) -> str:
    """Gives the text that a custom tool is called with; where its arguments
    are not whole, their beginning.
    """
    try:
        found = json.loads(arguments)
    except ValueError:
        return arguments
    text = found.get(_INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
