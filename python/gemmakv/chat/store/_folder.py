"""Sessions on disk: a folder for each model, for many chats at a time.

    history                       what was typed, of all models
    NAME-FINGERPRINT/lock         shared by all who use the folder
    NAME-FINGERPRINT/current      id of the session that was opened last
    NAME-FINGERPRINT/ID.lock      held by whoever may write the session
    NAME-FINGERPRINT/ID.json      record: text, settings, ancestry
    NAME-FINGERPRINT/ID.session   the same with the KV cache (Session.save), or
                                  with its tokens where that is kept elsewhere
    NAME-FINGERPRINT/trash/       records and session files that were deleted

A record is written before its session file and removed before it, so a
session exists exactly if its record does. Every file is replaced in one
step: at any moment, also after a crash, each is whole. A session file may be
older than its record; whoever restores it compares the two.

The locks are the system's (flock): they end with the process that has them.
Whoever finds itself alone in the folder sweeps it. Versions that knew one
writer for a folder held `lock` alone; where one does, others only read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from pathlib import Path
from typing import BinaryIO

from gemmakv._support.files import atomic_writer, write_atomically
from gemmakv._support.folders import data_folder
from gemmakv._support.locks import lock
from gemmakv.chat._session_file import KeptTokens, kept_tokens
from gemmakv.chat.store import _records
from gemmakv.chat.store._protocol import Listing, SaveTo
from gemmakv.chat.store._records import NewerRecord, Record
from gemmakv.errors import CorruptFile, GemmaKVError, unexpected

_RECORD = ".json"
_SESSION = ".session"
_LOCK = ".lock"
_TRASH_DAYS = 30
_SWEEP_S = 5.0  # nobody is alone for longer, even if stopped for a while
_POLL_S = 0.02
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def folder_of(model_name: str, fingerprint: str) -> Path:
    """Where the sessions of a model lie. Give its `weights_fingerprint`: what
    was said is for every arithmetic."""
    safe = "".join(c if c.isalnum() or c in "-._" else "_" for c in model_name)
    return data_folder() / "chat" / f"{safe or 'model'}-{fingerprint[:16]}"


class FolderStore:
    """A `SessionStore` of files.

    Raises OSError if the folder is not there and cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trash = folder / "trash"
        self._read_only = ""
        self._held: dict[str, int] = {}  # descriptors of locks by id
        self._mutex = threading.Lock()  # of `_held`
        self._lock = -1
        self._emptied: list[KeptTokens] = []
        # Records as they were read last, by path.
        self._known: dict[Path, tuple[_Version, Record]] = {}
        try:
            # Sessions are private.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _open_lock(folder / "lock")
        except OSError as error:
            if error.errno not in _READ_ONLY or not folder.is_dir():
                raise
            self._read_only = f"{folder}: {error.strerror}"
            return
        try:
            self._enter()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with self._mutex:
            held, self._held = [*self._held.values(), self._lock], {}
            self._lock = -1
        for descriptor in held:
            if descriptor >= 0:
                os.close(descriptor)

    @property
    def writable(self) -> bool:
        return not self._read_only

    @property
    def read_only(self) -> str:
        return self._read_only

    @property
    def where(self) -> str:
        return str(self._folder)

    # ---- Who may write ----

    def hold(self, id: str, wait_s: float = 0) -> bool:
        if not self.writable:
            return False
        end = time.monotonic() + wait_s
        while not self._try_to_hold(id):
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_S)
        return True

    def release(self, id: str) -> None:
        with self._mutex:
            descriptor = self._held.pop(id, -1)
        if descriptor >= 0:
            os.close(descriptor)

    def holder(self, id: str) -> str:
        number = _read_word(self._path(id, _LOCK))
        return f"process {number or '?'}"

    def _try_to_hold(self, id: str) -> bool:
        descriptor = _open_lock(self._path(id, _LOCK))
        if not lock(descriptor, wait=False):
            os.close(descriptor)
            return False
        with contextlib.suppress(OSError):  # it is for people
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        with self._mutex:
            self._held[id] = descriptor
        return True

    def _check_held(self, id: str) -> None:
        if id not in self._held:
            raise PermissionError(
                errno.EACCES,
                self._read_only or "the session is not held",
                str(self._path(id, _RECORD)),
            )

    # ---- Sessions ----

    def listing(self) -> Listing:
        """Damaged records are put aside, under other names."""
        listing = Listing([], [], set())
        known, self._known = self._known, {}
        for path in sorted(self._folder.glob("*" + _RECORD)):
            try:
                # Taken first: a record that is replaced meanwhile is read
                # again the next time.
                version = _version(path)
                before = known.get(path)
                if before is not None and before[0] == version:
                    found: Record | str = before[1]
                else:
                    found = self._sound(path)
                if isinstance(found, Record):
                    self._known[path] = (version, found)
                    listing.records.append(_records.copy_of(found))
                else:
                    listing.lines.append(found)
            except FileNotFoundError:
                continue  # deleted meanwhile
            except NewerRecord as error:
                listing.taken.add(error.name)
                listing.lines.append(
                    f"the stored session {error.name or path.name} is of a "
                    f"newer gemmakv ({error}); it is left as it is"
                )
            except OSError as error:
                listing.lines.append(_unreadable(error, path))
        return listing

    def _sound(self, path: Path) -> Record | str:
        """The record of a file, or what to say of a damaged one, which is put
        aside unless somebody holds it.
        """
        try:
            return read_file(path)
        except CorruptFile as error:
            if not self.hold(path.stem):
                return _unreadable(error, path)
        try:
            return read_file(path)  # its holder may have mended it meanwhile
        except CorruptFile as error:
            kept = self._set_aside(path)
            self._set_aside(self._path(path.stem, _SESSION))
            return _unreadable(error, kept)
        finally:
            self.release(path.stem)

    def read_record(self, id: str) -> Record | None:
        try:
            return read_file(self._path(id, _RECORD))
        except FileNotFoundError:
            return None

    def write_record(self, record: Record) -> None:
        self._check_held(record.id)
        path = self._path(record.id, _RECORD)
        write_atomically(path, record.to_json(), private=True)

    def open_session(self, id: str) -> BinaryIO | None:
        try:
            return open(self._path(id, _SESSION), "rb")
        except FileNotFoundError:
            return None

    def write_session(self, id: str, save: SaveTo) -> None:
        self._check_held(id)
        with atomic_writer(self._path(id, _SESSION), private=True) as file:
            save(file)

    def delete(self, id: str) -> None:
        self._check_held(id)
        self._trash.mkdir(mode=0o700, exist_ok=True)
        self._move(id, self._folder, self._trash)

    def deleted(self) -> list[Record]:
        found = []
        for path in self._trash.glob("*" + _RECORD):
            try:
                found.append((path.stat().st_ctime_ns, read_file(path)))
            except (CorruptFile, NewerRecord, OSError):
                continue
        return [one for _, one in sorted(found, key=lambda x: -x[0])]

    def undelete(self, id: str) -> Record | None:
        if not self.hold(id):
            return None
        try:
            self._move(id, self._trash, self._folder)
            return self.read_record(id)
        finally:
            self.release(id)

    def take_emptied(self) -> list[KeptTokens]:
        emptied, self._emptied = self._emptied, []
        return emptied

    @property
    def current_id(self) -> str | None:
        return read_current(self._folder)

    def write_current(self, id: str) -> None:
        if self.writable and self.current_id != id:
            current = self._folder / "current"
            write_atomically(current, id.encode("ascii"), private=True)

    # ---- Files ----

    def _path(self, id: str, suffix: str) -> Path:
        if not id or "/" in id or "\0" in id:
            raise unexpected("id", "the id of a session", id)
        return self._folder / (id + suffix)

    def _move(self, id: str, source: Path, target: Path) -> None:
        """The record first when it goes, last when it comes."""
        suffixes = [_RECORD, _SESSION]
        for suffix in suffixes if target == self._trash else suffixes[::-1]:
            if (source / (id + suffix)).exists():
                os.replace(source / (id + suffix), target / (id + suffix))

    def _set_aside(self, path: Path) -> Path:
        number = 1
        while (aside := Path(f"{path}.damaged-{number}")).exists():
            number += 1
        if path.exists():
            path.rename(aside)
        return aside

    def _enter(self) -> None:
        """Joins those who use the folder; whoever is alone sweeps it."""
        if lock(self._lock, wait=False):
            self._sweep()
        end = time.monotonic() + _SWEEP_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= end:
                    break
            time.sleep(_POLL_S)
        process = os.pread(self._lock, 32, 0).decode("ascii", "replace")
        self._read_only = (
            f"an older gemmakv chat (process {process or '?'}) keeps the "
            "sessions for itself"
        )

    def _sweep(self) -> None:
        """Deletes what killed chats left half done, and old trash."""
        doomed = [*self._folder.glob(".*.tmp")]
        for suffix in (_SESSION, _LOCK):
            doomed += [
                path
                for path in self._folder.glob("*" + suffix)
                if not self._path(path.stem, _RECORD).exists()
            ]
        oldest = time.time() - _TRASH_DAYS * 86400
        trash = [
            path
            for path in self._trash.glob("*")
            if path.stat().st_ctime < oldest
        ]
        for path in trash:
            with contextlib.suppress(OSError, GemmaKVError):
                if path.suffix == _SESSION:
                    with open(path, "rb") as file:
                        found = kept_tokens(file)
                    self._emptied += [] if found is None else [found]
        for path in doomed + trash:
            path.unlink(missing_ok=True)


# Of a file that is only ever replaced: another file, or another time.
_Version = tuple[int, int, int, int]


def _version(path: Path) -> _Version:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _unreadable(error: Exception, kept: Path) -> str:
    return f"a stored session cannot be read ({error}); kept as {kept}"


def _open_lock(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o600)


def read_current(folder: Path) -> str | None:
    return _read_word(folder / "current")


def _read_word(path: Path) -> str | None:
    """Reads a short text; gives None where there is none."""
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def read_file(path: Path) -> Record:
    if path.exists() and not path.is_file():  # a pipe would wait
        raise CorruptFile("expected a regular file")
    record = _records.from_json(path.read_bytes())
    if record.id != path.stem:
        raise CorruptFile(f"expected id {path.stem}")
    return record
