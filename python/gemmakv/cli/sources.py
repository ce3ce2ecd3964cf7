"""Values that stand in a variable or a file, and are named by these."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import typer

from gemmakv.errors import GemmaKVError, one_line

_CONFIG = "gemmakv.config"
_NAMED = re.compile(
    r"--(?P<flag>[a-z][a-z-]*)(?=:? )|(?P<name>[a-z][a-z_]*)(?=: | is )"
)


class Misplaced(typer.BadParameter):
    """A bad value; the message says where it stands."""

    def format_message(self) -> str:
        return self.message


def note_config(
    context: typer.Context, path: str, keys: dict[str, str]
) -> None:
    """Values are also read from a file; `keys` are its own, by the names of
    parameters.
    """
    context.meta[_CONFIG] = (path, keys)


def place_of(context: Any, name: str) -> str | None:
    """The variable, or the file and key, that a parameter's value stands in;
    None if it does not.
    """
    source = getattr(context.get_parameter_source(name), "name", "")
    if source == "ENVIRONMENT":
        for parameter in context.command.params:
            if parameter.name == name:
                return str(parameter.envvar)
    if source == "DEFAULT_MAP":
        path, keys = context.meta[_CONFIG]
        return f"{path}: {keys[name]}"
    return None


@contextlib.contextmanager
def blaming(context: typer.Context) -> Iterator[None]:
    """Has errors inside that begin with a parameter's name or flag name the
    place where its value stands.
    """
    try:
        yield
    except (ValueError, OSError, GemmaKVError, typer.BadParameter) as error:
        message = one_line(error)
        found = _NAMED.match(message)
        place = None
        if found is not None:
            name = found["name"] or found["flag"].replace("-", "_")
            place = place_of(context, name)
        if found is None or place is None:
            raise
        raise Misplaced(place + message[found.end() :]) from None
