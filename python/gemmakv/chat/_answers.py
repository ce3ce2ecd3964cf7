"""The form of an answer that a reply may be in the place of calls.

A reply to a request with tools and a `response_format` (or a `grammar`) is
either calls or an answer of that form. No text stands beside the calls, since
it would be an answer without the form.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gemmakv.errors import renamed
from gemmakv.generation._grammar import Grammar
from gemmakv.generation._options import grammar_of, split_rows
from gemmakv.generation._schema_fit import Attempt, Tried

# How calls and answers write JSON, whatever a schema says of itself.
JSON_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_OPTIONS = ("grammar", "response_format")


@dataclasses.dataclass(frozen=True)
class Answer:
    """The form of an answer.

    Attributes:
      name: the option that states it.
      grammar: what it allows.
    """

    name: str
    grammar: Grammar

    def rules(self, call: str = "") -> list[str]:
        """Writes lines of a Lark grammar whose rule `answer` is the form.

        `call` is the text that calls begin with, where that is text: no
        answer of a regular expression begins with it.
        """
        kind, text = self.grammar.kind, self.grammar.text
        if kind == "regex":
            calls = f" & ~/{re.escape(call)}(.|\\n)*/" if call else ""
            return ["answer: ANSWER", f"ANSWER: /{slashed(text)}/{calls}"]
        if kind == "lark":
            return [f"answer: %lark {{\n{text}\n}}"]
        schema = json.loads(text)
        style = {**JSON_STYLE, "lenient": False, "coerce_one_of": False}
        found = json.dumps({**schema, "x-guidance": style})
        return [f"answer: %json {found}"]

    def check(self, name: str, attempt: Attempt) -> None:
        """Raises ValueError that names the option, and the keyword of a
        schema, if the compiler does not take the form. What `attempt` raises
        begins with `name`.
        """
        place = self.name + self.grammar._place

        def attempt_here(tried: Sequence[Tried]) -> list[str | None]:
            try:
                return attempt(tried)
            except ValueError as error:
                raise renamed(
                    error, lambda words: place + words.removeprefix(name)
                ) from None

        self.grammar._fitted(place, attempt_here)


def answer_of(
    options: Mapping[str, Any],
) -> tuple[dict[str, Any], Answer | None]:
    """Splits options into those that say nothing of the form of an answer,
    and that form. Raises ValueError that names the option that is bad.
    """
    rest = {k: v for k, v in options.items() if k not in _OPTIONS}
    stated = {k: options[k] for k in _OPTIONS if options.get(k) is not None}
    [row] = split_rows(stated, 1, batch=False)
    name, grammar = grammar_of(row)
    return rest, None if grammar is None else Answer(name, grammar)


def slashed(pattern: str) -> str:
    """Writes a regular expression as it stands between two slashes."""
    parts = re.split(r"(\\.)", pattern, flags=re.DOTALL)
    for i in range(0, len(parts), 2):
        parts[i] = parts[i].replace("/", r"\/")
    return "".join(parts).replace("\n", r"\n").replace("\r", r"\r")
