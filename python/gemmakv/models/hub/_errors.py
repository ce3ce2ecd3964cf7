"""What may go wrong between a name of the hub and a file, in one line each."""

from __future__ import annotations

import errno
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gemmakv.errors import brief, one_line


class NoAnswer(Exception):
    """The hub gives no answer, or one that no hub gives; a copy on disk will
    do instead.
    """

    def __init__(self, name: str, reason: str, *, wrong: bool = False) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason
        self.wrong = wrong  # there is an answer

    def as_os_error(self) -> OSError:
        if self.wrong:
            return wrong_answer(self.name, self.reason)
        return OSError(
            errno.EHOSTUNREACH,
            f"no such file here, and {self.reason}; check the network and "
            "HF_ENDPOINT, then try again",
            self.name,
        )


class FileMissing(Exception):
    """The repository is there and the file is not."""


def network_errors(errors: Any) -> tuple[type[Exception], ...]:
    """Gives the classes of what the HTTP client of huggingface_hub raises. Its
    versions have different clients, but each derives its own errors from the
    client's. `errors` is `huggingface_hub.errors`.
    """
    kinds: tuple[type[Exception], ...] = errors.HfHubHTTPError.__mro__
    base = next(k for k in reversed(kinds) if k.__module__ != "builtins")
    return base, importlib.import_module(base.__module__).InvalidURL


@contextmanager
def clear_errors(name: str, endpoint: str) -> Iterator[None]:
    """Turns the errors of huggingface_hub into those of this package: NoAnswer,
    FileMissing, ValueError or OSError. Other errors pass through.
    """
    errors: Any = importlib.import_module("huggingface_hub.errors")
    try:
        yield
    except (
        errors.LocalEntryNotFoundError,
        ConnectionError,
        TimeoutError,
    ) as error:
        raise _unreachable(name, endpoint, error) from None
    except errors.GatedRepoError:
        repo = "/".join(name.split("@")[0].split("/")[:2])
        raise PermissionError(
            errno.EACCES,
            f"gated: accept its terms at {endpoint}/{repo} with the account "
            "of the token in HF_TOKEN",
            name,
        ) from None
    except errors.RevisionNotFoundError:
        raise not_found(
            name,
            "the repository has no such branch, tag or commit "
            "(the part after @)",
        ) from None
    except errors.EntryNotFoundError as error:
        raise FileMissing(one_line(error)) from None
    except errors.RepositoryNotFoundError:
        raise not_found(
            name,
            f"no such file here, and no such repository at {endpoint}; if it "
            "is private, set HF_TOKEN to a token that may read it",
        ) from None
    except errors.HFValidationError as error:
        raise ValueError(
            f"{name}: no such file, and not the name of a repository "
            f"({summary(error)})"
        ) from None
    except network_errors(errors) as error:
        raise _refused(name, endpoint, error) from None


def status_of(error: Exception) -> int | None:
    """Gives the HTTP status of the reply that an error is about."""
    reply = getattr(error, "response", None)
    status = getattr(reply, "status_code", None)
    return status if isinstance(status, int) else None


def may_pass(status: int | None) -> bool:
    """Tells whether another try may succeed after such a reply, or none."""
    return status is None or status in (408, 429) or status >= 500


def describe_answer(data: bytes) -> str | None:
    """Describes what servers say in place of something else. `data` is how a
    reply begins; None: it may well be what was asked for.
    """
    start = data.lstrip()[:64].lower()
    if start.startswith((b"<!doctype", b"<html")):
        return "a web page"
    if start.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS and not the file that it stands for"
    if not start.startswith((b"{", b"[")):
        return None
    try:
        # A whole document: one that goes on after these bytes is no message.
        text = data.decode()
        json.loads(text)
    except (ValueError, RecursionError):
        return None
    return f"the JSON {brief(' '.join(text.split()))}"


def wrong_answer(name: str, reason: str) -> OSError:
    """Makes the error for what no hub says."""
    return OSError(errno.EPROTO, f"{reason}; check HF_ENDPOINT", name)


def disk_full(name: str, reason: str, number: int = errno.ENOSPC) -> OSError:
    """Makes the error for what the disk does not take; what it took is kept."""
    return OSError(
        number,
        f"{reason}; make room, or set HF_HOME to a folder on another disk",
        name,
    )


def not_found(name: str, message: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, message, name)


def _unreachable(name: str, endpoint: str, error: Exception) -> NoAnswer:
    return NoAnswer(name, f"{endpoint} cannot be reached ({summary(error)})")


def _refused(name: str, endpoint: str, error: Exception) -> Exception:
    """Makes the error for a reply that is none of the hub's own errors, or
    for no reply.
    """
    status = status_of(error)
    if status is None:
        return _unreachable(name, endpoint, error)
    if status in (401, 403):
        return PermissionError(
            errno.EACCES,
            f"{endpoint} refuses access (HTTP {status}); check HF_TOKEN and "
            "what it may read",
            name,
        )
    reason = f"{endpoint} answers HTTP {status}"
    return NoAnswer(name, reason, wrong=not may_pass(status))


def summary(error: Exception) -> str:
    """Gives one line of an error, not too long."""
    text = one_line(error)
    return text if len(text) <= 120 else text[:117] + "..."
