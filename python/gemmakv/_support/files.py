"""Files that are either old or new, never half written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from gemmakv.errors import unexpected

StrPath = str | os.PathLike[str]
PathOrFile = StrPath | BinaryIO

_PIECE_BYTES = 1 << 20
# A file that is being written, or that a killed process left.
_BESIDE = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp", re.DOTALL)


@contextmanager
def piecewise_writer(
    path_or_file: PathOrFile,
) -> Iterator[Callable[[bytes], None]]:
    """Gives a function that writes a piece, all of it, to a binary file object,
    or to a path, which is replaced when the body ends well.
    """
    if isinstance(path_or_file, (str, os.PathLike)):
        with atomic_writer(path_or_file) as file:
            yield functools.partial(_write_whole, file)
    else:
        _check_binary(path_or_file, "write")
        yield functools.partial(_write_whole, path_or_file)


def _write_whole(file: BinaryIO, data: bytes) -> None:
    """Also where an unbuffered file takes a part at a time."""
    left = memoryview(data)
    while left:
        written = file.write(left)
        if written is None and isinstance(file, io.RawIOBase):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if not isinstance(written, int):
            return  # a file of the user's own that takes all
        if written <= 0:
            raise OSError(
                errno.EIO, f"the file took 0 of {len(left)} bytes to write"
            )
        left = left[written:]


def read_all(
    path_or_file: PathOrFile,
    head_bytes: int = 0,
    size_of: Callable[[bytes], int] | None = None,
) -> bytes:
    """Reads a path, or the rest of a binary file object.

    `size_of` gets the first `head_bytes`, or the fewer that there are, and
    says how many bytes the whole has; no more than that and one are read. It
    raises for what is no such file, which then is not read: it may be endless.
    """
    if isinstance(path_or_file, (str, os.PathLike)):
        with open(path_or_file, "rb") as file:
            return read_all(file, head_bytes, size_of)
    _check_binary(path_or_file, "read")
    data = io.BytesIO()  # grows in place: no second copy
    if size_of is None:
        _read(path_or_file, data, sys.maxsize)
    else:
        _read(path_or_file, data, head_bytes)
        size = size_of(data.getvalue())
        _read(path_or_file, data, size + 1 - data.tell())
    return data.getvalue()


def _read(file: BinaryIO, data: io.BytesIO, size: int) -> None:
    """Adds up to `size` bytes, also where a file gives a part at a time."""
    while size > 0:
        wanted = min(size, _PIECE_BYTES)
        part = file.read(wanted)
        if part is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if not isinstance(part, (bytes, bytearray, memoryview)):
            raise unexpected("path_or_file", "a binary file", file)
        if not part:
            return
        if len(part) > wanted:
            raise ValueError(
                f"path_or_file: expected at most {wanted} bytes of read"
                f"({wanted}), found {len(part)}"
            )
        size -= data.write(part)


def _check_binary(file: object, method: str) -> None:
    """Raises ValueError for what is neither a path nor a binary file."""
    if isinstance(file, io.TextIOBase) or not hasattr(file, method):
        raise unexpected("path_or_file", "a path or a binary file object", file)


def write_atomically(path: StrPath, data: bytes, private: bool = False) -> None:
    """Replaces `path` with `data` in one step."""
    with atomic_writer(path, private) as file:
        file.write(data)


@contextmanager
def atomic_writer(path: StrPath, private: bool = False) -> Iterator[BinaryIO]:
    """A file that becomes `path` when the body ends, and vanishes if it fails.

    The content is written beside `path`, forced to disk and renamed; the
    folder is forced to disk last. A link is followed. What is there and no
    regular file (a device, a pipe) is written to as it is. With `private`,
    nobody but the user may read it, whatever was there; else it has the
    permissions of that, or those of a new file. What killed processes left in
    the folder is removed first.
    """
    name = os.fspath(path)
    target = os.path.realpath(name)
    folder = os.path.dirname(target)
    if os.path.isdir(target):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if os.path.exists(target) and not os.path.isfile(target):
        try:
            with open(target, "wb") as file:
                yield file
        except OSError as error:
            _name_file(error, target, name)
            raise
        return
    _sweep(folder)
    beside = os.path.join(
        folder,
        f".{os.path.basename(target)[:80]}.{os.getpid()}-"
        f"{secrets.token_hex(4)}.tmp",
    )
    try:
        # Renamed while it is open, and so locked: nobody sweeps it.
        with _create(beside, None if private else target) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(beside, target)
        _sync_folder(folder)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        if isinstance(error, OSError):
            _name_file(error, beside, name)
        raise


def _sweep(folder: str) -> None:
    """Removes this user's files that were to be renamed and that nobody writes
    any more: whoever writes one holds its lock.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _BESIDE.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_unlocked(entry.path)


def _remove_unlocked(path: str) -> None:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                os.unlink(path)
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: str) -> bool:
    """Tells whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _create(path: str, like: str | None) -> BinaryIO:
    """Makes a file, locked while it is open, with the permissions of `like`, or
    those of a new file if there is none; the user's alone without `like`.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    mode = None if like is not None else 0o600
    if like is not None:
        with contextlib.suppress(OSError):
            mode = os.stat(like).st_mode & 0o7777
    while True:
        descriptor = os.open(path, flags, 0o666 if mode is None else 0o600)
        try:
            # Where files cannot be locked, none is swept either.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):
                if mode is not None:
                    os.fchmod(descriptor, mode)
                return os.fdopen(descriptor, "wb")
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # it was swept before it was locked


def _name_file(error: OSError, beside: str, name: str) -> None:
    """Makes an error that of the file that was to be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    written = full or error.errno in (errno.EFBIG, errno.EIO)
    if error.filename == beside or (written and error.filename is None):
        error.filename = name
        del error.filename2  # None would be printed
        if full:
            hint = "make room or choose another place"
            error.strerror = f"{error.strerror}; {hint}"


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some file systems cannot; the file itself is on disk
    finally:
        os.close(descriptor)
