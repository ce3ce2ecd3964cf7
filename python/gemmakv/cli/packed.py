"""`gemmakv packed`: the files of packed weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

import typer

from gemmakv import _core
from gemmakv.cli import console
from gemmakv.cli.arguments import examples
from gemmakv.errors import CorruptFile
from gemmakv.models import _packed as packed

EXAMPLES = examples(
    "gemmakv packed",
    "gemmakv packed --verify",
    "gemmakv packed --clear",
    "gemmakv packed --json | jq '.files | length'",
)


def packed_files(
    folder: Path | None = typer.Option(
        None, metavar="PATH", help="Default: the user's cache folder."
    ),
    clear: bool = typer.Option(
        False,
        "--clear",
        help="Delete them. Safe at any time: they are made again as needed.",
    ),
    verify: bool = typer.Option(
        False,
        "--verify",
        help="Compare every byte with the files' own hashes.",
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
    if clear and verify:
        raise ValueError("--clear and --verify: expected one of them")
    files = packed.clear(folder) if clear else packed.files(folder)
    damaged = [file for file in files if verify and not _is_sound(file)]
    if as_json:
        document = {
            "folder": str(folder),
            "deleted": clear,
            "damaged": [str(file.path) for file in damaged],
            "files": [vars(file) | {"path": str(file.path)} for file in files],
        }
        console.write(json.dumps(document) + "\n")
        raise typer.Exit(1 if damaged else 0)
    lines = [
        f"{file.nbytes:>15,}  {file.path}"
        + ("  damaged" if file in damaged else "")
        for file in files
    ]
    total = sum(file.nbytes for file in files)
    did = "deleted from" if clear else "in"
    lines.append(f"{total:>15,}  bytes, {len(files)} files {did} {folder}")
    console.write("\n".join(lines) + "\n")
    raise typer.Exit(1 if damaged else 0)


def _is_sound(file: packed.PackedFile) -> bool:
    if not file.complete:
        return True
    try:
        _core.check_packed_file(os.fsencode(file.path))
    except CorruptFile:
        return False
    return True
