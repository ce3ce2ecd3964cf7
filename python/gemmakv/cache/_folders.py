"""Folders of the prefix cache: where they are, how they are written down."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from gemmakv._support.arguments import path_text
from gemmakv._support.folders import cache_folder, in_cache_folder
from gemmakv._support.sizes import parse_bytes
from gemmakv.errors import unexpected

_SHARED_MEMORY = "/dev/shm"
_MOST_DISK = 50 << 30
_FREE_SHARE = 10
_LEAST_DISK = 64 << 20  # some objects


def default_shared_folder() -> str:
    """The folder of this user on a memory file system: in XDG_RUNTIME_DIR,
    else in /dev/shm. Whoever opens it makes it, with mode 0700.

    Raises FileNotFoundError where there is neither.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and os.path.isdir(runtime):
        return str(Path(runtime, "gemmakv"))
    if os.path.isdir(_SHARED_MEMORY):
        return str(Path(_SHARED_MEMORY, f"gemmakv-{os.geteuid()}"))
    raise FileNotFoundError(
        errno.ENOENT,
        "no memory file system; set XDG_RUNTIME_DIR",
        _SHARED_MEMORY,
    )


def default_disk_folder() -> tuple[Path, int]:
    """The folder of this user on disk, which is there or is made (mode 0700),
    and what it may take: 10 % of what is free on its file system now, at most
    50 GiB.

    Raises OSError where it cannot be made or written, or that is too little.
    """
    folder = cache_folder() / "prefix"
    with in_cache_folder():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))
    found = os.statvfs(folder)
    budget = min(_MOST_DISK, found.f_bavail * found.f_frsize // _FREE_SHARE)
    if budget < _LEAST_DISK:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    return folder, budget


def parse_folder(name: str, value: object) -> tuple[str, int | None]:
    """Reads "DIR" or "DIR:BYTES": the folder, ~ and ~user expanded, and bytes
    of at least 1, or None. A folder whose own last part has a colon is written
    with a slash after it.

    Raises ValueError that begins with `name`.
    """
    expected = "DIR or DIR:BYTES"
    text = path_text(name, value, expected)
    folder, colon, size = text.rpartition(":")
    if not colon or "/" in size:
        folder, colon, size = text, "", ""
    if not folder:
        raise unexpected(name, expected, value)
    budget = parse_bytes(name, size) if colon else None
    if budget == 0:
        raise unexpected(name, "at least 1 byte", budget)
    return os.path.expanduser(folder), budget
