"""The database's file: who may open it, its schema, and its transactions.

Every transaction is on disk when it ends, or nothing of it. Any number of
processes may have the file open, and of this one any threads, one after the
other. What SQLite needs, and no other database does, is in this file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from gemmakv._support.mounts import is_on_network
from gemmakv.conversations._clock import AgeClock
from gemmakv.conversations._errors import (
    NewerStore,
    StoreBusy,
    StoreClosed,
    StoreError,
    StoreFailed,
    StoreFull,
    StoreMoved,
)
from gemmakv.conversations._tables import (
    HEAD,
    REVISIONS,
    WRITES,
    facts,
    metadata,
    next_number,
    revisions,
    sessions,
)
from gemmakv.conversations._types import BUSY_S, FileId

FILE = "sessions.sqlite3"
_APPLICATION = 0x676B7653
# What keeps a place from being written: what is there may be read.
CANNOT_WRITE = (
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOSPC,
    errno.EDQUOT,
)
# Names of a disk without room. A write that fails is one beyond a quota, too;
# the last is about the memory that processes share.
_NO_ROOM = ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE")
# Of what may be made or written by others alone.
_REFUSED = ("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")
_STRICT = (3, 37)  # SQLite's version
_POLL_S = 0.01
_PROBE_BYTES = 1 << 16
_SHARED_MEMORY = "/dev/shm"


class Database:
    """A database in a folder, or in memory.

    Attributes:
      file: which file it is, for `same` in another process.
      failure: why the last write failed; "" if it did not.
    """

    driver: sqlite3.Connection

    def __init__(
        self,
        folder: str | None,
        same: FileId | None = None,
        read_only: bool = False,
    ) -> None:
        """Makes the folder and the database where there are none. With `same`,
        the `file` of another one, it has to be that file. With `read_only`,
        nothing is made or written. No folder: it is in memory.

        Raises OSError or ValueError that names the folder.
        """
        self.folder = folder
        self.read_only = read_only
        self.failure = ""
        self._lock = threading.Lock()
        self.engine: Engine | None = None
        self._patience_s = BUSY_S
        self._log: FileId | None = None
        self.file: FileId = (0, 0)
        self._path = ""
        if sqlite3.sqlite_version_info < _STRICT:
            raise ValueError(
                f"sessions: {folder}: expected SQLite 3.37 or later, found "
                f"{sqlite3.sqlite_version}"
            )
        if folder is not None:
            self._path = os.path.join(folder, FILE)
            if same is None and not read_only:
                _make_private(folder, self._path)
            self.file = _file_of(self._path) or (0, 0)
        if same not in (None, self.file):
            raise ValueError(
                f"sessions: {folder}: expected the database of the server's "
                "start, which was removed or replaced; restart the server"
            )
        try:
            self._open()
        except (sqlite3.Error, StoreError) as error:
            self.close()
            raise self.unusable(error) from None
        except BaseException:
            self.close()
            raise

    def unusable(self, error: Exception) -> OSError | ValueError:
        """Makes the error of an open that failed."""
        cause = getattr(error.__cause__, "orig", None) or error
        name = _errorname(cause)
        if self.folder and name.startswith((*_NO_ROOM, *_REFUSED)):
            number = _why_not_written(self.folder, self._path)
            if name in _NO_ROOM:
                number = number or errno.ENOSPC  # there is room again
            if number:
                return _refused(self.folder, number)
        return ValueError(
            f"sessions: {self.folder}: expected a folder that can be written, "
            f"with a sound {FILE} or none, found: {cause}"
        )

    def _open(self) -> None:
        self._use(_connect(self._path, self.read_only))
        with self.read() as db:
            # What is refused is left as it is, its journal too.
            before = "" if _is_new(db) else self._check_schema(db)
        if self.read_only:
            if before != HEAD:  # it is brought up in memory
                copy = _driver(":memory:")
                self.driver.backup(copy)
                self.close()
                self._use(copy)
                with self.write() as db:
                    self._bring_up(db)
            self.driver.execute("PRAGMA query_only = ON")
            with self.read() as db:
                self._read_facts(db)
            return
        if self._path and is_on_network(self._path):
            # A log is for processes that share memory.
            self.driver.execute("PRAGMA journal_mode = TRUNCATE")
        elif self._path:
            _keep_a_log(self.driver)
        self.driver.execute("PRAGMA synchronous = FULL")
        self.driver.execute("PRAGMA foreign_keys = ON")
        with self.write() as db:
            self._bring_up(db)
            self._read_facts(db)
            self.note_age(db)
        if self._path:
            self._log = _file_of(f"{self._path}-wal")

    def _use(self, driver: sqlite3.Connection) -> None:
        self.driver = driver
        self.engine = sa.create_engine(
            "sqlite://", creator=lambda: driver, poolclass=StaticPool
        )
        event.listen(self.engine, "begin", _begin)

    def _read_facts(self, db: Connection) -> None:
        secret = fact(db, "secret")
        if secret is None:
            raise StoreFailed("a database without its secret")
        self.secret = secret
        self.clock = AgeClock(fact(db, "clock"))

    # Schema.

    def _bring_up(self, db: Connection) -> None:
        """Makes the schema that of this version."""
        if _is_new(db):
            metadata.create_all(db)
            db.execute(revisions.insert().values(version_num=HEAD))
            set_fact(db, "secret", secrets.token_bytes(32))
            db.exec_driver_sql(f"PRAGMA application_id = {_APPLICATION}")
        else:
            before = self._check_schema(db)
            if before == HEAD:
                _number_rest(db)
                return
            _migrate(db, before)
        # By this number versions that know no revisions leave it alone.
        db.exec_driver_sql(f"PRAGMA user_version = {len(REVISIONS)}")

    def _check_schema(self, db: Connection) -> str:
        """Gives the revision. Raises ValueError for what is no database of
        this program, or a newer one.
        """
        if _pragma(db, "application_id") != _APPLICATION:
            raise ValueError(
                f"sessions: {self.folder}: expected a database of this "
                f"program, found another's {FILE}"
            )
        found = REVISIONS[0]
        if sa.inspect(db).has_table(revisions.name):
            found = db.execute(sa.select(revisions.c.version_num)).scalar_one()
        number = _pragma(db, "user_version")
        if found not in REVISIONS or number > len(REVISIONS):
            raise NewerStore(
                f"sessions: {self.folder}: expected a database of schema "
                f"{len(REVISIONS)}, found {number}, which a newer version "
                "made; update gemmakv to open it"
            )
        return found

    def note_age(self, db: Connection) -> None:
        """Has the clock go on from now at the next start."""
        set_fact(db, "clock", self.clock.note(fact(db, "clock")))

    # Transactions.

    def read(self) -> AbstractContextManager[Connection]:
        """A transaction that sees one state of the database."""
        return self._transaction(False)

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction of which all is on disk, or nothing."""
        with self._transaction(True) as db:
            yield db
        self.failure = ""

    def write_lease(self) -> AbstractContextManager[Connection]:
        """As `write`, for what fits also where a turn has no room."""
        return self._transaction(True)

    @contextlib.contextmanager
    def _transaction(self, writes: bool) -> Iterator[Connection]:
        with self._lock:
            if self.engine is None:
                raise StoreClosed("the sessions are closed")
            self.check_place()
            try:
                with self.engine.connect() as db:
                    db.execution_options(**{WRITES: writes})
                    with db.begin():
                        yield db
            except DBAPIError as error:
                name = _errorname(error.orig)
                if writes:
                    self.failure = f"{error.orig} ({name})"
                raise _failed(error, name, writes) from error

    def version(self) -> tuple[int, int]:
        """Gives what differs when this process or another has written."""
        with self.read() as db:
            return _pragma(db, "data_version"), self.driver.total_changes

    def be_patient(self, seconds: float) -> None:
        """Has what follows wait that long for another process that writes."""
        if self.engine is not None and seconds != self._patience_s:
            self._patience_s = seconds
            self.driver.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")

    def close(self) -> None:
        """Closes the file. Idempotent."""
        with self._lock:
            engine, self.engine = self.engine, None
            if engine is not None:
                engine.dispose()
            driver = self.__dict__.get("driver")
            if driver is not None:
                driver.close()

    # The place.

    def warnings(self) -> list[str]:
        """Says what keeps turns from being kept, and may pass by itself."""
        found = []
        if self._path and _is_on_read_only(self._path):
            found.append("sessions: their file system is read-only")
        if self.failure:
            found.append(f"sessions: the last write failed: {self.failure}")
        return found

    def check_place(self) -> None:
        """Raises StoreMoved where the file, or its log, is not there any more:
        what goes to one that was removed is lost, without an error.
        """
        if not self._path:
            return
        log = f"{self._path}-wal"
        for path, file in (self._path, self.file), (log, self._log):
            found = _file_of(path)
            if file is None or found == file:
                continue
            what = "none" if found is None else "another file"
            raise StoreMoved(
                f"sessions: {path}: expected the file that was opened, found "
                f"{what}; it has to be opened again"
            )


