"""`gemmakv packed`: the files of packed weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Optional

import typer

from gemmakv import packed
from gemmakv.cli import console
from gemmakv.cli.arguments import examples

EXAMPLES = examples(
    "gemmakv packed",
    "gemmakv packed --clear",
    "gemmakv packed --json | jq '.files | length'",
)


def packed_files(
    folder: Optional[Path] = typer.Option(
        None, metavar="PATH", help="Default: the user's cache folder."
    ),
    clear: bool = typer.Option(
        False,
        "--clear",
        help="Delete them. Safe at any time: they are made again as needed.",
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
    files = packed.files(folder)
    if clear:
        for file in files:
            file.path.unlink(missing_ok=True)
    if as_json:
        document = {
            "folder": str(folder),
            "deleted": clear,
            "files": [vars(file) | {"path": str(file.path)} for file in files],
        }
        console.write(json.dumps(document) + "\n")
        return
    lines = [f"{file.nbytes:>15,}  {file.path}" for file in files]
    total = sum(file.nbytes for file in files)
    did = "deleted from" if clear else "in"
    lines.append(f"{total:>15,}  bytes, {len(files)} files {did} {folder}")
    console.write("\n".join(lines) + "\n")
