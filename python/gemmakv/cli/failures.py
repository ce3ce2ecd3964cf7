"""The line and the exit code of an error that ends a command.

The library names the argument that it refuses at the beginning of a message.
A user knows the flag, the variable or the key of a file in which the value
stands: the name of that place is put there instead. What follows stays as it
is, since it may be the user's own text.

The exit code is 2 if the command line, a variable or the file of settings is
at fault, else 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import typer

from gemmakv._support.refusals import refusal
from gemmakv.cli import EXIT_FAILURE, EXIT_USAGE, describe
from gemmakv.cli.arguments import no_model
from gemmakv.errors import (
    ArgumentError,
    CacheFullError,
    GemmaKVError,
    MismatchError,
)

_VARIABLE = re.compile("[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
_ARGUMENT = re.compile("[a-z][a-z0-9_]*")
# The name of an argument at the beginning of a message. One without an
# underscore may also be a word of a sentence.
_LEADING = re.compile(
    r"[a-z]+(_[a-z]+)+(?!\w)|[a-z]+(?=(\[[^]]*\])?(: | is | key: ))"
)

class InputError(ValueError):
    """What a command was given to work on is bad; the message begins with its
    name, which is not taken for that of an argument.
    """


class Misplaced(Exception):
    """A value is bad; the message begins with the place in which it stands.

    Attributes:
      usage: see `is_usage`.
    """

    def __init__(self, message: str, *, usage: bool = True) -> None:
        super().__init__(message)
        self.usage = usage


# The errors that `line_of` describes.
ERRORS = (ValueError, OSError, GemmaKVError, typer.TyperException, Misplaced)


def argument_of(error: Exception) -> str:
    """Gives the name of the argument that a message begins with; "" if it
    begins with anything else.
    """
    found = None
    if isinstance(error, ArgumentError):
        found = _ARGUMENT.match(error.argument)
    elif type(error) in (ValueError, MismatchError) or (
        isinstance(error, OSError) and not error.strerror
    ):
        found = _LEADING.match(str(error))
    return "" if found is None else found[0]


def is_usage(argument: str, error: Exception) -> bool:
    """Tells whether what was typed, or written, for an argument is at fault,
    and not what is found there.
    """
    # What a model lacks is found in its file.
    return argument != "model" and not isinstance(error, OSError)


def places_of(command: Any, words: Iterable[str]) -> dict[str, str]:
    """Gives the flags and the arguments, as the help page has them, of the
    command that a command line names, by the names of its parameters.
    """
    for word in words:
        inner = getattr(command, "commands", {}).get(word)
        if inner is None:
            break
        command = inner
    return {one.name: _place_of(one) for one in command.params}


def _place_of(parameter: Any) -> str:
    name: str = parameter.opts[0]
    return name if name[:1] == "-" else parameter.metavar or name.upper()


def line_of(error: Exception, places: Mapping[str, str]) -> tuple[str, int]:
    """Gives what to say of an error, which is one of `ERRORS`, and the exit
    code; `places` are those of the command.
    """
    if isinstance(error, typer.TyperException):
        return " ".join(_usage(error).split()), error.exit_code
    line = describe(error)
    if isinstance(error, Misplaced):
        return line, EXIT_USAGE if error.usage else EXIT_FAILURE
    if isinstance(error, CacheFullError) and "capacity_tokens" in places:
        line += f"; see {places['capacity_tokens']}"
    argument = argument_of(error)
    at_fault = isinstance(error, ArgumentError) and bool(
        _VARIABLE.fullmatch(error.argument)
    )
    if argument in places:
        line = places[argument] + line[len(argument) :]
        at_fault = is_usage(argument, error)
    return line, EXIT_USAGE if at_fault else EXIT_FAILURE


def _usage(error: typer.TyperException) -> str:
    """Says what is wrong with a command line."""
    message = error.format_message()
    if isinstance(error, typer.BadParameter):
        place = _place(error)
        parsed = getattr(error.__cause__, "errors", None)
        if not error.message:  # a value that has to be there is not
            if place == "--model":
                return no_model()
        elif not place:
            message = error.message
        else:
            words = refusal(parsed()[0]) if parsed else error.message
            message = f"{place}: {words}"
            if place.startswith("--"):
                return message
    elif hasattr(error, "possibilities") and _takes_texts(error):
        name = getattr(error, "option_name", "")
        message += f"; a text that begins with - follows a --: -- {name}"
    return f"{message} (--help lists the options)"


def _place(error: typer.BadParameter) -> str:
    """Gives the flag, or the name of the argument, whose value is bad."""
    if error.param_hint is not None:
        return str(error.param_hint)
    return "" if error.param is None else _place_of(error.param)


def _takes_texts(error: typer.TyperException) -> bool:
    """Says whether the command takes arguments that are no options."""
    command = getattr(getattr(error, "ctx", None), "command", None)
    return any(
        one.param_type_name == "argument"
        for one in getattr(command, "params", ())
    )
