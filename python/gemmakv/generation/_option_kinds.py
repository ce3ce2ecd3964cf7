"""What values of generation keywords may be, as objects and as text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gemmakv._support.arguments import boolean, integer, number
from gemmakv._support.text import encode_utf8
from gemmakv.errors import ArgumentError, brief, unexpected
from gemmakv.generation._grammar import Grammar, of_response_format

MAX_INT = (1 << 31) - 1
FLOAT_MAX = float(np.finfo(np.float32).max)


class Kind:
    """A kind of value. `metavar` stands for one on a command line."""

    metavar = ""
    repeated = False  # on a command line

    def check(self, name: str, value: object) -> Any:
        """The value as the core takes it.

        Raises ValueError that begins with `name`.
        """
        raise NotImplementedError

    def parse(self, name: str, text: str) -> Any:
        """The value that a text stands for; raises as `check` does."""
        raise NotImplementedError

    def from_flags(self, name: str, texts: list[str]) -> Any:
        """The value of a command line's flags; raises as `check` does."""
        return self.parse(name, texts[0])

    def schema(self) -> dict[str, Any] | None:
        """Its JSON schema; None if JSON cannot say it."""
        return None

    def is_one(self, value: object) -> bool:
        """False for a list with a value for each row of a batch."""
        # NumPy arrays are no Sequence, but serve as a list.
        if isinstance(value, (str, bytes, Mapping)):
            return True
        if getattr(value, "ndim", 1) == 0:  # NumPy's array of one number
            return True
        return not hasattr(value, "__len__") or not hasattr(
            value, "__getitem__"
        )


@dataclasses.dataclass(frozen=True)
class Integer(Kind):
    least: int = 0
    most: int = MAX_INT
    metavar = "N"

    def check(self, name: str, value: object) -> int:
        return integer(name, value, self.least, self.most)

    def parse(self, name: str, text: str) -> int:
        return self.check(name, _number_in(text, int))

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


class Seed(Integer):
    def __init__(self) -> None:
        super().__init__(0, (1 << 64) - 1)

    def parse(self, name: str, text: str) -> int | None:  # type: ignore[override]
        return None if text == "random" else super().parse(name, text)


@dataclasses.dataclass(frozen=True)
class Number(Kind):
    """From `least`, or above it, to `most`."""

    least: float = -FLOAT_MAX
    most: float = FLOAT_MAX
    above: bool = False
    metavar = "X"

    def check(self, name: str, value: object) -> float:
        found = number(name, value, self.least, self.most)
        if self.above and np.float32(found) <= self.least:
            also = " also as float32" if found > self.least else ""
            raise unexpected(
                name, f"a number above {self.least:g}{also}", found
            )
        return found

    def parse(self, name: str, text: str) -> float:
        return self.check(name, _number_in(text, float))

    def schema(self) -> dict[str, Any]:
        least = "exclusiveMinimum" if self.above else "minimum"
        return {"type": "number", least: self.least, "maximum": self.most}


@dataclasses.dataclass(frozen=True)
class Choice(Kind):
    names: tuple[str, ...] = ()

    @property
    def metavar(self) -> str:  # type: ignore[override]
        return "|".join(self.names)

    def check(self, name: str, value: object) -> str:
        if isinstance(value, str) and value in self.names:
            return value
        *most, last = map(repr, self.names)
        raise unexpected(name, f"{', '.join(most)} or {last}", value)

    def parse(self, name: str, text: str) -> str:
        return self.check(name, text)

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.names)}


class Flag(Kind):
    _WORDS = {"true": True, "on": True, "false": False, "off": False}

    def check(self, name: str, value: object) -> bool:
        return boolean(name, value)

    def parse(self, name: str, text: str) -> bool:
        if text.lower() not in self._WORDS:
            raise unexpected(name, "on or off", text)
        return self._WORDS[text.lower()]

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


class ReplyStop(str):
    """A stop string of a reply that is given without the white space that it
    begins with: the string is not looked for in that white space, either.
    """


class ReplyStopData(bytes):
    """A `ReplyStop` in UTF-8."""


