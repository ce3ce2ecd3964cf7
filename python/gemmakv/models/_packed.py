"""Files of packed weights: shared by processes, opened instead of packing."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from gemmakv._support.files import StrPath
from gemmakv._support.folders import cache_folder
from gemmakv.errors import brief

# Loading less takes no time worth a file.
MIN_MODEL_BYTES = 16 << 20

_VARIABLE = "GEMMAKV_PACKED_CACHE"
_RECORD = re.compile(r"[0-9a-f]{32}\.gkvsource")
_NAME = re.compile(r"([0-9a-f]{32})\.v(\d+)-(\d+)\.gkvpack(\.part)?")


@dataclasses.dataclass(frozen=True)
class PackedWeights:
    """Where the weights of a loaded model are.

    `state` is "reused" (in a packed file that was there), "written" (in one
    that this load made), "memory" (in this process's own memory, because the
    file could not be used: `reason` says why) or "off" (in memory, because no
    file was wanted). With "written", `reason` tells what was wrong with the
    file that was replaced. `path` is None for "memory" and "off".
    """

    state: str
    path: str | None = None
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class PackedFile:
    """A file in the folder of packed weights."""

    path: Path
    fingerprint: str
    version: int
    layout_version: int
    nbytes: int
    complete: bool  # False: being written, or left behind by a killed process


def default_folder() -> Path | None:
    """The folder for packed weights; None if the environment turns them off.

    `GEMMAKV_PACKED_CACHE` names another one, or is "off". Raises OSError if
    there is no home folder.
    """
    chosen = os.environ.get(_VARIABLE, "")
    if chosen:
        return None if chosen == "off" else Path(chosen)
    return cache_folder() / "packed"


def choose_folder(
    packed_cache: bool | StrPath, model_bytes: int
) -> tuple[Path | None, PackedWeights]:
    """The folder to use for a model of this size, and what to say if it is
    None.

    Raises ValueError for a `packed_cache` that is no bool and no path.
    """
    if packed_cache is False:
        return None, PackedWeights("off", reason="packed_cache=False")
    if packed_cache is not True:
        return _as_folder(packed_cache), PackedWeights("off")
    if model_bytes < MIN_MODEL_BYTES:
        return None, PackedWeights(
            "off", reason=f"the model has less than {MIN_MODEL_BYTES:,} bytes"
        )
    try:
        folder = default_folder()
    except OSError as error:
        return None, PackedWeights("memory", reason=str(error.strerror))
    return folder, PackedWeights("off", reason=f"{_VARIABLE}=off")


def _as_folder(value: object) -> Path:
    expected = "packed_cache: expected True, False or the path of a folder"
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError(f"{expected}, found {brief(value)}")
    path = os.fspath(value)
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError(f"{expected}, found {brief(path)}")
    return Path(path)


def files(folder: StrPath) -> list[PackedFile]:
    """The packed files in a folder, the largest first; [] if it is missing."""
    found = []
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return []
    for entry in entries:
        match = _NAME.fullmatch(entry.name)
        if match is None or not entry.is_file(follow_symlinks=False):
            continue
        fingerprint, version, layout_version, part = match.groups()
        try:
            nbytes = entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:  # renamed or deleted just now
            continue
        found.append(
            PackedFile(
                path=Path(entry.path),
                fingerprint=fingerprint,
                version=int(version),
                layout_version=int(layout_version),
                nbytes=nbytes,
                complete=part is None,
            )
        )
    return sorted(found, key=lambda file: (-file.nbytes, file.path.name))


def clear(folder: StrPath) -> list[PackedFile]:
    """Deletes the packed files in a folder, and returns them.

    Safe at any time: they are made again as needed.
    """
    found = files(folder)
    for file in found:
        file.path.unlink(missing_ok=True)
    # Links from model files to their packed files.
    if os.path.isdir(folder):
        for name in filter(_RECORD.fullmatch, os.listdir(folder)):
            Path(folder, name).unlink(missing_ok=True)
    return found
