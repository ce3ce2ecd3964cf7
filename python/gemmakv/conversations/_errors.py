"""Errors of the store of conversations."""

from __future__ import annotations

from gemmakv.errors import GemmaKVError, MismatchError


class StoreError(GemmaKVError):
    """A call of the store that failed; nothing of it is kept.

    Attributes:
      code: a short name for programs.
      argument: the argument that it is about, if it is about one.
    """

    code = "sessions_failed"
    argument: str | None = None


class NoSession(StoreError):
    """The tenant has no such session."""

    code = "session_not_found"

    def __init__(self, message: str, argument: str = "session") -> None:
        super().__init__(message)
        self.argument = argument


class NoTurn(StoreError):
    """The session has no such turn."""

    code = "turn_not_found"
    argument = "turn"


class NoResponse(StoreError):
    """The tenant has no such response, or none any more."""

    code = "response_not_found"
    argument = "previous_response_id"


class SessionBusy(StoreError):
    """Somebody else has the session.

    Attributes:
      holder: who, for people; "" if it cannot be told.
    """

    code = "session_busy"
    argument = "session"

    def __init__(self, message: str, holder: str = "") -> None:
        super().__init__(message)
        self.holder = holder


class StoreBusy(StoreError):
    """Another process writes for too long: another try makes sense."""

    code = "sessions_busy"


class StoreFull(StoreError):
    """The disk is full."""

    code = "sessions_full"


class StoreFailed(StoreError):
    """The disk, or the database on it, does not work."""


class StoreMoved(StoreError):
    """The database's file was removed or replaced: it has to be opened
    again.
    """


class StoreClosed(StoreError):
    """The store was closed."""

    code = "sessions_closed"


class NewerStore(MismatchError, ValueError):
    """A newer version made the database."""
