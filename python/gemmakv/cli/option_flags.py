"""Generation options as flags of a command."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import typer

from gemmakv.cli.arguments import texts_of
from gemmakv.generation._option_kinds import Flag
from gemmakv.options import GenerationOptions, Option


def with_options(chat: bool) -> Callable[[Callable[..., Any]], Any]:
    """A flag for each generation option, in place of the command's last
    parameter `**options`, which is given those that were typed.

    With `chat`, only those that are settings of a chat.
    """
    table = {
        name: option
        for name, option in GenerationOptions.table.items()
        if option.kind.schema() and (option.in_chat or not chat)
    }

    def decorate(command: Callable[..., Any]) -> Any:
        hints = typing.get_type_hints(command)
        *own, _ = inspect.signature(command).parameters.values()
        parameters = [p.replace(annotation=hints[p.name]) for p in own]
        parameters += [_parameter(*row) for row in table.items()]

        @functools.wraps(command)
        def run(**arguments: Any) -> Any:
            for name, option in table.items():
                value = _read(name, option, arguments.pop(name))
                if value is not None:
                    arguments[name] = value
            return command(**arguments)

        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            parameters
        )
        return run

    return decorate


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _read(name: str, option: Option, given: Any) -> Any:
    """The value of what stands behind the flag; None if that is nothing."""
    if given in (None, []) or isinstance(option.kind, Flag):
        return given or None
    texts = texts_of(given if option.kind.repeated else [given])
    assert texts is not None
    value = option.kind.from_flags(_flag(name), texts)
    option.check(_flag(name), value)
    return value


def _parameter(name: str, option: Option) -> inspect.Parameter:
    kind, default = option.kind, option.default

    def check(given: Any) -> Any:
        try:
            _read(name, option, given)
        except ValueError as error:
            words = str(error).removeprefix(f"{_flag(name)}: ")
            raise typer.BadParameter(words) from None
        return given

    help = option.help[0].upper() + option.help[1:]
    if kind.repeated:
        help += "; repeatable"
    if default is not None and not isinstance(kind, Flag):
        text = default if isinstance(default, str) else f"{default:g}"
        help += f". Default: {text}"
    annotation: Any = bool if isinstance(kind, Flag) else str
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=(list[str] if kind.repeated else annotation) | None,
        default=typer.Option(
            None,
            _flag(name),
            metavar=kind.metavar or None,
            help=help + ".",
            callback=check,
        ),
    )
