"""What chats with one model keep in the database: a `SessionStore`.

A record's messages become turns, two messages each. A turn keeps the tokens
that its chat's cache held when it ended and not before, so that a session that
is opened again has the same tokens, and with them the same results. Turns are
never changed: what a session is now is compared with the turns that lead to
its head, and from the first one that differs there are new ones. Forks share
those that are equal.

Keys and values are in the prefix cache. Where it has no disk, they are files
beside the database, as `Session.save` writes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from gemmakv._support.files import StrPath, atomic_writer
from gemmakv.chat import _session_file as session_file
from gemmakv.chat._messages import Message, messages_of
from gemmakv.chat._session_file import (
    KeptTokens,
    SessionState,
    SessionText,
    options_from_json,
    options_to_json,
)
from gemmakv.chat._transcript import Ids
from gemmakv.chat.store import Listing, NewerRecord, Record, SaveTo
from gemmakv.conversations._database import FILE, Database, fact, set_fact
from gemmakv.conversations._errors import SessionBusy, StoreFailed
from gemmakv.conversations._sessions import insert_session, select_sessions
from gemmakv.conversations._store import Conversations
from gemmakv.conversations._tables import (
    SESSION,
    session_of,
    sessions,
    turns,
)
from gemmakv.conversations._tree import insert_turn, prune, turns_up_to
from gemmakv.conversations._types import SessionInfo, Turn, new_id
from gemmakv.errors import CorruptFile, GemmaKVError, one_line

TENANT = ""  # whom a server without keys serves
_CACHE = "cache:"  # what the basis of a chat's tokens begins with
_TRASH_S = 30 * 86400.0
_POLL_S = 0.02
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_NO_IDS: Ids = np.empty(0, np.int32)
_QUOTES = "\"'"
_MAX_NAME_CHARS = 40


@dataclasses.dataclass(frozen=True)
class Taken:
    """A session from elsewhere.

    Attributes:
      deleted: seconds since it was put into the trash; None if it was not.
      state: what its cache held; None if nobody can tell.
      keys: the file with its keys and values, if there is one.
    """

    record: Record
    deleted: float | None = None
    state: SessionState | None = None
    keys: Path | None = None


@dataclasses.dataclass(frozen=True)
class _Said:
    """A turn as a chat knows it."""

    user: Message
    reply: Message
    basis: str = ""
    whole: bool = True
    tokens: Ids = dataclasses.field(default_factory=lambda: _NO_IDS)

    @classmethod
    def of(cls, turn: Turn) -> _Said | None:
        """None: no chat can go on from it."""
        if len(turn.messages) != 1 or turn.tools:
            return None
        try:
            user, reply = messages_of([*turn.messages, turn.reply])
        except ValueError:
            return None
        if (user.role, reply.role) != ("user", "assistant") or reply.tool_calls:
            return None
        return cls(user, reply, turn.basis, turn.whole, turn.tokens)

    def is_as(self, wanted: _Said, tokens: bool) -> bool:
        """Says whether it may stand where another is wanted; with `tokens`,
        which are to be the same.
        """
        if (self.user, self.reply) != (wanted.user, wanted.reply):
            return False
        if not tokens:
            return True
        if not len(wanted.tokens):
            # Those of another model, or of a server, do no harm.
            return not len(self.tokens) or self.basis != wanted.basis
        return (
            self.basis == wanted.basis
            and self.whole == wanted.whole
            and np.array_equal(self.tokens, wanted.tokens)
        )


@dataclasses.dataclass
class _Line:
    """The turns of a session, the first one first."""

    ids: list[str]
    said: list[_Said]


class ChatStore:
    """Sessions of chats with one model, and those that a server made with it.

    Calls raise OSError or StoreError.
    """

    def __init__(
        self,
        store: Conversations,
        weights: str,
        read_only: str = "",
    ) -> None:
        """`weights`: the fingerprint of the model's, for every arithmetic.
        `read_only`: why nothing can be kept; "" if it can.
        """
        self._store = store
        self._database = store.database
        self._weights = weights
        self._read_only = read_only
        self._lines: dict[str, _Line] = {}  # of sessions that are held
        self._names: dict[str, tuple[str, str | None]] = {}  # shown, stored
        self._known: dict[str, tuple[Any, Record]] = {}
        self._emptied: list[KeptTokens] = []
        self._files: dict[str, Path] = {}  # keys and values in other folders
        self._current = f"current:{weights}"
        if not read_only:
            self._expire()

    @classmethod
    def open(cls, folder: StrPath, weights: str) -> ChatStore:
        """Opens the database of a folder; makes both where there are none.
        Where nothing can be written, what is there can be read.

        Raises OSError or ValueError that names the folder.
        """
        try:
            return cls(Conversations.open(folder), weights)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            why = error.strerror
        there = os.path.exists(os.path.join(folder, FILE))
        database = Database(
            os.fspath(folder) if there else None, read_only=there
        )
        return cls(Conversations(database), weights, why)

    @property
    def takes_in(self) -> bool:
        """Whether `take_in` can be called: also of one in memory."""
        return not self._database.read_only

    @property
    def writable(self) -> bool:
        return not self._read_only

    @property
    def read_only(self) -> str:
        return self._read_only

    @property
    def where(self) -> str:
        return self._store.folder or "memory"

    def close(self) -> None:
        self._store.close()

    # Who may write.

    def hold(self, id: str, wait_s: float = 0) -> bool:
        if not self.writable:
            return False
        end = time.monotonic() + wait_s
        while True:
            try:
                self._store.leases.hold(id)
                return True
            except SessionBusy:
                if time.monotonic() >= end:
                    return False
            time.sleep(_POLL_S)

    def release(self, id: str) -> None:
        self._lines.pop(id, None)
        self._store.leases.let_go(id)

    def holder(self, id: str) -> str:
        return self._store.leases.holder(id) or "a server"

    # Sessions.

    def listing(self) -> Listing:
        """Those that cannot be read are left as they are."""
        listing = Listing([], [], set())
        known, self._known = self._known, {}
        query = select_sessions(TENANT).where(
            sa.or_(
                sessions.c.model == self._weights, sessions.c.model.is_(None)
            )
        )
        with self._database.read() as db:
            rows = db.execute(query.order_by(sessions.c.created)).mappings()
            for found in [session_of(row) for row in rows]:
                before = known.get(found.id)
                if before is None or before[0] != found:
                    try:
                        record = self._record(db, found)
                    except NewerRecord as error:
                        listing.taken.add(error.name)
                        listing.lines.append(
                            f"the stored session {error.name} is of a newer "
                            f"gemmakv ({error}); it is left as it is"
                        )
                        continue
                    except (GemmaKVError, ValueError, RecursionError) as error:
                        listing.lines.append(
                            f"the stored session {found.id} cannot be read "
                            f"({one_line(error)}); it is left as it is"
                        )
                        continue
                    if record is None:
                        continue
                    before = (found, record)
                self._known[found.id] = before
                listing.records.append(_copy(before[1]))
        return listing

    def read_record(self, id: str) -> Record | None:
        with self._database.read() as db:
            found = self._find(db, id)
            return None if found is None else self._record(db, found)

    def write_record(
        self, record: Record, state: SessionState | None = None
    ) -> None:
        """Has the database say what a session is now. With `state`, which is
        that of the record, its tokens, too. Requires: it is held.
        """
        if not self._store.leases.holds(record.id):
            raise StoreFailed(self._read_only or "the session is not held")
        with self._database.write() as db:
            line = self._write_in(db, record, state)
        self._lines[record.id] = line
        if state is not None:
            self._remove_keys(record.id)

    def _write_in(
        self, db: Connection, record: Record, state: SessionState | None
    ) -> _Line:
        """Does `write_record` inside a transaction; gives the turns."""
        found = self._find(db, record.id)
        if found is not None:
            before = self._line_of(db, record.id, found.head)
        else:
            before = _Line([], [])
            parent = self._find(db, record.parent) if record.parent else None
            if parent is not None:
                before = self._line_of(db, parent.id, parent.head)
        wanted = self._wanted(record, state)
        same = 0
        while same < min(len(before.said), len(wanted)) and before.said[
            same
        ].is_as(wanted[same], state is not None):
            same += 1
        line = _Line(before.ids[:same], before.said[:same])
        for said in wanted[same:]:
            turn = self._turn(record, said, line)
            insert_turn(db, turn, self._database.clock.now())
            line.ids.append(turn.id)
            line.said.append(said)
        head = line.ids[-1] if line.ids else None
        settings = {} if found is None else dict(found.settings)
        settings.update(_settings_of(record, state))
        session = SessionInfo(
            record.id,
            _sound(self._stored_name(record, found)),
            _sound(record.system),
            head,
            len(line.ids),
            record.created,
            record.changed,
            self._weights,
            settings,
            _sound(record.draft),
            record.parent,
        )
        if found is None:
            insert_session(db, TENANT, session)
            return line
        fields = dataclasses.asdict(session)
        del fields["turns"], fields["id"]
        is_it = sessions.c.id == record.id
        db.execute(sa.update(sessions).where(is_it).values(**fields))
        if found.head != head:
            prune(db, found.head)
        return line

    # Session files, as `from_store` takes them.

    def open_session(self, id: str) -> BinaryIO | None:
        """Gives the file of keys and values, or one that is made of the tokens
        in the database; None if there are neither.
        """
        path = self._key_path(id)
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                return open(path, "rb")
        with self._database.read() as db:
            found = self._find(db, id)
            if found is None:
                return None
            return _token_file(found, turns_up_to(db, found.head))

    def write_session(self, id: str, save: SaveTo) -> None:
        path = self._key_path(id)
        if path is not None:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with atomic_writer(path, private=True) as file:
                save(file)

    def _remove_keys(self, id: str) -> None:
        path = self._key_path(id)
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _key_path(self, id: str) -> Path | None:
        """Gives the file of a session's keys and values, which need not be
        there.
        """
        if self._store.folder is None:
            return self._files.get(id)
        return Path(self._store.folder, "keys", f"{id}.session")

    # Sessions from elsewhere.

    def take_in(
        self,
        found: Sequence[Taken],
        current: str | None = None,
    ) -> None:
        """Takes in sessions, parents before forks, that are not here yet: all
        of them, or none. `current`: the one that was opened last.
        """
        for one in found:
            if one.keys is not None:
                self._link_keys(one.record.id, one.keys)
        with self._database.write() as db:
            for one in found:
                id = one.record.id
                if self._has(db, id):
                    continue
                self._lines[id] = self._write_in(db, one.record, one.state)
                if one.deleted is not None:
                    self._put_away(db, id, one.deleted)
            if current is not None and fact(db, self._current) is None:
                set_fact(db, self._current, current.encode())
        self._lines.clear()

    def _link_keys(self, id: str, file: Path) -> None:
        """Has a file be that of the session's keys and values, too."""
        path = self._key_path(id)
        if path is None:
            self._files[id] = file
            return
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            os.link(file, path)
        except FileExistsError:
            pass
        except OSError:  # another disk, or one that has no links
            with (
                open(file, "rb") as source,
                atomic_writer(path, private=True) as target,
            ):
                shutil.copyfileobj(source, target)

    def _put_away(self, db: Connection, id: str, ago_s: float = 0.0) -> None:
        when = self._database.clock.now() - ago_s
        db.execute(
            sa.update(sessions)
            .where(sessions.c.id == id)
            .values(deleted=when, lease=None)
        )

    # The trash.

    def delete(self, id: str) -> None:
        if not self._store.leases.holds(id):
            raise StoreFailed(self._read_only or "the session is not held")
        with self._database.write() as db:
            self._put_away(db, id)

    def deleted(self) -> list[Record]:
        with self._database.read() as db:
            rows = db.execute(
                self._trash().order_by(sessions.c.deleted.desc())
            ).mappings()
            found = []
            for row in rows.all():
                with contextlib.suppress(
                    GemmaKVError, ValueError, RecursionError
                ):
                    found.append(self._record(db, session_of(row)))
        return [one for one in found if one is not None]

    def undelete(self, id: str) -> Record | None:
        if not self.hold(id):
            return None
        try:
            with self._database.write() as db:
                db.execute(
                    sa.update(sessions)
                    .where(sessions.c.id == id, sessions.c.tenant == TENANT)
                    .values(deleted=None)
                )
            return self.read_record(id)
        finally:
            self.release(id)

    def take_emptied(self) -> list[KeptTokens]:
        emptied, self._emptied = self._emptied, []
        return emptied

    def _trash(self) -> sa.Select[Any]:
        return (
            sa.select(*SESSION)
            .join_from(
                sessions, turns, turns.c.id == sessions.c.head, isouter=True
            )
            .where(
                sessions.c.tenant == TENANT,
                sessions.c.deleted.is_not(None),
                sessions.c.model == self._weights,
            )
        )

    def _expire(self) -> None:
        """Deletes what was in the trash for long enough."""
        oldest = self._database.clock.now() - _TRASH_S
        query = self._trash().where(sessions.c.deleted < oldest)
        with self._database.read() as db:
            if db.execute(query).first() is None:
                return
        gone = []
        with self._database.write() as db:
            for row in db.execute(query).mappings().all():
                found = session_of(row)
                file = _token_file(found, turns_up_to(db, found.head))
                if file is not None:
                    with contextlib.suppress(GemmaKVError):
                        kept = session_file.kept_tokens(file)
                        self._emptied += [] if kept is None else [kept]
                is_it = sessions.c.id == found.id
                db.execute(sa.delete(sessions).where(is_it))
                prune(db, found.head)
                gone.append(found.id)
        for id in gone:
            self._remove_keys(id)

    # The current one.

    @property
    def current_id(self) -> str | None:
        with self._database.read() as db:
            found = fact(db, self._current)
        return None if found is None else found.decode()

    def write_current(self, id: str) -> None:
        if self.writable and self.current_id != id:
            with self._database.write() as db:
                set_fact(db, self._current, id.encode())

    # Records and turns.

    def _find(self, db: Connection, id: str) -> SessionInfo | None:
        query = select_sessions(TENANT).where(sessions.c.id == id)
        row = db.execute(query).mappings().first()
        return None if row is None else session_of(row)

    def _has(self, db: Connection, id: str) -> bool:
        """Says whether a session is there, or in the trash."""
        query = sa.select(sessions.c.id).where(sessions.c.id == id)
        return db.execute(query).first() is not None

    def _line_of(self, db: Connection, id: str, head: str | None) -> _Line:
        known = self._lines.get(id)
        if known is not None and head == (known.ids[-1] if known.ids else None):
            return known
        line = _Line([], [])
        for turn in turns_up_to(db, head):
            said = _Said.of(turn)
            if said is None:  # what a chat says from here on is its own
                break
            line.ids.append(turn.id)
            line.said.append(said)
        return line

    def _record(self, db: Connection, found: SessionInfo) -> Record | None:
        """Gives the record of a session; None of one that is not for chats.
        Raises NewerRecord, CorruptFile, ValueError, RecursionError.
        """
        messages: list[Message] = []
        for turn in turns_up_to(db, found.head, tokens=False):
            said = _Said.of(turn)
            if said is None:
                return None
            messages += [said.user, said.reply]
        settings = found.settings
        shown = _shown(found.name, found.id)
        self._names[found.id] = shown, found.name
        try:
            options = options_from_json(settings.get("options", {}))
        except TypeError as error:
            raise NewerRecord(shown, f"options: {error}") from None
        except ValueError as error:
            raise CorruptFile(f"options: {error}") from None
        return Record(
            name=shown,
            id=found.id,
            parent=found.parent,
            forked_at=settings.get("forked_at", 0),
            created=found.created,
            changed=found.updated,
            system=found.system,
            messages=messages,
            draft=found.draft,
            options=options,
            overflow=settings.get("overflow", "error"),
            tokens=settings.get("tokens", 0),
            think=settings.get("think"),
        )

    def _stored_name(
        self, record: Record, found: SessionInfo | None
    ) -> str | None:
        """Gives a name as it is kept: one that is only shown otherwise stays.
        """
        shown, stored = self._names.get(record.id, ("", None))
        if found is not None and record.name == shown:
            return stored
        self._names[record.id] = record.name, record.name
        return record.name

    def _wanted(
        self, record: Record, state: SessionState | None
    ) -> list[_Said]:
        """Gives the turns that are to lead to the session's head."""
        pairs = list(zip(record.messages[::2], record.messages[1::2]))
        if state is None:
            return [_Said(*pair) for pair in pairs]
        text, ids, fingerprint = state
        ends = [*text.ends, *[None] * len(pairs)][: len(pairs)]
        if pairs and ends[-1] is None:
            ends[-1] = len(ids) or None  # it says the same, so far
        found: list[_Said] = []
        before: int | None = 0
        for pair, end in zip(pairs, ends):
            said = _Said(*pair, basis=_CACHE + fingerprint)
            if end is not None:
                # Those after a turn whose end is not known begin anew.
                begin = before or 0
                said = dataclasses.replace(
                    said, whole=not begin, tokens=ids[begin:end]
                )
            before = end
            found.append(said)
        return found

    def _turn(self, record: Record, said: _Said, line: _Line) -> Turn:
        """Makes the turn that comes after a line."""
        known = len(said.tokens) > 0
        return Turn(
            id=new_id("resp"),
            tenant=TENANT,
            parent=line.ids[-1] if line.ids else None,
            depth=len(line.ids) + 1,
            created=record.changed,
            system=_sound(record.system),
            tools=[],
            messages=[said.user.to_dict()],
            reply=said.reply.to_dict(),
            reason="cancelled" if said.reply.incomplete else "stop",
            usage={},
            params={} if record.think is None else {"think": record.think},
            basis=said.basis if known else "",
            whole=said.whole,
            tokens=said.tokens,
        )


