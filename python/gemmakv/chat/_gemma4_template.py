"""The turns of Gemma 4, for models that carry no template of their own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gemmakv._support.json import plain_json
from gemmakv.chat._messages import (
    Message,
    Messages,
    Segment,
    Tools,
    is_parts,
    items,
    messages_of,
)
from gemmakv.chat._native_calls import QUOTE
from gemmakv.chat._tools import plain_tools
from gemmakv.chat._turns import ANY_ORDER
from gemmakv.errors import brief, unexpected

_VARIABLES = ("enable_thinking", "preserve_thinking")
# Keys that the published template does not take for names of properties.
_KEYWORDS = ("description", "type", "properties", "required", "nullable")


class Gemma4Template:
    """Renders messages as the template does that Gemma 4's makers published
    for its larger models in July 2026.

    Tools, calls and results have forms of their own. A thought is said again
    only after the last message of the user; in turns that are over there is
    none. After the result of a tool no thought is begun: whether the model
    thinks again is left to it.
    """

    name = "gemma4"
    stop: tuple[str, ...] = ()
    stop_tokens = ("<turn|>", "<|tool_response>")
    call_form = "native"
    knows_thinking = True
    turn_rules = dataclasses.replace(ANY_ORDER, replies=False, results=False)

    def __init__(self, *, empty_thought: bool = True) -> None:
        """`empty_thought`: whether a reply without thoughts begins with an
        empty one; the templates of E2B and E4B leave it out.
        """
        self._empty_thought = empty_thought

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[Segment]:
        """Variables in `kwargs` are `enable_thinking`: whether the model is to
        think before it replies, and `preserve_thinking`: whether thoughts
        before calls are said in turns that are over, too. Raises ValueError
        for other keywords and for bad tools.
        """
        for key, value in kwargs.items():
            if key not in _VARIABLES and value is not None:
                raise ValueError(
                    f"{key}: the template 'gemma4' has no such variable; "
                    f"expected {' or '.join(_VARIABLES)}, found {brief(value)}"
                )
        thinks = bool(kwargs.get("enable_thinking"))
        writer = _Writer(bool(kwargs.get("preserve_thinking")))
        writer.mark("<bos>")
        turn_is_open = writer.conversation(
            messages_of(messages),
            list(plain_tools(items("tools", tools or ())) or ()),
            thinks,
        )
        if add_generation_prompt and not turn_is_open:
            writer.turn("model")
            if self._empty_thought and not thinks:
                writer.mark("<|channel>")
                writer.text("thought\n")
                writer.mark("<channel|>")
        return writer.segments


class _Writer:
    """Puts segments together: text that follows text is one of them."""

    def __init__(self, keeps_thoughts: bool) -> None:
        self.segments: list[Segment] = []
        self._keeps_thoughts = keeps_thoughts

    def mark(self, name: str) -> None:
        self.segments.append(Segment(name, special=True))

    def text(self, text: str) -> None:
        if not text:
            return
        if self.segments and not self.segments[-1].special:
            text = self.segments.pop().text + text
        self.segments.append(Segment(text))

    def quoted(self, text: str) -> None:
        self.mark(QUOTE)
        self.text(text)
        self.mark(QUOTE)

    def turn(self, role: str) -> None:
        self.mark("<|turn>")
        self.text(f"{role}\n")

    def end_turn(self) -> None:
        self.mark("<turn|>")
        self.text("\n")

    def conversation(
        self, messages: list[Message], tools: list[Any], thinks: bool
    ) -> bool:
        """Returns whether the model's turn is open at the end."""
        told = messages[0].role in ("system", "developer")
        if thinks or tools or told:
            self.turn("system")
            if thinks:
                self.mark("<|think|>")
                self.text("\n")
            if told:
                system = messages.pop(0)
                end = " " if is_parts(system.content) else ""
                for part in system.parts:
                    self.text(part.strip() + end)
            for i, tool in enumerate(tools):
                self.mark("<|tool>")
                self.tool(f"tools[{i}]", tool)
                self.mark("<tool|>")
            self.end_turn()
        is_open = False
        for i in range(len(messages)):
            if messages[i].role != "tool":
                is_open = self.message(messages, i)
        return is_open

    def message(self, messages: Sequence[Message], i: int) -> bool:
        """Writes a message, with the results that follow it. Returns whether
        the model's turn goes on.
        """
        message = messages[i]
        calls = message.tool_calls
        is_reply = message.role == "assistant"
        before = [m.role for m in messages[:i] if m.role != "tool"]
        after = [m.role for m in messages[i + 1 :] if m.role != "tool"]
        if not is_reply or before[-1:] != ["assistant"]:
            self.turn("model" if is_reply else message.role)
        asked = "user" in after or message.role == "user"
        if message.reasoning and (
            not asked or (calls and self._keeps_thoughts)
        ):
            self.mark("<|channel>")
            self.text(f"thought\n{message.reasoning}\n")
            self.mark("<channel|>")
        for call in calls:
            function = call["function"]
            self.mark("<|tool_call>")
            self.text(f"call:{function['name']}")
            self.fields(function.get("arguments") or {}, bare=True)
            self.mark("<tool_call|>")
        results = False
        for result in messages[i + 1 :] if calls else ():
            if result.role != "tool":
                break
            self.result(message, result)
            results = True
        said = False
        for part in message.parts:
            text = (_without_thoughts(part) if is_reply else part).strip()
            self.text(text)
            said = said or bool(text)
        if calls and not results:
            self.mark("<|tool_response>")
        elif is_reply and after[:1] == ["assistant"]:
            pass  # which goes on in this turn
        elif not results or said or after:
            self.end_turn()
        return bool(calls)

    def result(self, message: Message, result: Message) -> None:
        name = result.name or "unknown"
        for call in message.tool_calls:
            if call.get("id") == result.tool_call_id:
                name = call["function"]["name"]
        self.mark("<|tool_response>")
        self.text(f"response:{name}")
        content: Any = result.content
        if is_parts(content):
            content = "".join(result.parts)
        if not isinstance(content, Mapping):
            content = {"value": content}
        self.fields(content, bare=True)
        self.mark("<tool_response|>")

    def fields(self, fields: Mapping[str, Any], bare: bool) -> None:
        """An object; `bare`: its keys, and those in it, are not quoted."""
        self.text("{")
        for i, (key, value) in enumerate(_sorted(fields)):
            self.text("," if i else "")
            if bare:
                self.text(key)
            else:
                self.quoted(key)
            self.text(":")
            self.value(value, bare)
        self.text("}")

    def value(self, value: Any, bare: bool = False) -> None:
        if isinstance(value, str):
            self.quoted(value)
        elif isinstance(value, bool | None):
            self.text(json.dumps(value))
        elif isinstance(value, Mapping):
            self.fields(value, bare)
        elif isinstance(value, (list, tuple)):
            self.text("[")
            for i, one in enumerate(value):
                self.text("," if i else "")
                self.value(one, bare)
            self.text("]")
        else:
            self.text(str(value))

    def tool(self, name: str, tool: Any) -> None:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(
            function.get("name"), str
        ):
            raise unexpected(
                name, "{'type': 'function', 'function': {'name': ...}}", tool
            )
        function = plain_json(name, function)
        self.text(f"declaration:{function['name']}{{description:")
        self.quoted(_word(function, "description"))
        schema = function.get("parameters")
        if schema:
            self.text(",parameters:{")
            if _get(schema, "properties"):
                self.text("properties:{")
                self.properties(schema["properties"])
                self.text("},")
            if _get(schema, "required"):
                self.required(schema["required"])
                self.text(",")
            if _get(schema, "type"):
                self.text("type:")
                self.quoted(_word(schema, "type").upper())
                self.text("}")
        response = function.get("response")
        if response is not None:
            self.text(",response:{")
            if _get(response, "description"):
                self.text("description:")
                self.quoted(_word(response, "description"))
                self.text(",")
            if _word(response, "type").upper() == "OBJECT":
                self.text("type:")
                self.quoted("OBJECT")
                self.text("}")
        self.text("}")

    def required(self, names: Any) -> None:
        self.text("required:[")
        for i, name in enumerate(names if isinstance(names, Iterable) else ()):
            self.text("," if i else "")
            self.quoted(str(name))
        self.text("]")

    def properties(self, properties: Any) -> None:
        """The properties of a JSON schema; of anything else none."""
        first = True
        known = properties if isinstance(properties, Mapping) else {}
        for key, schema in _sorted(known):
            if key in _KEYWORDS:
                continue
            self.text("" if first else ",")
            first = False
            self.text(f"{key}:{{")
            self.schema(schema)
            self.text("}")

    def schema(self, schema: Any) -> None:
        kind = _word(schema, "type").upper()
        comma = ""
        if _get(schema, "description"):
            self.text("description:")
            self.quoted(_word(schema, "description"))
            comma = ","
        if kind == "STRING" and _get(schema, "enum"):
            self.text(f"{comma}enum:")
            self.value(schema["enum"])
            comma = ","
        item = _get(schema, "items")
        if kind == "ARRAY" and item and isinstance(item, Mapping):
            self.text(f"{comma}items:{{")
            self.items(item)
            self.text("}")
            comma = ","
        if _get(schema, "nullable"):
            self.text(f"{comma}nullable:true")
            comma = ","
        if kind == "OBJECT":
            inner = _get(schema, "properties")
            self.text(f"{comma}properties:{{")
            self.properties(inner if isinstance(inner, Mapping) else schema)
            self.text("}")
            comma = ","
            if _get(schema, "required"):
                self.text(",")
                self.required(schema["required"])
        self.text(f"{comma}type:")
        self.quoted(kind)

    def items(self, schema: Mapping[str, Any]) -> None:
        """The schema of an array's items."""
        given = [(k, v) for k, v in _sorted(schema) if v is not None]
        for i, (key, value) in enumerate(given):
            self.text("," if i else "")
            if key == "properties":
                self.text("properties:{")
                if isinstance(value, Mapping):
                    self.properties(value)
                self.text("}")
            elif key == "required":
                self.required(value)
            elif key == "type":
                self.text("type:")
                kinds = value if isinstance(value, list) else str(value).upper()
                if isinstance(kinds, list):
                    kinds = [str(kind).upper() for kind in kinds]
                self.value(kinds)
            else:
                self.text(f"{key}:")
                self.value(value)


def _sorted(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(fields.items(), key=lambda item: item[0].lower())


def _get(schema: Any, key: str) -> Any:
    return schema.get(key) if isinstance(schema, Mapping) else None


def _word(schema: Any, key: str) -> str:
    value = _get(schema, key)
    return "" if value is None else str(value)


def _without_thoughts(text: str) -> str:
    """A reply that somebody kept with its thoughts, as characters."""
    parts = text.split("<channel|>")
    return "".join(part.partition("<|channel>")[0] for part in parts)
