"""Conversations in a database."""

from __future__ import annotations

import hashlib
import hmac
import os

from gemmakv._support.files import StrPath
from gemmakv._support.folders import data_folder
from gemmakv.conversations._database import Database
from gemmakv.conversations._errors import StoreError
from gemmakv.conversations._leases import Leases
from gemmakv.conversations._sessions import Sessions
from gemmakv.conversations._turns import Turns
from gemmakv.conversations._types import FileId

_DAY_S = 86400.0


def folder_of(name: str) -> str:
    """Gives the folder that --sessions names: "default" is the user's own.
    Raises ValueError for no name, OSError if there is no home.
    """
    if not name:
        raise ValueError("sessions: expected a folder, found ''")
    return str(data_folder() / "conversations") if name == "default" else name


class Conversations:
    """Sessions and their turns, for many processes at a time.

    Every call is one transaction and may block: on disk when it returns, or
    nothing of it. Any threads may call, one after the other. Calls raise
    StoreError.

    Attributes:
      database: its file, and how that is.
      sessions, turns, leases: what there is, and who may write it.
    """

    def __init__(
        self, database: Database, response_days: float = 30.0
    ) -> None:
        self.database = database
        self.leases = Leases(database)
        self.sessions = Sessions(database, self.leases)
        self.turns = Turns(database, response_days * _DAY_S)

    @classmethod
    def open(
        cls,
        folder: StrPath,
        response_days: float = 30.0,
        same: FileId | None = None,
    ) -> Conversations:
        """Opens the database of a folder; makes both where there are none.
        Responses are kept for `response_days`. With `same`, the `file` of
        another one, it has to be that file.

        Raises OSError or ValueError that names the folder.
        """
        database = Database(os.fspath(folder), same)
        found = cls(database, response_days)
        try:
            found.turns.expire()
        except StoreError as error:
            found.close()
            raise database.unusable(error) from None
        return found

    @property
    def folder(self) -> str | None:
        return self.database.folder

    def tenant_of(self, key: str) -> str:
        """Gives what records call the owner of a key; the same after a
        restart.
        """
        secret = self.database.secret
        return hmac.digest(secret, key.encode(), hashlib.sha256).hex()

    def close(self) -> None:
        """Closes the database. Idempotent."""
        self.leases.close()
        self.database.close()
