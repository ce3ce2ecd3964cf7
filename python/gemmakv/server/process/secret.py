"""The secret by which tenants find their parts of the prefix cache."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat

_BYTES = 32
_HEAD = b"gemmakv server secret 1\n"


def read_or_make(path: str) -> bytes:
    """Reads the secret of a file, 32 bytes; makes the file if there is none.

    Raises ValueError for a file that no server made, or that others may read;
    OSError.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        _make(path)
        descriptor = os.open(path, flags)
    try:
        _check(path, os.fstat(descriptor))
        data = os.read(descriptor, len(_HEAD) + 2 * _BYTES + 2)
    finally:
        os.close(descriptor)
    return _parse(path, data)


def _make(path: str) -> None:
    """Makes the file, whole or not at all; another process may be quicker."""
    part = f"{path}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(part, flags, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(_HEAD + secrets.token_hex(_BYTES).encode() + b"\n")
            file.flush()
            os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
    finally:
        os.unlink(part)


def _check(path: str, info: os.stat_result) -> None:
    found = ""
    if not stat.S_ISREG(info.st_mode):
        found = "what is no regular file"
    elif info.st_uid != os.geteuid():
        found = f"one of user {info.st_uid}"
    elif info.st_mode & 0o077:
        found = f"one of mode {stat.S_IMODE(info.st_mode):04o}"
    if found:
        raise ValueError(
            f"prefix_cache_secret_file: {path}: expected a file of user "
            f"{os.geteuid()} that nobody else may read (mode 0600), found "
            + found
        )


def _parse(path: str, data: bytes) -> bytes:
    digits = data.removeprefix(_HEAD).removesuffix(b"\n")
    try:
        secret = bytes.fromhex(digits.decode("ascii"))
    except ValueError:
        secret = b""
    if not data.startswith(_HEAD) or len(secret) != _BYTES:
        # What it is stands in no message.
        raise ValueError(
            f"prefix_cache_secret_file: {path}: expected a secret that a "
            "server made, found something else; the server makes one where "
            "there is no file"
        )
    return secret
