"""Commands and their options; a table of contents."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import typer

import gemmakv
from gemmakv.cli import console, fail, failures
from gemmakv.cli.arguments import GETTING_A_MODEL, show_help

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
    """Makes the app with the command that the arguments begin with; with all
    commands if they begin with none, and with none for --version.
    """
    app = typer.Typer(
        name="gemmakv",
        help="Gemma models on CPUs, with the KV cache as a first-class object.",
        epilog=GETTING_A_MODEL,
        # Plain pages: they are narrow, and a pipe shows them as they are.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    first = next(iter(arguments), "")
    known = first in (*COMMANDS, *GROUPS, "--version")
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
    context: typer.Context,
    version: bool | None = typer.Option(
        None,
        "--version",
        help="Print the version and exit.",
        callback=_print_version,
        is_eager=True,
    ),
) -> None:
    del version
    show_help(context)


def run(arguments: list[str]) -> int:
    """Runs a command line and gives its exit code; says why it fails."""
    command = typer.main.get_command(make_app(arguments))
    try:
        result: Any = command.main(
            args=arguments, prog_name="gemmakv", standalone_mode=False
        )
    except typer.Abort:
        raise KeyboardInterrupt from None
    except typer.Exit as leave:
        return leave.exit_code
    except BrokenPipeError:
        raise
    except failures.ERRORS as error:
        places = failures.places_of(command, arguments)
        return fail(*failures.line_of(error, places))
    return result if isinstance(result, int) else 0
