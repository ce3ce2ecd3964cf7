"""Folders of the prefix cache: where they are, how they are written down."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from gemmakv._support.sizes import parse_bytes
from gemmakv.errors import brief

__all__ = ["default_shared_folder", "parse_folder"]

_SHARED_MEMORY = "/dev/shm"


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


def parse_folder(name: str, value: object) -> tuple[str, int | None]:
    """Of "DIR" or "DIR:BYTES": the folder, ~ and ~user expanded, and bytes of
    at least 1, or None. A folder whose own last part has a colon is written
    with a slash behind it.

    Raises ValueError that begins with `name`.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or "\0" in text:
        raise ValueError(f"{name}: expected DIR or DIR:BYTES, found "
                         + brief(value))  # fmt: skip
    folder, colon, size = text.rpartition(":")
    if not colon or "/" in size:
        folder, colon, size = text, "", ""
    if not folder:
        raise ValueError(f"{name}: expected DIR or DIR:BYTES, found "
                         + brief(value))  # fmt: skip
    budget = parse_bytes(name, size) if colon else None
    if budget == 0:
        raise ValueError(f"{name}: expected at least 1 byte, found 0")
    return os.path.expanduser(folder), budget
