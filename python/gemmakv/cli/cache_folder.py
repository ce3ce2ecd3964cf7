"""`gemmakv cache stats | sweep | clear`: folders of the prefix cache."""

from __future__ import annotations

import datetime
import json
import os
from typing import Any

import typer

from gemmakv import _core
from gemmakv._support.sizes import in_bytes
from gemmakv.cache._folders import parse_folder
from gemmakv.cli import console
from gemmakv.cli.arguments import examples
from gemmakv.cli.failures import InputError

STATS_EXAMPLES = examples(
    "gemmakv cache stats ~/.cache/prefixes",
    "gemmakv cache stats --json /dev/shm/gemmakv-1000 | jq .bytes",
)
SWEEP_EXAMPLES = examples(
    "gemmakv cache sweep ~/.cache/prefixes:20GiB",
    "gemmakv cache sweep --json ~/.cache/prefixes | jq .removed_bytes",
)
CLEAR_EXAMPLES = examples(
    "gemmakv cache clear ~/.cache/prefixes",
    "gemmakv cache clear --yes /dev/shm/gemmakv-1000",
)
_DIR = typer.Argument(
    ...,
    metavar="DIR[:BYTES]",
    help="A folder of the prefix cache and its limit, as in ~/kv:20GiB.",
)
_JSON = typer.Option(False, "--json", help="Print JSON.")
_NO_BUDGET = 1 << 62


def stats(folder: str = _DIR, as_json: bool = _JSON) -> None:
    """Show what a folder of the prefix cache holds."""
    path, budget = parse_folder("folder", folder)
    found = _core.FolderStore.describe(os.fsencode(path))
    document = {"folder": path, "budget": budget, **found}
    if as_json:
        console.write(json.dumps(document) + "\n")
        return
    groups = document.pop("groups")
    if budget is None:
        # The folder itself has none: who opens it says what it may take.
        document["budget"] = "that of the program that uses it"
    for name in ("oldest", "newest"):
        document[name] = _time(document[name])
    table = console.table("salt", "kind", "entries", "bytes", left=2)
    for group in groups:
        none = group["salt"].strip("0") == ""
        table.add_row(
            "none" if none else group["salt"],
            group["kind"],
            f"{group['entries']:,}",
            f"{group['bytes']:,}",
        )
    parts = [console.facts(document), *([table] if groups else [])]
    console.write(console.render(*parts))


def sweep(folder: str = _DIR, as_json: bool = _JSON) -> None:
    """Remove what a folder does not need, or the least recently used.

    Without BYTES, removes what killed processes left and objects that can no
    longer be reached. With BYTES, also removes the least recently used objects
    while the folder takes more than 90 % of BYTES.
    """
    path, budget = parse_folder("folder", folder)
    result = _open(path, budget).sweep()
    if not result.pop("swept"):
        raise InputError(f"{path}: another process sweeps it at this moment")
    if as_json:
        console.write(json.dumps({"folder": path, **result}) + "\n")
        return
    console.write(console.render(console.facts(result)))


def clear(
    folder: str = typer.Argument(
        ..., metavar="DIR", help="A folder of the prefix cache."
    ),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask."),
    as_json: bool = _JSON,
) -> None:
    """Delete all that a folder of the prefix cache holds."""
    path, _ = parse_folder("folder", folder)
    found = _core.FolderStore.describe(os.fsencode(path))
    amount = f"{found['entries']:,} entries ({in_bytes(found['bytes'])})"
    if not yes:
        console.ask_to_delete("clear", f"{path}: {amount}")
    store = _open(path, None)
    store.clear()
    left = store.stats()["entries"]
    if left:
        raise InputError(f"{path}: {left:,} entries could not be deleted")
    if as_json:
        removed = {name: found[name] for name in ("entries", "bytes")}
        console.write(json.dumps({"folder": path, "removed": removed}) + "\n")
        return
    console.write(f"deleted {amount}\n")


def _open(path: str, budget: int | None) -> _core.FolderStore:
    """A folder that is there: none is made."""
    name = os.fsencode(path)
    _core.FolderStore.describe(name)
    return _core.FolderStore(
        name, tier="disk", mapped=False, budget_bytes=budget or _NO_BUDGET
    )


def _time(seconds: Any) -> str | None:
    if seconds is None:
        return None
    moment = datetime.datetime.fromtimestamp(seconds)
    return moment.isoformat(" ", "seconds")
