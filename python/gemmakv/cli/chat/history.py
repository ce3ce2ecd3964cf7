"""The lines typed before, kept in a file for later starts."""

from __future__ import annotations

import os
from pathlib import Path

from prompt_toolkit.history import (
    FileHistory,
    History,
    InMemoryHistory,
    ThreadedHistory,
)

from gemmakv.cli import describe


class TypedHistory:
    """Keeps lines in a file if `path` is one that can be used, else in memory.

    What cannot be written to the file is remembered until the chat ends.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else _prepare(path)
        self.history: History = (
            InMemoryHistory()
            if self._file is None
            else ThreadedHistory(self._file)
        )
        self._said = ""

    def take_failure(self) -> str:
        """A line on why the last entry is not in the file, if that is new;
        else "".
        """
        failure = "" if self._file is None else self._file.failure
        new = failure if failure != self._said else ""
        self._said = failure
        return new and (
            f"what is typed is not kept for later starts: {new}; the chat "
            "continues"
        )


class _File(FileHistory):
    failure = ""

    def store_string(self, string: str) -> None:
        try:
            super().store_string(string)
        except OSError as error:
            # Named already if it could not be opened.
            error.filename = error.filename or self.filename
            self.failure = describe(error)
        else:
            self.failure = ""


def _prepare(path: Path) -> _File | None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError:
        return None
    return _File(str(path))
