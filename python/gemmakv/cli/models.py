"""`gemmakv pull | list | rm`: the models on this machine."""

from __future__ import annotations

import json
import os
from typing import Any

import typer
from rich.table import Table

from gemmakv._support.sizes import in_bytes
from gemmakv.cli import console
from gemmakv.cli.arguments import MODEL_HELP, complete_model, examples
from gemmakv.cli.chat.table import count
from gemmakv.cli.failures import InputError
from gemmakv.models import _local as local
from gemmakv.models._local import LocalModel
from gemmakv.models._split import parts_of

PULL_EXAMPLES = examples(
    "gemmakv pull org/repo",
    "gemmakv pull org/repo:Q4_K_M",
    "gemmakv pull --json org/repo/file.gguf | jq -r .path",
)
LIST_EXAMPLES = examples("gemmakv list", "gemmakv list --json")
RM_EXAMPLES = examples(
    "gemmakv rm org/repo/file.gguf",
    "gemmakv rm --yes gemma-3-270m",
)
_JSON = typer.Option(False, "--json", help="Print JSON.")


def pull(
    model: str = typer.Argument(
        ..., metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model
    ),
    as_json: bool = _JSON,
) -> None:
    """Download a model, or what is missing of it, and print where it is."""
    path = console.fetch(model)
    if not as_json:
        console.write(path + "\n")
        return
    folder = os.path.isdir(path)
    files = (
        [entry.path for entry in os.scandir(path) if entry.is_file()]
        if folder
        else parts_of(path)
    )
    nbytes = sum(map(os.path.getsize, files))
    document = {"model": model, "path": path, "nbytes": nbytes}
    console.write(json.dumps(document) + "\n")


def list_models(as_json: bool = _JSON) -> None:
    """List the models that were downloaded or came with a package."""
    models = local.local_models()
    if as_json:
        document = {"models": [_document(model) for model in models]}
        console.write(json.dumps(document) + "\n")
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right")
    for model in models:
        table.add_row(in_bytes(model.nbytes), model.name)
        table.add_row("", model.path)
    total = in_bytes(sum(model.nbytes for model in models))
    console.write(console.render(table) if models else "")
    console.write(f"{total} in {count(len(models), 'model')}\n")
    for name in local.packaged_models():
        if all(name != model.name for model in models):
            console.write(
                f"{name} is not among them: a package has it, and its next "
                "use makes its file again\n"
            )


def _complete_local(incomplete: str) -> list[str]:
    names = [model.name for model in local.local_models()]
    return [name for name in names if name.startswith(incomplete)]


def rm(
    names: list[str] = typer.Argument(
        ...,
        metavar="MODEL...",
        help="Names as `gemmakv list` shows them.",
        autocompletion=_complete_local,
    ),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask."),
    as_json: bool = _JSON,
) -> None:
    """Delete models that `gemmakv list` lists, and their packed weights."""
    here = local.local_models()
    chosen = []
    for name in dict.fromkeys(names):
        found = [one for one in here if name in (one.name, one.path)]
        if not found:
            raise InputError(
                f"{name or repr(name)}: no such model is here; `gemmakv list` "
                "lists what there is"
            )
        chosen += found
    if not yes:
        lines = [
            f"{in_bytes(one.nbytes):>8}  {one.name}\n{'':10}{one.path}"
            for one in chosen
        ]
        console.ask_to_delete("rm", *lines)
    removed = [_document(model) for model in chosen]
    for model in chosen:
        local.remove(model)
    if as_json:
        console.write(json.dumps({"removed": removed}) + "\n")
        return
    for one in removed:
        size = in_bytes(one["nbytes"])
        console.write(f"deleted {one['name']} ({size})\n")


def _document(model: LocalModel) -> dict[str, Any]:
    return {"name": model.name, "path": model.path, "nbytes": model.nbytes}
