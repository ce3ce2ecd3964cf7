"""Files of packed weights: shared by processes, opened instead of packing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import time
from pathlib import Path
from typing import Any

from gemmakv._support.arguments import path_text
from gemmakv._support.files import StrPath, write_atomically
from gemmakv._support.folders import cache_folder
from gemmakv._support.sizes import in_bytes

# Loading less takes no time worth a file.
MIN_MODEL_BYTES = 16 << 20

_VARIABLE = "GEMMAKV_PACKED_CACHE"
# How long unused files stay, and how many GB all of them may take.
_DAYS = ("GEMMAKV_PACKED_DAYS", 30)
_LIMIT_GB = ("GEMMAKV_PACKED_GB", 50)
_RECORD = re.compile(r"[0-9a-f]{32}\.gkvsource")
# Where huggingface_hub keeps a repository's files.
_HUB = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/[^/]+(?:/(.+))?$")
_NAME = re.compile(r"([0-9a-f]{32})\.v\d+-\d+\.gkvpack(\.part)?")


@dataclasses.dataclass(frozen=True)
class PackedWeights:
    """Where the weights of a loaded model are.

    Attributes:
      state: "reused" (in a packed file that was there), "written" (in one that
        this load made), "memory" (in this process's own memory, because the
        file could not be used) or "off" (in memory, because no file was asked
        for).
      path: of the file; None for "memory" and "off".
      reason: why the file could not be used; with "written", what was wrong
        with the file that was replaced.
      nbytes: size of the file.
    """

    state: str
    path: str | None = None
    reason: str | None = None
    nbytes: int = 0


@dataclasses.dataclass(frozen=True)
class PackedFile:
    """A file in the folder of packed weights."""

    path: Path
    fingerprint: str
    nbytes: int
    complete: bool  # False: being written, or left behind by a killed process
    used: float  # when it was opened last, as time.time() has it
    sources: tuple[str, ...] = ()  # model files and folders; () if unknown
    quantize: str | None = None

    @property
    def name(self) -> str:
        """What the model is called; "?" if nobody noted it."""
        if not self.sources:
            return "?"
        match = _HUB.search(self.sources[0])
        return "/".join(filter(None, match.groups())) if match else (
            Path(self.sources[0]).name
        )

    @property
    def orphaned(self) -> bool:
        """Whether every model that it was made of has been deleted."""
        return bool(self.sources) and not any(map(os.path.exists, self.sources))


def default_folder() -> Path | None:
    """The folder for packed weights; None if the environment turns them off.

    `GEMMAKV_PACKED_CACHE` names another one, or is "off". Raises OSError if
    there is no home folder.
    """
    chosen = os.environ.get(_VARIABLE, "")
    if chosen:
        return None if chosen == "off" else Path(chosen).expanduser()
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
    expected = "True, False or the path of a folder"
    path = path_text("packed_cache", value, expected)
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"packed_cache: expected {expected}, found {path}: no such user"
        ) from None


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
        fingerprint, part = match.groups()
        try:
            stat = entry.stat(follow_symlinks=False)
        except FileNotFoundError:  # renamed or deleted just now
            continue
        found.append(
            PackedFile(
                path=Path(entry.path),
                fingerprint=fingerprint,
                nbytes=stat.st_size,
                complete=part is None,
                **_read_note(Path(entry.path), stat.st_mtime),
            )
        )
    return sorted(found, key=lambda file: (-file.nbytes, file.path.name))


def remove(file: PackedFile) -> None:
    """Deletes a packed file and what refers to it.

    Safe at any time: it is made again as needed.
    """
    file.path.unlink(missing_ok=True)
    _note_of(file.path).unlink(missing_ok=True)
    for name in filter(_RECORD.fullmatch, os.listdir(file.path.parent)):
        link = file.path.parent / name
        with contextlib.suppress(OSError):
            if Path(os.readlink(link)).name == file.path.name:
                link.unlink()


def expire(folder: StrPath, keep: str | None = None) -> list[PackedFile]:
    """Deletes files that nobody needs, and returns them.

    These are files whose models are gone, files unused for
    GEMMAKV_PACKED_DAYS, and beyond GEMMAKV_PACKED_GB those that were not used
    for the longest time. A variable that is no number of at least 0 is no
    limit. `keep` is the path of one that stays.
    """
    oldest = time.time() - 86400 * _number(*_DAYS)
    room = 1e9 * _number(*_LIMIT_GB)
    gone = []
    for file in sorted(files(folder), key=lambda file: -file.used):
        room -= file.nbytes
        if str(file.path) == keep or not file.complete:
            continue
        if file.orphaned or file.used < oldest or room < 0:
            remove(file)
            room += file.nbytes
            gone.append(file)
    return gone


def note_use(report: PackedWeights, source: str, quantize: str) -> None:
    """Notes beside a packed file that it was used for the model `source`.

    It is for people and for `expire`: what cannot be noted does no harm.
    """
    if report.path is None:
        return
    if report.state == "written":
        logging.getLogger("gemmakv").info(
            "%s: packed weights (%s) are kept in %s",
            source,
            in_bytes(report.nbytes),
            report.path,
        )
    path = Path(report.path)
    note = _note_of(path)
    with contextlib.suppress(OSError):
        known = _read_note(path, 0)["sources"]
        source = os.path.abspath(source)
        if source not in known:
            found = [one for one in known if os.path.exists(one)]
            document = {
                "sources": [source, *found],
                "quantize": quantize or None,
            }
            write_atomically(note, json.dumps(document).encode())
        os.utime(note)


def _note_of(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _read_note(path: Path, otherwise: float) -> dict[str, Any]:
    """What `note_use` noted; `used` is `otherwise` if it did not."""
    note = _note_of(path)
    try:
        used = note.stat().st_mtime
        document = json.loads(note.read_bytes())
        sources, quantize = document["sources"], document["quantize"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {"used": otherwise, "sources": (), "quantize": None}
    if not isinstance(sources, list) or not isinstance(quantize, str | None):
        sources, quantize = [], None
    texts = tuple(one for one in sources if isinstance(one, str))
    return {"used": used, "sources": texts, "quantize": quantize}


def _number(variable: str, default: float) -> float:
    try:
        number = float(os.environ.get(variable) or default)
    except ValueError:
        return math.inf
    return number if number >= 0 else math.inf
