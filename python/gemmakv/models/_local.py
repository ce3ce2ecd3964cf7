"""The models that are on this machine without the user having put them there:
assembled from packages, or downloaded from the hub.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from gemmakv import _core
from gemmakv._support.documents import read_object
from gemmakv._support.folders import cache_folder
from gemmakv.errors import GemmaKVError
from gemmakv.models import _packed as packed
from gemmakv.models._aliases import ALIASES
from gemmakv.models._split import parts_of
from gemmakv.models.hub._download import (
    files_of,
    folder_here,
    models_among,
)


@dataclasses.dataclass(frozen=True)
class LocalModel:
    """A model, and the files that it consists of."""

    name: str  # as `Gemma.load` takes it
    path: str
    files: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


def local_models() -> list[LocalModel]:
    """All of them, by name. Other programs' models than Gemma are left out."""
    found = [*_assembled(), *_downloaded()]
    return sorted(found, key=lambda model: model.name)


def remove(model: LocalModel) -> None:
    """Deletes a model's files, and packed files that are of it alone."""
    for file in model.files:
        target = file.resolve()
        file.unlink(missing_ok=True)
        if _is_blob_of(target, file) and not _linked(target):
            target.unlink(missing_ok=True)
        for end in (".checked", ".lock"):
            file.with_name(file.name + end).unlink(missing_ok=True)
        _remove_empty(file.parent)
    with contextlib.suppress(OSError):
        folder = packed.default_folder()
        for one in packed.files(folder) if folder is not None else ():
            if one.orphaned and model.path in one.sources:
                packed.remove(one)


def packaged_models() -> list[str]:
    """Aliases whose weights an installed package has."""
    find = importlib.util.find_spec
    return [name for name, one in ALIASES.items() if find(one.package)]


def _assembled() -> Iterator[LocalModel]:
    for name, alias in ALIASES.items():
        path = cache_folder() / alias.file_name
        if path.is_file():
            yield LocalModel(name, str(path), (path,))


def _downloaded() -> Iterator[LocalModel]:
    """What is whole in the folders of huggingface_hub, of each commit."""
    try:
        constants = importlib.import_module("huggingface_hub.constants")
    except ImportError:
        return
    root = Path(constants.HF_HUB_CACHE)
    for snapshot in sorted(root.glob("models--*--*/snapshots/*")):
        # What is broken, or of another program, hides no other model.
        with contextlib.suppress(GemmaKVError, OSError, ValueError):
            yield from list(_models_in(snapshot))


def _models_in(snapshot: Path) -> Iterator[LocalModel]:
    repository = snapshot.parents[1]
    repo = repository.name.removeprefix("models--").replace("--", "/", 1)
    main = repository / "refs" / "main"
    current = main.read_bytes().strip() if main.is_file() else b""
    if current != os.fsencode(snapshot.name):
        repo += f"@{snapshot.name}"
    files = files_of(snapshot)
    for file in models_among(files):
        parts = tuple(snapshot / part for part in parts_of(file))
        if all(map(os.path.isfile, parts)) and _is_gemma(parts[0]):
            yield LocalModel(f"{repo}/{file}", str(parts[0]), parts)
    if folder_here(snapshot) and _is_gemma(snapshot):
        paths = tuple(
            snapshot / file
            for file in files
            if not file.lower().endswith(".gguf")
        )
        yield LocalModel(repo, str(snapshot), paths)


def _is_gemma(path: Path) -> bool:
    try:
        if path.is_dir():
            kind = read_object(path / "config.json").get("model_type")
        else:
            gguf = _core.GgufFile(os.fsencode(path))
            kind = gguf.get("general.architecture")
    except (GemmaKVError, OSError, KeyError):
        return False
    return isinstance(kind, str) and "gemma" in kind


def _is_blob_of(target: Path, file: Path) -> bool:
    """Whether it is where the hub's folder keeps a file's content. A link to
    anything else is somebody's own.
    """
    snapshots = target.parent.parent / "snapshots"
    return (
        target.parent.name == "blobs"
        and snapshots in file.parent.resolve().parents
    )


def _linked(blob: Path) -> bool:
    """Whether another commit's file is this one, too."""
    snapshots = blob.parent.parent / "snapshots"
    return any(
        path.is_symlink() and path.resolve() == blob
        for path in snapshots.glob("**/*")
    )


def _remove_empty(folder: Path) -> None:
    """Up to the folder of all snapshots."""
    while folder.name != "snapshots" and "snapshots" in folder.parts:
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent
