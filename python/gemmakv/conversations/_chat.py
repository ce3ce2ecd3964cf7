"""The sessions that chats with one model keep in the database.

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
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from gemmakv._support.files import StrPath, atomic_writer
from gemmakv.chat._messages import Message, messages_of
from gemmakv.chat._session_file import KeptTokens, SessionState
from gemmakv.chat._transcript import Ids, common_exact
from gemmakv.chat.store import Listing, NewerRecord, Record, SaveTo
from gemmakv.chat.store._records import Listed, options_of
from gemmakv.conversations._database import (
    CANNOT_WRITE,
    FILE,
    Database,
    fact,
    set_fact,
)
from gemmakv.conversations._errors import SessionBusy, StoreError, StoreFailed
from gemmakv.conversations._said import (
    Line,
    Said,
    digest_of,
    settings_of,
    shown_name,
    sound,
    state_of,
    turn_after,
    turns_of,
)
from gemmakv.conversations._store import Conversations
from gemmakv.conversations._tables import (
    FIRST_BYTES,
    SESSION,
    first_tokens,
    session_of,
    sessions,
    turns,
)
from gemmakv.conversations._tree import (
    find_session,
    insert_session,
    insert_turn,
    is_in_use,
    pass_on_forks,
    prune,
    select_sessions,
    turns_up_to,
    update_session,
)
from gemmakv.conversations._types import SessionInfo, bytes_of
from gemmakv.errors import CorruptFile, GemmaKVError, one_line

if TYPE_CHECKING:
    from gemmakv.conversations._tables import Query

TENANT = ""  # whom a server without keys serves
_UNREADABLE = (GemmaKVError, ValueError, TypeError, RecursionError)
_TRASH_S = 30 * 86400.0


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


class ChatStore:
    """Sessions of chats with one model, and those that a server made with it.

    Calls raise OSError or StoreError.

    Attributes:
      read_only: why nothing can be kept; "" if it can.
      where: the place, for people.
    """

    def __init__(
        self, store: Conversations, weights: str, read_only: str = ""
    ) -> None:
        """`weights`: the fingerprint of the model's, for every arithmetic."""
        self.read_only = read_only
        self.where = store.folder or "memory"
        self._store = store
        self._database = store.database
        self._weights = weights
        # Of sessions that are held, as they were written last.
        self._lines: dict[str, Line] = {}
        self._files: dict[str, Path] = {}  # keys and values in other folders
        self._current = f"current:{weights}"

    @classmethod
    def open(cls, folder: StrPath, weights: str) -> ChatStore:
        """Opens the database of a folder; makes both where there are none.
        Where nothing can be written, what is there can be read.

        Raises OSError or ValueError that names the folder.
        """
        try:
            # How long responses are kept is for their server to say.
            store = cls(Conversations.open(folder, math.inf), weights)
            store._sweep_keys()
            return store
        except OSError as error:
            if error.errno not in CANNOT_WRITE:
                raise
            why = os.strerror(error.errno)
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
        return not self.read_only

    def close(self) -> None:
        self._store.close()

    # Who may write.

    def hold(self, id: str) -> bool:
        if not self.writable:
            return False
        try:
            self._store.leases.hold(id)
        except SessionBusy:
            return False
        return True

    def release(self, id: str) -> None:
        self._lines.pop(id, None)
        self._store.leases.let_go(id)

    def holder(self, id: str) -> str:
        """Says which process has a session open, for people; "" where a
        server runs a turn in it.
        """
        return self._store.leases.holder(id)

    # Sessions.

    def listing(self) -> Listing:
        """Those that cannot be read are left as they are."""
        query = self._listed(deleted=False).order_by(sessions.c.created)
        listing = Listing([], [], set())
        with self._database.read() as db:
            rows = db.execute(query).mappings().all()
        for row in rows:
            try:
                listing.records.append(_listed_of(row))
            except NewerRecord as error:
                listing.taken.add(error.name)
                listing.lines.append(
                    f"the stored session {error.name} is of a newer gemmakv "
                    f"({error}); it is left as it is"
                )
            except _UNREADABLE as error:
                listing.lines.append(
                    f"the stored session {row['id']} cannot be read "
                    f"({one_line(error)}); it is left as it is"
                )
        return listing

    def version(self) -> object:
        """Gives what differs when the database has changed."""
        return self._database.version()

    def read_record(self, id: str) -> Record | None:
        """Gives a session; None if it is not there, or not for chats. Raises
        CorruptFile, NewerRecord.
        """
        with self._database.read() as db:
            found = find_session(db, TENANT, id)
            try:
                return None if found is None else self._record(db, found)
            except (ValueError, TypeError, RecursionError) as error:
                raise CorruptFile(one_line(error)) from None

    def write_record(
        self, record: Record, state: SessionState | None = None
    ) -> None:
        """Has the database say what a session is now. With `state`, which is
        that of the record, its tokens, too. Requires: it is held.
        """
        if isinstance(record, Listed):
            raise TypeError("a listed record is without its messages")
        if not self._store.leases.holds(record.id):
            raise StoreFailed(self.read_only or "the session is not held")
        with self._database.write() as db:
            line = self._write_in(db, record, state)
        self._lines[record.id] = line
        if state is not None:
            self._remove_keys(record.id)

    def _write_in(
        self, db: Connection, record: Record, state: SessionState | None
    ) -> Line:
        """Does `write_record` inside a transaction; gives the turns."""
        found = find_session(db, TENANT, record.id)
        if found is not None:
            before = self._line_of(db, record.id, found.head)
        else:
            before = Line([], [])
            parent = find_session(db, TENANT, record.parent or "")
            if parent is not None:
                before = self._line_of(db, parent.id, parent.head)
        wanted = turns_of(record, state)
        same = 0
        for said, other in zip(before.said, wanted):
            if not said.is_as(other, state is not None):
                break
            same += 1
        line = Line(before.ids[:same], before.said[:same])
        for said in wanted[same:]:
            turn = turn_after(line, said, record, TENANT)
            follows = None
            if state is not None and len(said.tokens):
                follows = digest_of(
                    state.kept.kv_dtype, line.tokens_before(said)
                )
            insert_turn(db, turn, self._database.clock.now(), follows)
            line.ids.append(turn.id)
            line.said.append(said)
        head = line.ids[-1] if line.ids else None
        settings, source = settings_of(record, state), record.parent
        if found is not None:
            # Who deletes the parent gives it another one.
            at = found.settings.get("forked_at", 0)
            settings = found.settings | settings | {"forked_at": at}
            source = found.parent
        session = SessionInfo(
            record.id,
            sound(_stored_name(record, found)),
            sound(record.system),
            head,
            len(line.ids),
            record.created,
            record.changed,
            self._weights,
            settings,
            sound(record.draft),
            source,
        )
        if found is None:
            insert_session(db, TENANT, session)
            return line
        fields = dataclasses.asdict(session)
        del fields["turns"], fields["id"]
        del fields["metadata"], fields["pending"]  # no chat knows them
        update_session(db, record.id, **fields)
        if found.head != head:
            prune(db, found.head)
        return line

    # What caches held, as `from_store` takes it.

    def read_state(self, id: str) -> SessionState | None:
        """Gives what a session was, with the tokens of its cache; None if
        these are not kept.
        """
        with self._database.read() as db:
            found = find_session(db, TENANT, id)
            if found is None:
                return None
            return state_of(found, turns_up_to(db, found.head))

    def open_session(self, id: str) -> BinaryIO | None:
        """Gives the file of keys and values; None if there is none."""
        path = self._key_path(id)
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                return open(path, "rb")
        return None

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

    def _sweep_keys(self) -> None:
        """Removes files of keys and values that no session has any more: a
        server deletes sessions, and leaves these. Whatever writes one has
        stored its session before.
        """
        with contextlib.suppress(OSError, StoreError):  # a later start does it
            files = list(Path(self.where, "keys").glob("*.session"))
            if not files:
                return
            with self._database.read() as db:
                known = set(db.execute(sa.select(sessions.c.id)).scalars())
            for file in files:
                if file.stem not in known:
                    file.unlink(missing_ok=True)

    def _key_path(self, id: str) -> Path | None:
        """Gives the file of a session's keys and values, which need not be
        there.
        """
        if self._store.folder is None:
            return self._files.get(id)
        return Path(self._store.folder, "keys", f"{id}.session")

    # Sessions from elsewhere.

    def take_in(self, one: Taken) -> None:
        """Takes in a session that is not here yet; what it was forked from has
        to come before.
        """
        id = one.record.id
        with self._database.write() as db:
            if not self._has(db, id):
                self._write_in(db, one.record, one.state)
                if one.deleted is not None:
                    self._put_away(db, id, one.deleted)
        if one.keys is not None and self.read_state(id) is None:
            self._link_keys(id, one.keys)

    def take_in_current(self, id: str) -> None:
        """Notes the session that was opened last elsewhere, if none is."""
        with self._database.write() as db:
            if fact(db, self._current) is None:
                set_fact(db, self._current, id.encode())

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
        update_session(db, id, deleted=when, lease=None)

    # The trash.

    def delete(self, id: str) -> None:
        if not self._store.leases.holds(id):
            raise StoreFailed(self.read_only or "the session is not held")
        with self._database.write() as db:
            found = find_session(db, TENANT, id)
            if found is not None:
                pass_on_forks(db, found)
                self._put_away(db, id)

    def deleted(self) -> list[Record]:
        query = self._listed(deleted=True).order_by(sessions.c.deleted.desc())
        found: list[Record] = []
        with self._database.read() as db:
            rows = db.execute(query).mappings().all()
        for row in rows:
            with contextlib.suppress(*_UNREADABLE):
                found.append(_listed_of(row))
        return found

    def undelete(self, id: str) -> Record | None:
        if not self.hold(id):
            return None
        try:
            with self._database.write() as db:
                update_session(db, id, deleted=None)
            return self.read_record(id)
        finally:
            self.release(id)

    def _trash(self) -> Query:
        return select_sessions(TENANT, deleted=True).where(self._is_ours())

    def _is_ours(self) -> sa.ColumnElement[bool]:
        """Those of a time that noted no model are every model's."""
        model = sessions.c.model
        return sa.or_(model == self._weights, model.is_(None))

    def empty_trash(self) -> list[KeptTokens]:
        """Deletes what was in the trash for long enough; gives the tokens of
        that.
        """
        oldest = self._database.clock.now() - _TRASH_S
        query = self._trash().where(sessions.c.deleted < oldest)
        with self._database.read() as db:
            if self.read_only or db.execute(query).first() is None:
                return []
        gone = []
        with self._database.write() as db:
            for row in db.execute(query).mappings().all():
                found = session_of(row)
                state = state_of(found, turns_up_to(db, found.head))
                pass_on_forks(db, found)
                is_it = sessions.c.id == found.id
                db.execute(sa.delete(sessions).where(is_it))
                prune(db, found.head)
                gone.append((found.id, state))
        for id, _ in gone:
            self._remove_keys(id)
        return [state.kept for _, state in gone if state is not None]

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

    def _has(self, db: Connection, id: str) -> bool:
        """Says whether a session is there, or in the trash."""
        query = sa.select(sessions.c.id).where(sessions.c.id == id)
        return db.execute(query).first() is not None

    def _line_of(self, db: Connection, id: str, head: str | None) -> Line:
        known = self._lines.get(id)
        if known is not None and head == (known.ids[-1] if known.ids else None):
            return known
        line = Line([], [])
        for turn in turns_up_to(db, head):
            said = Said.of(turn)
            if said is None:  # what a chat says from here on is its own
                break
            line.ids.append(turn.id)
            line.said.append(said)
        return line

    def _record(self, db: Connection, found: SessionInfo) -> Record | None:
        """Gives the record of a session; None of one that is not for chats.
        Raises _UNREADABLE.
        """
        messages: list[Message] = []
        for turn in turns_up_to(db, found.head, tokens=False):
            said = Said.of(turn)
            if said is None:
                return None
            messages += [said.user, said.reply]
        return Record(**_fields_of(found), messages=messages)

    def _listed(self, deleted: bool) -> Query:
        """Gives the query for sessions that are for chats, with what is said
        last in them, as it is stored.
        """
        last = sa.type_coerce(turns.c.messages, sa.Text).label("last")
        # Where nobody can tell, whoever opens it says so.
        is_for_chats = turns.c.plain.is_distinct_from(
            sa.literal(False, turns.c.plain.type)
        )
        query = select_sessions(TENANT, deleted).add_columns(last)
        return query.where(self._is_ours(), is_for_chats)

    # Tokens of others.

    def shared(self, gone: KeptTokens) -> KeptTokens:
        """Gives of these tokens those with which a session here begins, too:
        as many as the one that has the most.

        In the order of tokens the ones before and after some have the most in
        common with them. So two are looked at for each turn, however many
        there are.
        """
        most, is_here = 0, sessions.c.deleted.is_(None)
        with self._database.read() as db:
            for begin in {0, *gone.ends}:
                follows = digest_of(gone.kv_dtype, gone.ids[:begin])
                rest = gone.ids[begin:]
                for query in _neighbours(follows, rest):
                    for id, tokens in db.execute(query):
                        same = begin + common_exact(tokens, rest)
                        if same <= most:
                            break
                        if is_in_use(db, id, is_here, self._is_ours()):
                            most = same
                            break
        return KeptTokens(gone.kv_dtype, gone.ids[:most])


def _neighbours(follows: bytes, rest: Ids) -> Iterator[Query]:
    """Gives the queries for turns whose tokens follow the same ones as these,
    those next to them first.
    """
    own = sa.literal(rest, turns.c.tokens.type)
    first = bytes_of(rest)[:FIRST_BYTES]
    query = sa.select(turns.c.id, turns.c.tokens)
    query = query.where(turns.c.follows == follows)
    yield query.where(first_tokens <= first, turns.c.tokens <= own).order_by(
        first_tokens.desc(), turns.c.tokens.desc()
    )
    yield query.where(first_tokens >= first, turns.c.tokens > own).order_by(
        first_tokens, turns.c.tokens
    )


def _listed_of(row: RowMapping) -> Listed:
    """Gives the record of a row of a listing. Raises _UNREADABLE."""
    found = session_of({column.name: row[column.name] for column in SESSION})
    last = ""
    if row["last"] is not None:
        last = messages_of(json.loads(row["last"]))[-1].text
    return Listed(
        **_fields_of(found), turn_count=found.turns, said_last=last
    )


def _fields_of(found: SessionInfo) -> dict[str, Any]:
    """Gives the fields of a session's record without its messages."""
    settings = found.settings
    shown = shown_name(found.name, found.id)
    return {
        "name": shown,
        "id": found.id,
        "parent": found.parent,
        "forked_at": settings.get("forked_at", 0),
        "created": found.created,
        "changed": found.updated,
        "system": found.system,
        "draft": found.draft,
        "options": options_of(settings.get("options", {}), shown),
        "overflow": settings.get("overflow", "error"),
        "tokens": settings.get("tokens", 0),
        "think": settings.get("think"),
    }


def _stored_name(record: Record, found: SessionInfo | None) -> str | None:
    """Gives a name as it is kept: one that is only shown otherwise stays."""
    if found is None or record.name != shown_name(found.name, found.id):
        return record.name
    return found.name
