"""Generation options as flags of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from gemmakv.cli.arguments import texts_of
from gemmakv.cli.flags import parameter, with_parameters
from gemmakv.generation._option_kinds import Flag
from gemmakv.options import GenerationOptions, Option


def with_options(chat: bool) -> Callable[[Callable[..., Any]], Any]:
    """Adds a flag for each generation option, in place of the command's last
    parameter `**options`, which is given those that were typed.

    With `chat`, only those that are settings of a chat.
    """
    table = {
        name: option
        for name, option in GenerationOptions.table.items()
        if option.kind.schema() and (option.in_chat or not chat)
    }
    more = [_parameter(*row) for row in table.items()]

    def decorate(command: Callable[..., Any]) -> Any:
        def run(**arguments: Any) -> Any:
            for name, option in table.items():
                value = _read(name, option, arguments.pop(name))
                if value is not None:
                    arguments[name] = value
            return command(**arguments)

        return with_parameters(command, run, more)

    return decorate


def _read(name: str, option: Option, given: Any) -> Any:
    """Gives the value of what follows the flag; None if that is nothing."""
    if given in (None, []) or isinstance(option.kind, Flag):
        return given or None
    texts = texts_of(given if option.kind.repeated else [given])
    assert texts is not None
    value = option.kind.from_flags(name, texts)
    option.check(name, value)
    return value


def _parameter(name: str, option: Option) -> inspect.Parameter:
    kind, default = option.kind, option.default

    def check(given: Any) -> Any:  # before anything is loaded
        _read(name, option, given)
        return given

    help = option.help[0].upper() + option.help[1:]
    if kind.repeated:
        help += "; repeatable"
    if default is not None and not isinstance(kind, Flag):
        text = default if isinstance(default, str) else f"{default:g}"
        help += f". Default: {text}"
    return parameter(
        name,
        list[str] if kind.repeated else bool if isinstance(kind, Flag) else str,
        help + ".",
        metavar=kind.metavar or None,
        callback=check,
    )