def fact(db: Connection, name: str) -> bytes | None:
    """Gives what is noted under a name; None: nothing is."""
    query = sa.select(facts.c.value).where(facts.c.name == name)
    found: bytes | None = db.execute(query).scalar_one_or_none()
    return found


def set_fact(db: Connection, name: str, value: bytes) -> None:
    """Notes a value under a name, instead of what was there."""
    db.execute(sa.delete(facts).where(facts.c.name == name))
    db.execute(sa.insert(facts).values(name=name, value=value))


def _begin(db: Connection) -> None:
    """Begins a transaction: the driver, told to leave that to us, does not.
    One that writes takes the lock at once, as one that has read could not wait
    for it.
    """
    writes = db.get_execution_options().get(WRITES)
    db.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _connect(path: str, read_only: bool) -> sqlite3.Connection:
    return _read_only(path) if read_only else _driver(path or ":memory:")


def _driver(name: str, uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(
        name,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
        uri=uri,
    )


def _read_only(path: str) -> sqlite3.Connection:
    """Opens a database where nothing can be made, which others may write all
    the same. What SQLite needs to read one beside them cannot be made there
    either: unless they have made it, this is a copy in memory.
    """
    name = f"{Path(path).absolute().as_uri()}?mode=ro"
    while True:
        before = _version_of(path)
        if not _has_journal(path):
            copy = _copy_of(f"{name}&immutable=1")
        elif (found := _beside_others(name)) is not None:
            return found
        else:
            copy = _copy_with_journal(path)
        if _version_of(path) == before:
            return copy
        copy.close()  # somebody wrote meanwhile


def _beside_others(name: str) -> sqlite3.Connection | None:
    """Opens a database that others have open; None: it cannot be read so, as
    whoever wrote its journal was killed.
    """
    db = _driver(name, uri=True)
    try:
        db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.OperationalError as error:
        db.close()
        if _errorname(error).startswith("SQLITE_BUSY"):
            raise
        return None
    return db


def _copy_with_journal(path: str) -> sqlite3.Connection:
    """Copies a database and its journal to where there is room, in memory if
    that is a folder, and from there.
    """
    place = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        for file in _files_of(path):
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(file, folder)
        return _copy_of(Path(folder, FILE).as_uri())


def _copy_of(name: str) -> sqlite3.Connection:
    copy = _driver(":memory:")
    source = _driver(name, uri=True)
    try:
        source.backup(copy)
    except BaseException:
        copy.close()
        raise
    finally:
        source.close()
    return copy


def _has_journal(path: str) -> bool:
    """Says whether a part of the database may be in another file."""
    for journal in _files_of(path)[1:]:
        with contextlib.suppress(OSError):
            if os.path.getsize(journal):
                return True
    return False


def _files_of(path: str) -> list[str]:
    return [path, f"{path}-wal", f"{path}-journal"]


def _version_of(path: str) -> list[tuple[int, ...]]:
    versions: list[tuple[int, ...]] = []
    for file in _files_of(path):
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(file)
            versions.append(
                (
                    found.st_dev,
                    found.st_ino,
                    found.st_size,
                    found.st_mtime_ns,
                )
            )
    return versions


def _keep_a_log(db: sqlite3.Connection) -> None:
    """Has what is written go to a log first, by which readers and a writer
    wait for nobody. Where another process makes the same new database, SQLite
    gives this up at once, whatever the timeout: it reads already, and waiting
    could be for one that waits for it.
    """
    end = time.monotonic() + BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            busy = _errorname(error).startswith("SQLITE_BUSY")
            if not busy or time.monotonic() >= end:
                raise
        time.sleep(_POLL_S)


def _is_new(db: Connection) -> bool:
    if _pragma(db, "user_version") or _pragma(db, "application_id"):
        return False
    return not sa.inspect(db).get_table_names()


def _pragma(db: Connection, name: str) -> int:
    return int(db.exec_driver_sql(f"PRAGMA {name}").scalar_one())


def _number_rest(db: Connection) -> None:
    """Numbers the sessions that processes of an earlier version made since."""
    query = sa.select(sessions.c.id, sessions.c.tenant)
    query = query.where(sessions.c.number.is_(None))
    for id, tenant in db.execute(query.order_by(sessions.c.created)).all():
        is_it = sessions.c.id == id
        number = next_number(tenant)
        db.execute(sa.update(sessions).where(is_it).values(number=number))


def _migrate(db: Connection, before: str) -> None:
    """Takes the steps from a revision to today's, in this transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": db})
    steps = Path(__file__).parent / "migrations"
    config.set_main_option("script_location", str(steps).replace("%", "%%"))
    if before == REVISIONS[0]:  # those of that time did not note it
        command.stamp(config, before)
    command.upgrade(config, HEAD)


def _make_private(folder: str, path: str) -> None:
    """Makes them if they are not there, for this user alone."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        os.close(os.open(path, flags, 0o600))
    except (FileExistsError, NotADirectoryError):
        found = "a file"
        if os.path.islink(folder) and not os.path.exists(folder):
            found = f"a link to {os.readlink(folder)}, which is not there"
        raise ValueError(
            f"sessions: {folder}: expected a folder, found {found}"
        ) from None
    except OSError as error:
        raise _refused(folder, error.errno) from None


def _refused(folder: str | None, number: int | None) -> OSError:
    """Makes the error of a folder in which the system lets nothing be made."""
    refused = OSError(f"sessions: {folder}: {os.strerror(number or 0)}")
    refused.errno = number  # without a strerror, which would be said
    return refused


def _why_not_written(folder: str, path: str) -> int:
    """Says why nothing can be written in a folder, or to a file in it, as an
    errno; 0: it can.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        return (error.errno in CANNOT_WRITE and error.errno) or 0
    # It is not opened: that would end the locks that this process has of it.
    return 0 if os.access(path, os.W_OK) else errno.EACCES


def _file_of(path: str) -> FileId | None:
    """Says which file it is; None where there is none that can be seen."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_on_read_only(path: str) -> bool:
    """Says whether its file system is read-only."""
    if not hasattr(os, "statvfs"):
        return False
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _errorname(error: BaseException | None) -> str:
    return getattr(error, "sqlite_errorname", None) or "SQLITE_ERROR"


def _failed(error: DBAPIError, name: str, wrote: bool) -> StoreError:
    words = f"sessions: {error.orig} ({name})"
    if wrote:
        words += "; nothing of this request is kept"
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreBusy(words)
    if name in _NO_ROOM:
        # What is deleted is written to the log first, which may have to grow.
        return StoreFull(
            f"{words}; the disk of the sessions is full, or a quota is used "
            "up: expected some room on it, which deleting needs, too"
        )
    if name.startswith("SQLITE_READONLY"):
        words += "; their folder can only be read"
    return StoreFailed(words)
