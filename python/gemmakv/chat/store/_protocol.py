"""What chats and servers need of whatever keeps sessions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import BinaryIO, Protocol

from gemmakv._support.files import PathOrFile
from gemmakv.chat._session_file import KeptTokens
from gemmakv.chat.store._records import Record

# Writes a session file to where it is told to: `Session.save`.
SaveTo = Callable[[PathOrFile], None]


@dataclasses.dataclass(frozen=True)
class Listing:
    """What a store holds.

    Attributes:
      records: those that can be read.
      lines: one for each that cannot, for people.
      taken: names of sessions that only a newer version can read.
    """

    records: list[Record]
    lines: list[str]
    taken: set[str]


class SessionStore(Protocol):
    """Sessions of one model, for many processes and threads at a time.

    A session is a record (text, settings, ancestry) and, if it was saved, a
    session file (the same with keys and values). Anybody reads; whoever holds
    a session writes it, and nobody else does. All methods may raise OSError.
    """

    @property
    def writable(self) -> bool:
        """Whether anything can be kept here; `read_only` says why not."""

    @property
    def read_only(self) -> str:
        """Why nothing can be kept; "" if it can."""

    @property
    def where(self) -> str:
        """The place, for people."""

    def listing(self) -> Listing:
        """All sessions."""

    @property
    def current_id(self) -> str | None:
        """Of the session that was opened last."""

    def write_current(self, id: str) -> None:
        """Notes which session was opened last, if that can be kept."""

    def hold(self, id: str, wait_s: float = 0) -> bool:
        """Takes the right to write a session, which need not exist; False if
        somebody has it for longer than `wait_s` seconds. It ends with
        `release`, `close` or the process.
        """

    def release(self, id: str) -> None:
        """Gives the right back. Idempotent."""

    def holder(self, id: str) -> str:
        """Who holds a session, for people."""

    def read_record(self, id: str) -> Record | None:
        """None: there is no such session."""

    def write_record(self, record: Record) -> None:
        """Durable on return. Requires: the session is held."""

    def open_session(self, id: str) -> BinaryIO | None:
        """The session file; None: there is none."""

    def write_session(self, id: str, save: SaveTo) -> None:
        """Has `save` write the session file. Requires: the session is held."""

    def delete(self, id: str) -> None:
        """Puts a session away. Requires: it is held."""

    def deleted(self) -> list[Record]:
        """What `undelete` can bring back, the last deleted first."""

    def undelete(self, id: str) -> Record | None:
        """Brings a session back; None: it is not there any more."""

    def take_emptied(self) -> list[KeptTokens]:
        """Of sessions that `undelete` cannot bring back any more since the
        store was opened, the tokens; each once.
        """

    def close(self) -> None:
        """Gives up all that is held. Idempotent."""
