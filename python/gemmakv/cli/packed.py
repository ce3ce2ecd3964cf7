"""`gemmakv packed`: the files of packed weights."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import typer

from gemmakv import _core
from gemmakv._support.sizes import in_bytes
from gemmakv.cli import console
from gemmakv.cli.arguments import examples
from gemmakv.cli.chat.table import count
from gemmakv.cli.failures import InputError
from gemmakv.errors import CorruptFile
from gemmakv.models import _packed as packed
from gemmakv.models._aliases import ALIASES

EXAMPLES = examples(
    "gemmakv packed",
    "gemmakv packed --verify",
    "gemmakv packed --remove gemma-3-270m",
    "gemmakv packed --expire  # also happens when one is made",
    "gemmakv packed --json | jq '.files | length'",
)


def packed_files(
    folder: Path | None = typer.Option(
        None,
        metavar="PATH",
        help="Look in this folder. Default: the user's cache folder.",
    ),
    clear: bool = typer.Option(
        False,
        "--clear",
        help="Delete all. Safe at any time: they are made again when needed.",
    ),
    remove: str | None = typer.Option(
        None,
        "--remove",
        metavar="NAME",
        help="Delete those of one model, by its name, its path, the name of a "
        "file, or the beginning of a name that only one model has.",
    ),
    expire: bool = typer.Option(
        False,
        "--expire",
        help="Delete those of deleted models, those unused for "
        "GEMMAKV_PACKED_DAYS (30), and the oldest beyond GEMMAKV_PACKED_GB "
        "(50).",
    ),
    verify: bool = typer.Option(
        False,
        "--verify",
        help="Compare every byte with the hashes in the files.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List or delete the weights that were packed for quick starts.

    The first load of a model keeps its weights as the kernels read them in
    a file; later loads open it, and all processes share its memory.
    """
    if folder is None:
        folder = packed.default_folder()
    if folder is None:
        raise ValueError(
            "GEMMAKV_PACKED_CACHE is off; --folder names a folder"
        )
    deletes = clear or expire or remove is not None
    if clear + expire + verify + (remove is not None) > 1:
        raise typer.BadParameter(
            "--clear, --remove, --expire and --verify: expected one of them"
        )
    files = packed.expire(folder) if expire else packed.files(folder)
    if remove is not None:
        files = _named(files, remove)
    if clear or remove is not None:
        for file in files:
            packed.remove(file)
    damaged = [file for file in files if verify and not _is_sound(file)]
    if as_json:
        document = {
            "folder": str(folder),
            "deleted": deletes,
            "damaged": [str(file.path) for file in damaged],
            "files": [
                vars(file) | {"path": str(file.path), "name": file.name}
                for file in files
            ],
        }
        console.write(json.dumps(document) + "\n")
    else:
        total = in_bytes(sum(file.nbytes for file in files))
        did = "deleted from" if deletes else "in"
        console.write(
            _render(files, damaged)
            + f"{total} in {count(len(files), 'file')} {did} {folder}\n"
        )
    raise typer.Exit(1 if damaged else 0)


def _named(
    files: list[packed.PackedFile], name: str
) -> list[packed.PackedFile]:
    """Finds those of the model that a person names."""
    names = {name}
    if name in ALIASES:
        names.add(ALIASES[name].file_name)
    found = [
        file
        for file in files
        if file.name in names or os.path.abspath(name) in file.sources
    ]
    if found:
        return found
    found = [file for file in files if name and _begins(file, name)]
    models = sorted({_model_of(file) for file in found})
    if len(models) > 1:
        raise InputError(
            f"{name}: expected the name of one model, found a beginning of "
            + ", ".join(models)
        )
    if not found:
        raise InputError(
            f"{name or repr('')}: no packed file of that name; "
            "`gemmakv packed` lists what there is"
        )
    return found


def _begins(file: packed.PackedFile, start: str) -> bool:
    return file.path.name.startswith(start) or (
        bool(file.sources) and file.name.startswith(start)
    )


def _model_of(file: packed.PackedFile) -> str:
    return file.name if file.sources else file.path.name


def _render(
    files: list[packed.PackedFile], damaged: list[packed.PackedFile]
) -> str:
    """Two lines for each file: what it is of, and its path."""
    lines = []
    for file in files:
        kind = f" as {file.quantize}" if file.quantize else ""
        days = max(0, int((time.time() - file.used) // 86400))
        used = f"used {count(days, 'day')} ago" if days else "used today"
        left = "; the model is gone" if file.orphaned else ""
        if not file.complete:
            used = "being written"
        lines += [
            f"{in_bytes(file.nbytes):>8}  {file.name}{kind}, {used}{left}\n",
            f"{'':10}{file.path}{'  damaged' if file in damaged else ''}\n",
        ]
    return "".join(lines)


def _is_sound(file: packed.PackedFile) -> bool:
    if not file.complete:
        return True
    try:
        _core.check_packed_file(os.fsencode(file.path))
    except CorruptFile:
        return False
    return True