def _settings_of(record: Record, state: SessionState | None) -> dict[str, Any]:
    """Gives what is kept of a session besides, as JSON has it."""
    found = {
        "options": options_to_json(record.options),
        "overflow": record.overflow,
        "think": record.think,
        "tokens": record.tokens,
        "forked_at": record.forked_at,
    }
    if state is not None:
        text = state.text
        found |= {
            "template": text.template,
            "capacity_tokens": text.capacity_tokens,
            "kv_dtype": text.kv_dtype,
            "saved_prefill_tokens": text.saved_prefill_tokens,
        }
    return found


def _token_file(found: SessionInfo, path: Sequence[Turn]) -> BinaryIO | None:
    """Makes a session file of the tokens that turns have; None if they have
    none of a chat.
    """
    settings = found.settings
    last = len(path)
    while last and not (
        path[last - 1].basis.startswith(_CACHE) and len(path[last - 1].tokens)
    ):
        last -= 1
    if not last or "template" not in settings:
        return None
    basis, first = path[last - 1].basis, last - 1
    while not path[first].whole:
        first -= 1
        if first < 0 or path[first].basis != basis:
            return None
    parts = [turn.tokens for turn in path[first:last]]
    messages: list[Message] = []
    for turn in path:
        said = _Said.of(turn)
        if said is None:
            return None
        messages += [said.user, said.reply]
    lengths = np.cumsum([len(part) for part in parts]).tolist()
    ends = [None] * first + lengths + [None] * (len(path) - last)
    text = SessionText(
        template=settings["template"],
        system=found.system,
        messages=messages,
        overflow=settings.get("overflow", "error"),
        options=settings.get("options", {}),
        capacity_tokens=settings["capacity_tokens"],
        kv_dtype=settings["kv_dtype"],
        saved_prefill_tokens=settings["saved_prefill_tokens"],
        ends=ends,
        think=settings.get("think"),
    )
    file = io.BytesIO()
    session_file.write_tokens(
        text, np.concatenate(parts), basis[len(_CACHE) :], file.write
    )
    file.seek(0)
    return file


def _shown(name: str | None, id: str) -> str:
    """Gives a name that can be typed, for one that may have any letters."""
    if name is None:
        return f"session-{id[-4:]}"
    kept = "".join(c if c.isprintable() and c != " " else "-" for c in name)
    kept = kept.strip(_QUOTES).lstrip("/")[:_MAX_NAME_CHARS]
    return kept or f"session-{id[-4:]}"


def _sound(text: str | None) -> str | None:
    """Gives a text without halves of pairs, which no database takes."""
    return text and text.encode("utf-8", "replace").decode()


def _copy(record: Record) -> Record:
    return dataclasses.replace(
        record, messages=[*record.messages], options={**record.options}
    )
