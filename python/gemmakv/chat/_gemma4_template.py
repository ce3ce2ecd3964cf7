"""The turns of Gemma 4, for models that carry no template of their own."""

from __future__ import annotations

import dataclasses
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
from gemmakv.chat._turns import ANY_ORDER
from gemmakv.errors import brief, unexpected

_VARIABLES = ("enable_thinking",)
# Keys that the published template does not take for names of properties.
_KEYWORDS = ("description", "type", "properties", "required", "nullable")


class Gemma4Template:
    """As the template that Gemma 4's makers publish renders messages.

    Tools, calls and results have forms of their own. A thought is said again
    only where its turn goes on, behind the last message of the user; in turns
    that are over there is none.
    """

    name = "gemma4"
    stop: tuple[str, ...] = ()
    stop_tokens = ("<turn|>", "<|tool_response>")
    call_form = "native"
    knows_thinking = True
    turn_rules = dataclasses.replace(ANY_ORDER, replies=False, results=False)

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[Segment]:
        """`enable_thinking` of `kwargs`: whether the model is to think before
        it replies. Raises ValueError for other keywords and for bad tools.
        """
        for key, value in kwargs.items():
            if key not in _VARIABLES and value is not None:
                raise ValueError(
                    f"{key}: the template 'gemma4' has no such variable; "
                    f"expected enable_thinking, found {brief(value)}"
                )
        writer = _Writer()
        writer.mark("<bos>")
        writer.conversation(
            messages_of(messages),
            [] if tools is None else items("tools", tools),
            bool(kwargs.get("enable_thinking")),
            add_generation_prompt,
        )
        return writer.segments


class _Writer:
    """Puts segments together: text that follows text is one of them."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

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
        self,
        messages: list[Message],
        tools: list[Any],
        thinks: bool,
        opens: bool,
    ) -> None:
        told = messages[0].role in ("system", "developer")
        if thinks or tools or told:
            self.turn("system")
            if thinks:
                self.mark("<|think|>")
                self.text("\n")
            if told:
                self.text(messages.pop(0).text.strip())
            for i, tool in enumerate(tools):
                self.mark("<|tool>")
                self.tool(f"tools[{i}]", tool)
                self.mark("<tool|>")
            self.end_turn()
        goes_on = False  # the model's turn, at the end
        for i in range(len(messages)):
            if messages[i].role != "tool":
                goes_on = self.message(messages, i)
        if opens and not goes_on:
            self.turn("model")
            if not thinks:
                self.mark("<|channel>")
                self.text("thought\n")
                self.mark("<channel|>")

    def message(self, messages: Sequence[Message], i: int) -> bool:
        """A message, with the results that follow it. Returns whether the
        model's turn goes on.
        """
        message = messages[i]
        is_reply = message.role == "assistant"
        before = [m.role for m in messages[:i] if m.role != "tool"]
        if not is_reply or before[-1:] != ["assistant"]:
            self.turn("model" if is_reply else message.role)
        asked = any(m.role == "user" for m in messages[i:])
        if message.reasoning and message.tool_calls and not asked:
            self.mark("<|channel>")
            self.text(f"thought\n{message.reasoning}\n")
            self.mark("<channel|>")
        for call in message.tool_calls:
            function = call["function"]
            self.mark("<|tool_call>")
            self.text(f"call:{function['name']}")
            self.fields(function.get("arguments") or {}, bare=True)
            self.mark("<tool_call|>")
        results = False
        for result in messages[i + 1 :] if message.tool_calls else ():
            if result.role != "tool":
                break
            self.result(message, result)
            results = True
        said = False
        for part in message.parts:
            text = _without_thoughts(part) if is_reply else part
            self.text(text.strip())
            said = said or bool(part)
        if message.tool_calls and not results:
            self.mark("<|tool_response>")
        elif not results or said:
            self.end_turn()
        return bool(message.tool_calls)

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
        elif isinstance(value, bool):
            self.text("true" if value else "false")
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
