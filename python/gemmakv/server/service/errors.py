"""The error of a request, before an API puts it into its own form."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence

from gemmakv.conversations import (
    NoResponse,
    NoSession,
    NoTurn,
    SessionBusy,
    StoreBusy,
    StoreClosed,
    StoreError,
)
from gemmakv.errors import CacheFullError, GemmaKVError, brief, one_line
from gemmakv.generation._schema_check import SchemaError

# "max_tokens: expected ...", "messages[0].role: ..."
_NAMED = re.compile(r"([a-z_]+(?:\[[^\]]*\]|\.[a-z_]+)*):")


class RequestError(Exception):
    """A request that is not served.

    Attributes:
      status: the HTTP status.
      message: what was found and what was expected.
      param: the field that is bad, by the library's name, or by the body's
        where that is known.
      code: a short name for programs.
      retry_after: seconds after which another try makes sense; None if none
        does.
      more: what else the answer says, by name.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        more: dict[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.more = more or {}


def invalid(param: str, message: str, code: str | None = None) -> RequestError:
    """Makes the error of a bad field; the message begins with its name."""
    return RequestError(400, f"{param}: {message}", param=param, code=code)


def unexpected(param: str, expected: str, found: object) -> RequestError:
    """Makes the error of a field with another value than expected. `found` is
    None if it has no value.
    """
    has = "none" if found is None else brief(found)
    return invalid(param, f"expected {expected}, found {has}")


def unsupported(param: str, what: str = "") -> RequestError:
    """Makes the error of a field that asks for what the server does not do."""
    return invalid(
        param,
        f"{what}{': ' if what else ''}not supported by this server",
        code="unsupported_field",
    )


def cannot_think(param: str, expected: str, found: str) -> RequestError:
    """Makes the error of a field that asks a model to think that cannot."""
    return invalid(
        param,
        f"expected {expected}, found {found}: this model cannot think",
        code="unsupported_field",
    )


def refuse_others(field: str, value: object, known: Sequence[str]) -> None:
    """Raises RequestError for a field of an object that is not among the
    `known` ones, unless it is null or false.
    """
    if not isinstance(value, Mapping):
        return
    for name, one in value.items():
        if name not in known and one is not None and one is not False:
            raise unsupported(f"{field}.{str(name)[:60]}")


def error_of_store(error: StoreError) -> RequestError:
    """Makes a request's error of an error of the database of sessions."""
    status, code = 503, error.code
    if isinstance(error, (NoResponse, NoSession, NoTurn)):
        status = 404
    elif isinstance(error, SessionBusy):
        status = 409
    elif isinstance(error, StoreClosed):
        code = "server_stopping"
    again = isinstance(error, (SessionBusy, StoreBusy))
    return RequestError(
        status,
        str(error),
        param=error.argument,
        code=code,
        retry_after=1 if again else None,
    )


def error_of_value(error: ValueError) -> RequestError:
    """Makes a request's error of one of the library's, which begins with the
    argument's name.
    """
    message = one_line(error)
    if isinstance(error, SchemaError):
        return RequestError(400, message, param=error.field)
    named = _NAMED.match(message)
    return RequestError(400, message, param=named[1] if named else None)


@contextlib.contextmanager
def library_errors() -> Iterator[None]:
    """Makes requests' errors of the library's that the body raises."""
    try:
        yield
    except CacheFullError as error:
        raise out_of_memory(one_line(error)) from error
    except ValueError as error:
        raise error_of_value(error) from error
    except GemmaKVError as error:
        # A template that cannot express the messages.
        raise RequestError(400, one_line(error)) from error


def out_of_memory(message: str) -> RequestError:
    """Makes the error of a request that found no memory."""
    return RequestError(503, message, code="out_of_memory", retry_after=5)


def too_late(when: str) -> RequestError:
    """Makes the error of a request whose time was over; `when` says what it
    was still waiting for.
    """
    return RequestError(
        503,
        f"deadline: it passed {when}",
        param="deadline",
        code="deadline_exceeded",
    )
