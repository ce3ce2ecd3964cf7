"""Files that are either old or new, never half written."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, Union

StrPath = Union[str, "os.PathLike[str]"]
PathOrFile = Union[str, "os.PathLike[str]", BinaryIO]


def write_all(path_or_file: PathOrFile, data: bytes) -> None:
    """Writes to a binary file object, or replaces a path in one step."""
    with piecewise_writer(path_or_file) as write:
        write(data)


@contextmanager
def piecewise_writer(
    path_or_file: PathOrFile,
) -> Iterator[Callable[[bytes], None]]:
    """What writes one piece after the other, all of it, to a binary file
    object, or to a path, which is replaced when the body ends well.
    """
    if isinstance(path_or_file, (str, os.PathLike)):
        with atomic_writer(path_or_file) as file:
            yield functools.partial(_write_whole, file)
    else:
        yield functools.partial(_write_whole, path_or_file)


def _write_whole(file: BinaryIO, data: bytes) -> None:
    """Also where an unbuffered file takes a part at a time."""
    left = memoryview(data)
    written = file.write(data)
    while isinstance(written, int) and written < len(left):
        if written <= 0:
            raise OSError(
                errno.EIO, f"the file took 0 of {len(left)} bytes to write"
            )
        left = left[written:]
        written = file.write(left)


def read_all(path_or_file: PathOrFile) -> bytes:
    """The content of a path or the rest of a binary file object."""
    if isinstance(path_or_file, (str, os.PathLike)):
        with open(path_or_file, "rb") as file:
            return file.read()
    return path_or_file.read()


def write_atomically(path: StrPath, data: bytes) -> None:
    """Replaces `path` with `data` in one step."""
    with atomic_writer(path) as file:
        file.write(data)


@contextmanager
def atomic_writer(path: StrPath) -> Iterator[BinaryIO]:
    """A file that becomes `path` when the body ends, and vanishes if it fails.

    The content is written beside `path`, forced to disk and renamed; the
    folder is forced to disk last. A link is followed. What is there and no
    regular file (a device, a pipe) is written to as it is.
    """
    target = os.path.realpath(os.fspath(path))
    folder = os.path.dirname(target)
    if os.path.isdir(target):
        raise IsADirectoryError(
            errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path)
        )
    if os.path.exists(target) and not os.path.isfile(target):
        with open(target, "wb") as file:
            yield file
        return
    descriptor, beside = tempfile.mkstemp(
        prefix=f".{os.path.basename(target)[:100]}.", suffix=".tmp", dir=folder
    )
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), _mode_of(target))
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    _sync_folder(folder)


def _mode_of(target: str) -> int:
    """Permissions of the file that is replaced, or of a new file."""
    try:
        return os.stat(target).st_mode & 0o7777
    except OSError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some file systems cannot; the file itself is on disk
    finally:
        os.close(descriptor)
