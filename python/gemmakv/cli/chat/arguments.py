"""The arguments of commands: how one is written, read and completed."""

from __future__ import annotations

import dataclasses
import enum


class Kind(enum.Enum):
    """A meaning of an argument; completion goes by it. Usage lines name it."""

    COMMAND = "COMMAND"
    SESSION = "SESSION"  # one that exists
    NEW_NAME = "NAME"
    COUNT = "N"
    TURN = "TURN"
    PATH = "PATH"
    TEXT = "TEXT"
    SETTING = "KEY"
    VALUE = "VALUE"  # of the setting before it
    ALL = "all"  # this word
    TURN_OR_ALL = "TURN|all"


# These take the rest of the line, spaces and newlines included.
_REST = (Kind.PATH, Kind.TEXT, Kind.VALUE)


@dataclasses.dataclass(frozen=True)
class Argument:
    kind: Kind
    optional: bool = False

    @classmethod
    def of(cls, usage: str) -> Argument:
        """The argument of "N", or of "[N]", which may be left out."""
        return cls(Kind(usage.strip("[]")), usage.startswith("["))

    @property
    def takes_rest(self) -> bool:
        return self.kind in _REST

    def read(self, text: str) -> str | int:
        """The value of what was typed; ValueError says what it may be."""
        if self.kind is Kind.TURN_OR_ALL and text == Kind.ALL.value:
            return text
        if self.kind in (Kind.COUNT, Kind.TURN, Kind.TURN_OR_ALL):
            if text.isdecimal() and len(text) < 10:
                return int(text)
            raise ValueError(
                f"{self.kind.value.partition('|')[0]} is a whole number (0, "
                f"1, 2, ...), found {text!r}"
            )
        if self.kind is Kind.ALL and text != self.kind.value:
            raise ValueError(f"expected all or nothing, found {text!r}")
        if self.kind is Kind.PATH and len(text) > 1 and text[0] in "\"'":
            return text[1:-1] if text[-1] == text[0] else text
        return text


def split(text: str, arguments: tuple[Argument, ...]) -> list[str]:
    """Words of a command's tail, the last one whole if it takes the rest."""
    words: list[str] = []
    rest = text.strip()
    for argument in arguments:
        if not rest:
            return words
        if argument.takes_rest:
            return [*words, rest]
        word, *tail = rest.split(None, 1)
        words.append(word)
        rest = tail[0] if tail else ""
    return [*words, *rest.split()]
