"""What may go wrong between a name of the hub and a file, in one line each."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from gemmakv._support.sizes import in_bytes
from gemmakv.errors import one_line

_NOT_FOUND = ("RemoteEntryNotFoundError", "EntryNotFoundError")


class Unreachable(Exception):
    """The hub does not answer, or not now; a copy on disk will do instead."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def as_os_error(self) -> OSError:
        return OSError(
            errno.EHOSTUNREACH,
            f"no such file here, and {self.reason}; check the network and "
            "HF_ENDPOINT, then try again",
            self.name,
        )


class FileMissing(Exception):
    """The repository is there and the file is not."""


@contextmanager
def clear_errors(name: str, endpoint: str) -> Iterator[None]:
    """Turns the errors of huggingface_hub into those of this package.

    Raises Unreachable, FileMissing, ValueError or OSError.
    """
    try:
        yield
    except Exception as error:
        raise _translate(name, endpoint, error) from None


def broken_off(
    name: str, error: Exception, done: int, size: int | None
) -> OSError:
    """The error for a transfer that ended early; what came is kept."""
    of = "" if size is None else f" of {in_bytes(size)}"
    return ConnectionAbortedError(
        errno.ECONNABORTED,
        f"the download broke off after {in_bytes(done)}{of} "
        f"({_summary(error)}); the same command again continues from there",
        name,
    )


def write_failed(
    name: str, error: OSError, done: int, size: int | None
) -> OSError:
    """The error for what the disk did not take; what it took is kept."""
    if error.errno == errno.ENOSPC:
        return disk_full(name, "the disk is full", done, size)
    if error.errno == errno.EDQUOT:
        return disk_full(name, "the disk quota is used up", done, size)
    return OSError(
        error.errno or errno.EIO,
        f"the download cannot be written after {in_bytes(done)}: "
        f"{error.strerror or _summary(error)}",
        name,
    )


def disk_full(
    name: str, reason: str, done: int, size: int | None
) -> OSError:
    needed = "" if size is None else f": {in_bytes(size - done)} more needed"
    return OSError(
        errno.ENOSPC,
        f"{reason}{needed}; make room, or set HF_HOME to a folder on another "
        "disk",
        name,
    )


def not_found(name: str, message: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, message, name)


def _translate(name: str, endpoint: str, error: Exception) -> Exception:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(getattr(error, "response", None), "status_code", None)
    if kinds & {"GatedRepoError"}:
        return _gated(name, endpoint)
    if "RevisionNotFoundError" in kinds:
        return not_found(
            name,
            "the repository has no such branch, tag or commit "
            "(the part after @)",
        )
    if kinds & set(_NOT_FOUND):
        return FileMissing(str(error))
    if "RepositoryNotFoundError" in kinds:
        return not_found(
            name,
            f"no such file here, and no such repository at {endpoint}; if it "
            + _if_private(),
        )
    if status in (401, 403):
        what = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "the token"
        return PermissionError(
            errno.EACCES,
            f"{endpoint} refuses access (HTTP {status}); check {what} and "
            "what it may read",
            name,
        )
    if "HFValidationError" in kinds:
        return ValueError(
            f"{name}: no such file, and not the name of a repository "
            f"({_summary(error)})"
        )
    # The disk or the network; the latter are errors of sockets.
    network = isinstance(error, (ConnectionError, TimeoutError))
    if isinstance(error, OSError) and error.errno is not None and not network:
        return error
    if status is not None:
        return Unreachable(name, f"{endpoint} answers HTTP {status}")
    return Unreachable(
        name, f"{endpoint} cannot be reached ({_summary(error)})"
    )


def _gated(name: str, endpoint: str) -> PermissionError:
    repo = "/".join(name.split("@")[0].split("/")[:2])
    then = (
        "with the account of HF_TOKEN"
        if os.environ.get("HF_TOKEN")
        else "then set HF_TOKEN to a token of that account"
    )
    return PermissionError(
        errno.EACCES,
        f"gated: accept its terms at {endpoint}/{repo} {then}",
        name,
    )


def _if_private() -> str:
    if os.environ.get("HF_TOKEN"):
        return "is private, HF_TOKEN must be of an account that may read it"
    return "is private, set HF_TOKEN to a token that may read it"


def _summary(error: Exception) -> str:
    """One line of an error, not too long."""
    text = one_line(error)
    return text if len(text) <= 120 else text[:117] + "..."
