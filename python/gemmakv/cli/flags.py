"""Flags of a command that come from a table instead of its signature."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import typer

from gemmakv.cli.arguments import complete_model

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

Command = Callable[..., Any]


def flag_of(name: str) -> str:
    """Gives the flag of a parameter."""
    return "--" + name.replace("_", "-")


def parameter(
    name: str, annotation: Any, help: str, *more_flags: str, **how: Any
) -> inspect.Parameter:
    """Makes a parameter that is a flag, and None if the flag is not given."""
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=annotation | None,
        default=typer.Option(
            None, flag_of(name), *more_flags, help=help, **how
        ),
    )


def with_parameters(
    command: Command, run: Command, more: Iterable[inspect.Parameter]
) -> Any:
    """Gives `run` the signature of a command, with `more` parameters in place
    of the last one, which stands for them.
    """
    hints = typing.get_type_hints(command)
    *own, _ = inspect.signature(command).parameters.values()
    parameters = [p.replace(annotation=hints[p.name]) for p in own]
    parameters += more
    wrapped = functools.wraps(command)(run)
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    wrapped.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        parameters
    )
    return wrapped


def with_settings(settings: type[BaseModel]) -> Callable[[Command], Any]:
    """Adds a flag for each field of a class, in place of the command's last
    parameter `**flags`, which is given the texts of those that were typed.
    """
    more = [_of_field(*row) for row in settings.model_fields.items()]

    def decorate(command: Command) -> Any:
        def run(**arguments: Any) -> Any:
            for name in settings.model_fields:
                if arguments[name] in (None, []):
                    del arguments[name]
            return command(**arguments)

        return with_parameters(command, run, more)

    return decorate


def help_of(field: FieldInfo) -> str:
    """Gives what there is to say of a setting, its default included."""
    help, default = field.description or "", field.default
    if default == []:
        help += " Repeatable."
    elif isinstance(default, float):
        help += f" Default: {default:g}."
    elif default not in (None, False):
        help += f" Default: {default}."
    return help


def _of_field(name: str, field: FieldInfo) -> inspect.Parameter:
    kinds = typing.get_args(field.annotation) or (field.annotation,)
    help = help_of(field)
    extra = typing.cast("dict[str, Any]", field.json_schema_extra or {})
    if kinds == (bool,):
        return parameter(name, bool, help)
    return parameter(
        name,
        list[str] if field.default == [] else str,
        help,
        *(["-m"] if name == "model" else []),
        metavar=extra["metavar"],
        autocompletion=complete_model if extra["metavar"] == "MODEL" else None,
    )
