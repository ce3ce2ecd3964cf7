"""The settings of `/set`: names, meanings and how a value is typed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gemmakv.chat._session_file import OVERFLOWS
from gemmakv.generation._option_kinds import Choice, Flag, Seed
from gemmakv.generation._requests import requests_of
from gemmakv.options import GenerationOptions, Option

if TYPE_CHECKING:
    from gemmakv.chat._gemma import Gemma

DEFAULT_WORD = "default"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One entry. `default` is what holds where nothing is set."""

    name: str
    help: str
    parse: Callable[[str, str], object]  # of the name and a text
    default: object
    choices: tuple[str, ...] = ()

    def default_for(self, gemma: Gemma) -> object:
        """Returns what holds where nothing is set: guesses are made as the
        model was loaded to make them.
        """
        if self.name == "speculate":
            return requests_of(gemma).speculate
        return self.default

    def read(self, text: str) -> object:
        """The value that `text` stands for, None for the default; ValueError
        says what it may be.
        """
        if text == DEFAULT_WORD or (self.default is None and text == "none"):
            return None
        try:
            return self.parse(self.name, text)
        except ValueError as error:
            back = f"goes back to {show(self.default)}"
            raise ValueError(
                f"{error}; /set {self.name} {DEFAULT_WORD} "
                f"{'unsets it' if self.default is None else back}"
            ) from None


def _setting(name: str, option: Option) -> Setting:
    choices: tuple[str, ...] = ("on", "off")
    if not isinstance(option.kind, Flag):
        choices = ("random",) if isinstance(option.kind, Seed) else ()
        if isinstance(option.kind, Choice):
            choices = option.kind.names
        choices += ("none",) if option.default is None else ()
    return Setting(
        name, option.help, option.kind.parse, option.default, choices
    )


SETTINGS: Mapping[str, Setting] = {
    name: _setting(name, option)
    for name, option in GenerationOptions.table.items()
    if option.in_chat
} | {
    "overflow": Setting(
        "overflow",
        "when the context is full",
        Choice(OVERFLOWS).parse,
        "error",
        OVERFLOWS,
    ),
    "think": Setting(
        "think",
        "whether the model thinks before it replies",
        Flag().parse,
        None,
        ("on", "off", "none"),
    ),
}


def show(value: object) -> str:
    """A value as a person types it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return json.dumps(list(value), ensure_ascii=False)
    return str(value)
