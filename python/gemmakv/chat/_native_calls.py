"""Models' own forms of calls: Gemma 4's and FunctionGemma's.

    <|tool_call>call:NAME{city:<|"|>Rome<|"|>,days:3}<tool_call|>
    <start_function_call>call:NAME{city:<escape>Rome<escape>,days:3}
    <end_function_call>

Keys are bare, and strings stand between two control tokens: whatever is in
them is text.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Mapping
from typing import Any

from gemmakv._support.json import loads_finite
from gemmakv.chat._answers import Answer
from gemmakv.chat._native_grammar import native_grammar
from gemmakv.chat._tools import (
    ToolSchema,
    ToolUse,
    json_grammar,
    tool_grammar,
)
from gemmakv.generation._grammar import Grammar
from gemmakv.generation._result import ToolCall
from gemmakv.tokenizers._tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class NativeForm:
    """Names of the control tokens around calls, and of strings in them."""

    call: str
    call_end: str
    quote: str


CALL, CALL_END = "<|tool_call>", "<tool_call|>"
QUOTE = '<|"|>'
THOUGHT, THOUGHT_END = "<|channel>", "<channel|>"  # of a model that thinks
# By what templates call their form.
NATIVE = {
    "native": NativeForm(CALL, CALL_END, QUOTE),
    "functions": NativeForm(
        "<start_function_call>", "<end_function_call>", "<escape>"
    ),
}
# Stands for it in a call that is being read: no text holds a surrogate.
QUOTE_MARK = "\ud800"

_HEAD = re.compile(r"\s*call:\s*([A-Za-z0-9_.-]{1,128})\s*(?=\{)")
_KEY = re.compile(rf"\s*([^:{{}}\[\],{QUOTE_MARK}]+?)\s*:")
_WORD = re.compile(r"\s*(true|false|null)(?![A-Za-z0-9_])")
_NUMBER = re.compile(r"\s*(-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)")
_STRING = re.compile(rf"\s*{QUOTE_MARK}([^{QUOTE_MARK}]*){QUOTE_MARK}")
_DEPTH = 64


def read_call(text: str) -> ToolCall | None:
    """Reads the call between a call's control tokens, its strings between two
    `QUOTE_MARK`; gives None if it is none.
    """
    head = _HEAD.match(text)
    if head is None:
        return None
    reader = _Values(text, head.end())
    try:
        arguments = reader.value(0)
    except ValueError:
        return None
    if text[reader.position :].strip():
        return None
    return ToolCall("call_" + secrets.token_hex(12), head[1], arguments)


def grammar_of(
    form: str, tokenizer: Tokenizer, use: ToolUse, answer: Answer | None = None
) -> Grammar:
    """Makes the grammar of a reply that may call; `form`: "json" or one of
    `NATIVE`. A reply without calls has the form of `answer`, if there is one.

    Raises ValueError for a vocabulary without the form's control tokens, and
    for a schema that is none or, where its tool is strict, cannot be enforced.
    """
    if form not in NATIVE:
        return json_grammar(use, answer)
    native = NATIVE[form]
    marks: dict[str, int] = {}
    for name, token in (
        ("call", native.call),
        ("call_end", native.call_end),
        ("quote", native.quote),
        ("thought", THOUGHT),
        ("thought_end", THOUGHT_END),
    ):
        id = tokenizer.id_of(token)
        if id is not None:
            marks[name] = id
        elif not name.startswith("thought"):
            raise ValueError(
                f"tools: the vocabulary has no {token!r}, which this model's "
                "calls need"
            )
    if "thought_end" not in marks:
        marks.pop("thought", None)

    def write(
        schemas: Mapping[int, ToolSchema], strict: bool, answer: Answer | None
    ) -> str:
        return native_grammar(
            marks, schemas, free=use.free, parallel=use.parallel,
            strict=strict, answer=answer,
        )  # fmt: skip

    return tool_grammar(use, write, answer)


class _Values:
    """Reads values from `position` on; ValueError for what is none."""

    def __init__(self, text: str, position: int) -> None:
        self._text = text
        self.position = position

    def value(self, depth: int) -> Any:
        if depth > _DEPTH:
            raise ValueError("nested too deep")
        if self._take("{"):
            return self._object(depth)
        if self._take("["):
            return self._array(depth)
        found = self._match(_STRING)
        if found is not None:
            return found[1]
        found = self._match(_WORD) or self._match(_NUMBER)
        if found is None:
            raise ValueError("no value")
        return loads_finite(found[1])

    def _object(self, depth: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._take("}"):
            return fields
        while True:
            key = self._match(_STRING)
            if key is not None and not self._take(":"):
                raise ValueError("no colon")
            key = key or self._match(_KEY)
            if key is None or key[1] in fields:
                raise ValueError("no key")
            fields[key[1]] = self.value(depth + 1)
            if self._take("}"):
                return fields
            if not self._take(","):
                raise ValueError("no end of an object")

    def _array(self, depth: int) -> list[Any]:
        values: list[Any] = []
        if self._take("]"):
            return values
        while True:
            values.append(self.value(depth + 1))
            if self._take("]"):
                return values
            if not self._take(","):
                raise ValueError("no end of an array")

    def _take(self, letter: str) -> bool:
        found = re.compile(rf"\s*{re.escape(letter)}").match(
            self._text, self.position
        )
        if found is not None:
            self.position = found.end()
        return found is not None

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self.position)
        if found is not None:
            self.position = found.end()
        return found
