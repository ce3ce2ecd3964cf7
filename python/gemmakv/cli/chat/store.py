"""Conversations on disk: a folder for each model, used by one chat at a time.

    history                       what was typed, of all models
    NAME-FINGERPRINT/lock         held by the chat that may write here
    NAME-FINGERPRINT/current      id of the conversation that is current
    NAME-FINGERPRINT/ID.json      record: text, settings, ancestry
    NAME-FINGERPRINT/ID.session   the same with the KV cache (Session.save)

A record is written before its session file and removed before it, so a
conversation exists exactly if its record does. Every file is replaced in one
step: at any moment, also after a crash, each is whole. A session file may be
older than its record; whoever restores it compares the two.
"""

from __future__ import annotations

import os
from pathlib import Path

from gemmakv._support.files import write_atomically
from gemmakv._support.folders import data_folder
from gemmakv._support.locks import lock
from gemmakv.cli.chat import records
from gemmakv.cli.chat.records import Record
from gemmakv.errors import CorruptFile

_RECORD = ".json"
_SESSION = ".session"


def folder_of(model_name: str, fingerprint: str) -> Path:
    """Where the conversations of a model lie."""
    safe = "".join(c if c.isalnum() or c in "-._" else "_" for c in model_name)
    return data_folder() / "chat" / f"{safe or 'model'}-{fingerprint[:16]}"


class Store:
    """One model's folder. Only the holder of its lock writes.

    Raises OSError if the folder cannot be made or read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Conversations are private.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self.writable = lock(self._lock, wait=False)
        except BaseException:
            os.close(self._lock)
            raise
        if not self.writable:
            return
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        self._sweep()

    def close(self) -> None:
        """Lets the next chat write. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def holder(self) -> str:
        """Process id of the chat that may write; "?" if unknown."""
        return os.pread(self._lock, 32, 0).decode("ascii", "replace") or "?"

    def read_records(self) -> tuple[list[Record], list[str]]:
        """All sound records, and one line for each that is not.

        The files of one that is not are kept under other names.
        """
        found: list[Record] = []
        lines: list[str] = []
        for path in sorted(self._folder.glob("*" + _RECORD)):
            try:
                record = records.from_json(path.read_bytes())
                if record.id != path.stem:
                    raise CorruptFile(f"expected id {path.stem}")
                found.append(record)
            except FileNotFoundError:
                continue  # deleted meanwhile by the chat that may
            except (CorruptFile, OSError) as error:
                kept = self._set_aside(path)
                self._set_aside(self._path(path.stem, _SESSION))
                lines.append(
                    f"a stored session cannot be read ({error}); kept as "
                    f"{kept}"
                )
        return found, lines

    def read_session(self, id: str) -> bytes | None:
        """What `write_session` wrote; None if there is nothing."""
        try:
            return self._path(id, _SESSION).read_bytes()
        except FileNotFoundError:
            return None

    def set_session_aside(self, id: str) -> Path:
        """Keeps a session file that is of no use under another name."""
        return self._set_aside(self._path(id, _SESSION))

    @property
    def current_id(self) -> str | None:
        try:
            return (self._folder / "current").read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None

    def write_current(self, id: str) -> None:
        if self.writable and self.current_id != id:
            write_atomically(self._folder / "current", id.encode("ascii"))

    def write_record(self, record: Record) -> None:
        if self.writable:
            write_atomically(self._path(record.id, _RECORD), record.to_json())

    def write_session(self, id: str, data: bytes) -> None:
        if self.writable:
            write_atomically(self._path(id, _SESSION), data)

    def delete(self, id: str) -> None:
        if self.writable:
            self._path(id, _RECORD).unlink(missing_ok=True)
            self._path(id, _SESSION).unlink(missing_ok=True)

    def _path(self, id: str, suffix: str) -> Path:
        return self._folder / (id + suffix)

    def _set_aside(self, path: Path) -> Path:
        """The new path; unchanged where this chat may not write."""
        if not self.writable or not path.exists():
            return path
        number = 1
        while True:
            aside = path.with_name(f"{path.name}.damaged-{number}")
            if not aside.exists():
                path.rename(aside)
                return aside
            number += 1

    def _sweep(self) -> None:
        """Deletes what a killed chat left half done. Requires: the lock."""
        for leftover in self._folder.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        for path in self._folder.glob("*" + _SESSION):
            if not self._path(path.stem, _RECORD).exists():
                path.unlink(missing_ok=True)