class Texts(Kind):
    metavar = "TEXT"
    repeated = True

    def check(self, name: str, value: object) -> list[bytes]:
        texts = [value]
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            texts = list(value)
        stops = []
        for text in texts:
            if not isinstance(text, str) or not text:
                raise unexpected(
                    name, "a str that is not empty, or a list of them", text
                )
            data = encode_utf8(name, text)
            in_reply = isinstance(text, ReplyStop)
            stops.append(ReplyStopData(data) if in_reply else data)
        return stops

    def parse(self, name: str, text: str) -> list[str]:
        r"""One text as it is typed (\n is a newline), or a JSON list."""
        if not text.startswith("["):
            return [text.replace("\\n", "\n")]
        return _json_list(name, text, str, 'a text or a list as in ["a", "b"]')

    def from_flags(self, name: str, texts: list[str]) -> list[str]:
        return texts

    def schema(self) -> dict[str, Any]:
        text = {"type": "string", "minLength": 1}
        return {"anyOf": [text, {"type": "array", "items": text}]}

    def is_one(self, value: object) -> bool:
        if isinstance(value, Sequence):
            return all(isinstance(one, str) for one in value)
        return super().is_one(value)


class TokenIds(Kind):
    metavar = "ID"
    repeated = True

    def check(self, name: str, value: Any) -> list[int]:
        if super().is_one(value):
            raise unexpected(name, "a list of token ids", value)
        return [
            integer(f"{name}[{i}]", one, 0, MAX_INT)
            for i, one in enumerate(value)
        ]

    def parse(self, name: str, text: str) -> list[int]:
        ids = text if text.startswith("[") else f"[{text}]"
        return self.check(
            name, _json_list(name, ids, int, "token ids as in 1, 106")
        )

    def from_flags(self, name: str, texts: list[str]) -> list[int]:
        return self.parse(name, ",".join(texts))

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": Integer().schema()}

    def is_one(self, value: object) -> bool:
        return super().is_one(value) or not any(
            one is None or hasattr(one, "__len__")
            for one in value  # type: ignore[attr-defined]
        )


class Bias(Kind):
    metavar = "ID=NUMBER"
    repeated = True

    def check(self, name: str, value: object) -> list[tuple[int, float]]:
        if not isinstance(value, Mapping):
            raise unexpected(name, "a mapping of token ids to numbers", value)
        return [
            (
                integer(f"{name}[{brief(token)}]", token, 0, MAX_INT),
                self._bias(f"{name}[{token!r}]", bias),
            )
            for token, bias in value.items()
        ]

    def _bias(self, name: str, value: object) -> float:
        bias = number(name, value)
        if bias > FLOAT_MAX:
            raise unexpected(name, "a finite float32 or -inf", bias)
        return bias

    def from_flags(self, name: str, texts: list[str]) -> dict[int, float]:
        found = {}
        for text in texts:
            token, _, bias = text.partition("=")
            try:
                id, value = int(token), float(bias)
            except ValueError:
                raise unexpected(
                    name, "ID=NUMBER (as in 42=-inf)", text
                ) from None
            if id in found:
                raise ArgumentError(
                    name, "each token once", id, shown=f"{id} twice"
                )
            found[id] = value
        return found

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number"},
        }


class Function(Kind):
    def check(self, name: str, value: object) -> object:
        if not callable(value):
            raise unexpected(name, "a callable(token_ids, logits)", value)
        return value

    def is_one(self, value: object) -> bool:
        return callable(value) or super().is_one(value)


class GrammarSource(Kind):
    metavar = "LARK"

    def check(self, name: str, value: object) -> Grammar:
        if isinstance(value, str):
            value = Grammar.lark(value)
        if not isinstance(value, Grammar):
            raise unexpected(name, "a Grammar or the text of a Lark one", value)
        return value

    def parse(self, name: str, text: str) -> str:
        self.check(name, text)
        return text

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1}


class ResponseFormat(Kind):
    metavar = "JSON"

    def check(self, name: str, value: object) -> Grammar | None:
        return of_response_format(name, value)

    def parse(self, name: str, text: str) -> Any:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        self.check(name, value)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "object"}


def _number_in(text: str, kind: Callable[[str], object]) -> object:
    """Reads a number; gives any other text as it is, to be refused by name."""
    try:
        return kind(text)
    except ValueError:
        return text


def _json_list(name: str, text: str, kind: type, expected: str) -> list[Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(
        type(one) is kind for one in found
    ):
        raise unexpected(name, expected, text)
    return found
