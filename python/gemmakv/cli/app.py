"""Commands and their options; a table of contents."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import typer

import gemmakv
from gemmakv.cli import EXIT_FAILURE, EXIT_USAGE, console, describe, fail
from gemmakv.cli.arguments import GETTING_A_MODEL, no_model
from gemmakv.cli.sources import place_of

# Where each command is: a module, its name there, that of its examples. Only
# what a command line asks for is imported, which takes time.
COMMANDS = {
    "chat": ("chat.command", "chat", "EXAMPLES"),
    "generate": ("generate", "generate", "EXAMPLES"),
    "embed": ("embed", "embed", "EXAMPLES"),
    "serve": ("serve", "serve", "EXAMPLES"),
    "info": ("info", "info", "EXAMPLES"),
    "verify": ("verify", "verify", "EXAMPLES"),
    "bench": ("bench", "bench", "EXAMPLES"),
    "pull": ("models", "pull", "PULL_EXAMPLES"),
    "list": ("models", "list_models", "LIST_EXAMPLES"),
    "rm": ("models", "rm", "RM_EXAMPLES"),
    "packed": ("packed", "packed_files", "EXAMPLES"),
}
# The same of commands that have commands: a module with an `app`.
GROUPS = {"cache": "cache"}


def make_app(arguments: Sequence[str]) -> typer.Typer:
    """With the command that these begin with, or with all."""
    app = typer.Typer(
        name="gemmakv",
        help="Gemma models on CPUs, with the KV cache as a first-class object.",
        epilog=GETTING_A_MODEL,
        no_args_is_help=True,
        # Plain pages: they are narrow, and a pipe shows them as they are.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    first = next(iter(arguments), "")
    known = first in COMMANDS or first in GROUPS
    for name, (place, function, examples) in COMMANDS.items():
        if name == first or not known:
            module = _module(place)
            epilog = getattr(module, examples)
            app.command(name, epilog=epilog)(getattr(module, function))
    for name, place in GROUPS.items():
        if name == first or not known:
            app.add_typer(_module(place).app, name=name)
    return app


def _module(place: str) -> ModuleType:
    return importlib.import_module(f"gemmakv.cli.{place}")


def _print_version(wanted: bool) -> None:
    if wanted:
        console.write(f"gemmakv {gemmakv.__version__}\n")
        raise typer.Exit()


def _root(
    version: bool | None = typer.Option(
        None,
        "--version",
        help="Print the version and exit.",
        callback=_print_version,
        is_eager=True,
    ),
) -> None:
    del version


# typer's base class of usage errors has no public name of its own: newer
# versions carry their own copy of click.
_CLICK_ERROR: type[Exception] = next(
    base
    for base in typer.BadParameter.__mro__
    if base.__name__ == "ClickException"
)


def _with_flags(command: Any, arguments: list[str], message: str) -> str:
    """A message of the library, with flags of the command for keywords."""
    known = getattr(command, "commands", {}).get(next(iter(arguments), ""))
    for parameter in getattr(known, "params", ()):
        name, flag = str(parameter.name), parameter.opts[0]
        if flag.startswith("--"):
            # Those of one word may mean anything elsewhere.
            where = r"(?<![\w-])" if "_" in name else "^"
            follows = r"\b" if "_" in name else "(?=: | is )"
            message = re.sub(where + name + follows, flag, message)
    return message


def _fail_usage(error: Exception) -> int:
    """Says what is wrong with a command line; gives the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(str(error))
        return EXIT_USAGE
    missing = getattr(getattr(error, "param", None), "name", None)
    if type(error).__name__ == "MissingParameter" and missing == "model":
        return fail(no_model(), EXIT_USAGE)
    text: str = getattr(error, "format_message", error.__str__)()
    message = " ".join(text.split())
    parsing = getattr(error.__cause__, "errors", None)
    if parsing is not None:  # newer typers check with pydantic
        found = repr(parsing()[0]["input"])
        message = re.sub(
            "Input should be a valid integer.*",
            lambda _: f"expected an integer, found {found}",
            message,
        )
        message = re.sub(
            "Input should be a valid boolean.*",
            lambda _: f"expected true or false, found {found}",
            message,
        )
    place = _place(error)
    if place is not None:
        message = re.sub(r"^Invalid value.*?:", f"{place}:", message)
    value = re.fullmatch(
        "Invalid value.*?(--[^' :]+)'?(: expected .+)", message
    )
    if value:
        return fail(value[1] + value[2], EXIT_USAGE)
    message = message.removeprefix("Invalid value: ")
    unknown = re.fullmatch("No such option: (-[^ ]+)", message)
    if unknown and _takes_text(error):
        message += f"; a text that begins with - follows a --: -- {unknown[1]}"
    if "(--help" not in message:
        message += " (--help lists the options)"
    return fail(message, EXIT_USAGE)


def _takes_text(error: Exception) -> bool:
    """Whether the command takes arguments that are no options."""
    command = getattr(getattr(error, "ctx", None), "command", None)
    return any(
        one.param_type_name == "argument"
        for one in getattr(command, "params", ())
    )


def _place(error: Exception) -> str | None:
    """Where a value stands that could not be read, if not on the command
    line.
    """
    context = getattr(error, "ctx", None)
    name = getattr(getattr(error, "param", None), "name", None)
    if context is None or name is None:
        return None
    return place_of(context, name)


def run(arguments: list[str]) -> int:
    """Exit code of a command line. Errors of the commands pass through."""
    command = typer.main.get_command(make_app(arguments))
    try:
        result: Any = command.main(
            args=arguments, prog_name="gemmakv", standalone_mode=False
        )
    except typer.Abort:
        raise KeyboardInterrupt from None
    except typer.Exit as leave:
        return leave.exit_code
    except (ValueError, gemmakv.GemmaKVError) as error:
        message = " ".join(_with_flags(command, arguments, str(error)).split())
        # What a model lacks is found in its file, not on the command line.
        usage = re.match("--(?!model:)", message)
        return fail(message, EXIT_USAGE if usage else EXIT_FAILURE)
    except OSError as error:
        if error.strerror:  # of a file, which it names
            raise
        return fail(_with_flags(command, arguments, describe(error)))
    except _CLICK_ERROR as error:
        return _fail_usage(error)
    return result if isinstance(result, int) else 0
