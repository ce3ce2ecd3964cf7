"""The conversations of a running chat: what commands and loops work on."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import gemmakv
from gemmakv.chat._session import Session
from gemmakv.chat._session_file import KeptTokens
from gemmakv.chat._templates import knows_thinking
from gemmakv.chat._transcript import common_exact
from gemmakv.chat.store import (
    Listing,
    Record,
    Saver,
    forget,
    from_store,
    keeps_keys,
)
from gemmakv.cli import describe
from gemmakv.cli.chat import table
from gemmakv.cli.chat.book import FIRST_NAME, Book, Entry
from gemmakv.cli.chat.settings import SETTINGS, Setting, show
from gemmakv.conversations import StoreError
from gemmakv.errors import CorruptFile, GemmaKVError, MismatchError
from gemmakv.generation._requests import requests_of
from gemmakv.options import GenerationOptions

if TYPE_CHECKING:
    from gemmakv.chat._session_file import SessionState
    from gemmakv.cli.chat.view import View
    from gemmakv.conversations._chat import ChatStore


_UNSAVED = (OSError, StoreError)  # why something is not on disk
# The end of a reply, which is taken off, may have so many tokens.
_TRIMMED = 16


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What new sessions begin with. None: what `Session` takes by itself."""

    system: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    overflow: str | None = None
    template: str | None = None
    capacity_tokens: int | None = None
    kv_dtype: str | None = None
    think: bool | None = None


class Chat:
    """Sessions of one model, with the store that keeps them (or None).

    Every change of a session goes through `save`: its text is on disk when
    that returns. So are its tokens, where the prefix cache keeps the KV cache
    for later starts, and sessions other than the current one are not in
    memory. Where it does not, the KV cache follows a moment later.
    """

    def __init__(
        self,
        gemma: gemmakv.Gemma,
        view: View,
        defaults: Defaults,
        store: ChatStore | None,
    ) -> None:
        self.gemma = gemma
        self.view = view
        self.defaults = defaults
        self.store = store
        self._saver: Saver | None = None
        # Why the records of these sessions are not on disk.
        self.unsaved: dict[str, str] = {}
        self._version: object = None  # of what is in the book
        self._unread = ""  # why what is stored could not be read
        self.book = Book()
        if store is not None:
            listing = store.listing()
            for line in listing.lines:
                view.error(line)
            if store.writable:
                self._saver = Saver(store)
            self.book = Book(listing.records, listing.taken)
            with contextlib.suppress(StoreError):  # a later start does it
                for gone in store.empty_trash():
                    self._forget_keys(gone)

    def open(self, name: str | None) -> None:
        """Goes to the named session, else to the last one, or makes it."""
        entry = None
        if name is not None:
            named = [e for e in self.book.entries if e.name == name]
            entry = named[0] if named else None
        elif self.store is not None:
            entry = self.book.with_id(self.store.current_id)
            recent = sorted(self.book.entries, key=lambda e: e.record.changed)
            candidates = [entry] if entry is not None else []
            candidates += reversed(recent)
            entry = next(filter(self.may_open, candidates), None)
            if entry is None and candidates:
                self.view.say(
                    "other chats have the stored sessions open; this is a "
                    "new one"
                )
        if entry is None:
            self.start(name)
            return
        session = self.session(entry)
        self._apply_defaults(entry, session)
        self.select(entry)

    def start(self, name: str | None) -> Entry:
        """A new, empty session, which becomes current."""
        if name is None:
            name = self.book.unused_name(FIRST_NAME)
        record = Record(self.book.check_new_name(name))
        return self.adopt(Entry(record, self.make_session()))

    def make_session(self) -> Session:
        defaults = self.defaults
        session = Session(
            self.gemma,
            defaults.system,
            defaults.overflow or "error",  # type: ignore[arg-type]
            template=defaults.template,
            capacity_tokens=defaults.capacity_tokens,
            kv_dtype=defaults.kv_dtype or "bf16",  # type: ignore[arg-type]
            options=defaults.options,
        )
        _set_think(session, defaults.think)
        return session

    def adopt(self, entry: Entry) -> Entry:
        """Takes in an entry that has its session; makes it current."""
        self.book.add(entry)
        self.save(entry)
        self.select(entry)
        return entry

    def session(self, entry: Entry | None = None) -> Session:
        """The live session of an entry, brought back from disk if need be."""
        if entry is None:
            entry = self.book.current
        if entry.session is None:
            kept: BinaryIO | SessionState | OSError | None = None
            store = self.store
            if store is not None:
                self._hold(entry)
                try:
                    kept = store.open_session(entry.id)
                    kept = kept or store.read_state(entry.id)
                except OSError as error:
                    kept = error
                except StoreError as error:
                    kept = OSError(str(error))
            entry.session, line = from_store(
                self.gemma, entry.record, kept, self.make_session
            )
            if line:
                self.view.say(f"{entry.name}: {line}")
            entry.kept = _tokens_of(entry.session)
            if self._lacks_draft(entry.session.options):
                del entry.session.options["speculate"]
                self.view.say(
                    f"{entry.name}: speculate was draft, and this chat has no "
                    "--draft; it is none now"
                )
            if entry.record.draft is not None:
                self.view.say(
                    f"{entry.name}: your last message has no reply; send it "
                    f"again if you like: {entry.record.draft}"
                )
        return entry.session

    def may_open(self, entry: Entry) -> bool:
        """Whether it is, or becomes, this chat's to write."""
        try:
            self._hold(entry)
        except ValueError:
            return False
        return True

    def _hold(self, entry: Entry) -> None:
        """Makes the entry this chat's, as it is now. Raises ValueError if it
        is open in another chat, or there is none any more that is for chats.
        """
        store = self.store
        if store is None or entry.held:
            return
        if not store.writable:
            if entry.session is None:
                self._read_in(entry)
            return
        if not store.hold(entry.id):
            holder = store.holder(entry.id)
            if not holder:
                raise ValueError(
                    f"{entry.name} gets a reply from a server at the moment; "
                    "try again when it has ended"
                )
            raise ValueError(
                f"{entry.name} is open in another gemmakv chat ({holder}); "
                "close it there first"
            )
        entry.held = True
        try:
            self._read_in(entry)
        except BaseException:
            self._release(entry)
            raise

    def _read_in(self, entry: Entry) -> None:
        """Makes the entry what is stored of it. Raises ValueError."""
        record = None
        if self.store is not None:
            try:
                record = self.store.read_record(entry.id)
            except (CorruptFile, MismatchError) as error:
                raise ValueError(
                    f"{entry.name} cannot be read ({error}); it is left as it "
                    "is"
                ) from None
        if record is not None:
            if record.name != entry.record.name:  # renamed elsewhere
                entry.label = self.book.unused_name(record.name)
            entry.record = record
        elif entry.session is None:  # one that is new has its session
            raise ValueError(
                f"{entry.name} was deleted elsewhere, or a server goes on "
                "with it in ways that a chat has not; /list shows what is there"
            )

    def refresh(self) -> None:
        """Takes in what other chats have made, changed or deleted."""
        listing = self._listing()
        if listing is not None:
            self.book.update(listing.records, listing.taken)

    def _listing(self) -> Listing | None:
        """Reads what is stored; gives None where it is as it was, or cannot
        be read, which is said once.
        """
        if self.store is None:
            return None
        try:
            version = self.store.version()
            if version == self._version:
                return None
            listing = self.store.listing()
        except _UNSAVED as error:
            self._say_unread(error)
            return None
        self._unread, self._version = "", version
        return listing

    def _say_unread(self, error: Exception) -> None:
        if self._unread != str(error):
            self._unread = str(error)
            self.view.error(
                f"the stored sessions cannot be read: {describe(error)}; "
                "the chat continues, /save PATH keeps the session elsewhere"
            )

    def select(self, entry: Entry) -> None:
        self.book.select(entry)
        for other in self.book.entries:
            if other is not entry and other.session is not None:
                self._rest(other.session)
        if self.store is not None:
            # Without it the next start opens another session first.
            with contextlib.suppress(*_UNSAVED):
                self.store.write_current(entry.id)

    def _rest(self, session: Session) -> None:
        """Has a session leave memory if it comes back from a disk."""
        if session.in_memory and keeps_keys(session):
            session._leave_memory()

    def save(self, entry: Entry) -> None:
        """Notes what the session is now, on disk too.

        Never raises for a disk that fails: says so, and the chat goes on.
        """
        session = self.session(entry)
        record = entry.record
        record.system = session.system
        messages = [m for m in session.messages if m.role != "system"]
        if messages != record.messages:
            record.draft = None
        record.messages = messages
        record.options = dict(session.options)
        record.overflow = session.overflow
        record.think = session.think
        record.tokens = session._count_tokens()
        record.changed = time.time()
        if self._saver is None:
            return
        if not keeps_keys(session):
            if self.save_record(entry):
                self._saver.submit(entry.id, session._saving())
            return
        if not self.save_record(entry, session._published()):
            return
        before, entry.kept = entry.kept, _tokens_of(session)
        if before is None:
            return
        same = common_exact(before.ids, entry.kept.ids)
        if len(before.ids) - same > _TRIMMED:  # it was taken back
            self._forget_keys(before)

    def _forget_keys(self, gone: KeptTokens) -> None:
        """Removes keys and values that no session here uses any more."""
        others = [entry.kept for entry in self.book.entries]
        if self.store is not None:
            try:
                others.append(self.store.shared(gone))
            except _UNSAVED as error:  # nobody can tell what others use
                self._say_unread(error)
                return
        forget(self.gemma, gone, filter(None, others))

    def _kept_tokens(self, id: str) -> KeptTokens | None:
        state = None
        if self.store is not None:
            with contextlib.suppress(GemmaKVError):  # nobody can tell
                state = self.store.read_state(id)
        return None if state is None else state.kept

    def save_record(
        self, entry: Entry, state: SessionState | None = None
    ) -> bool:
        """Whether the record is on disk (or need not be), with its tokens if
        there is a `state`.
        """
        if self.store is None or not self.store.writable:
            return True
        try:
            self._hold(entry)
            self.store.write_record(entry.record, state)
        except _UNSAVED as error:
            self._say_unsaved(entry.name, error, self.unsaved.get(entry.id))
            self.unsaved[entry.id] = str(error)
            return False
        self.unsaved.pop(entry.id, None)
        return True

    def save_draft(self, entry: Entry, text: str) -> None:
        """Has what is said next outlive this process, whatever the reply."""
        self.unsaved.pop(entry.id, None)  # said once for each message
        entry.record.draft = text
        self.save_record(entry)

    def drop_draft(self, entry: Entry) -> None:
        """A reply failed, and whoever said the message knows."""
        if self.session(entry).turns != entry.record.turns:
            self.save(entry)
        else:
            entry.record.draft = None
            self.save_record(entry)

    def check_deletable(self, entry: Entry) -> None:
        """Raises ValueError if the entry cannot be deleted, or would only seem
        to be.
        """
        store = self.store
        if store is None:
            return
        if store.writable:
            self._hold(entry)
            return
        if store.read_record(entry.id) is not None:
            raise ValueError(
                f"{entry.name} is stored where nothing can be written "
                f"({store.read_only}), so it cannot be deleted"
            )

    def let_go(self, entry: Entry) -> None:
        """Other chats may open it again, unless it is open here."""
        if entry.session is None:
            self._release(entry)

    def forget(self, entry: Entry) -> None:
        """Deletes an entry, on disk too; `bring_back` undoes it."""
        self._hold(entry)
        self.book.remove(entry)
        self.unsaved.pop(entry.id, None)
        if self._saver is not None:
            self._saver.drop(entry.id)
        if self.store is not None and self.store.writable:
            gone = entry.kept or self._kept_tokens(entry.id)
            self.store.delete(entry.id)
            self._release(entry)
            if gone is not None:
                self._forget_keys(gone)

    def bring_back(self) -> Entry:
        """The entry that was deleted last. Raises ValueError if none is."""
        store = self.store
        for record in [] if store is None else store.deleted():
            if store is not None and store.undelete(record.id) is not None:
                label = self.book.unused_name(record.name)
                return self.book.add(Entry(record, label=label))
        raise ValueError("no deleted session is kept")

    def _release(self, entry: Entry) -> None:
        if self.store is not None and entry.held:
            self.store.release(entry.id)
            entry.held = False

    def report_failures(self) -> None:
        """Says what could not be written since the last call."""
        if self._saver is None:
            return
        for id, error in self._saver.take_failures().items():
            entry = self.book.with_id(id)
            if entry is not None:
                self._say_unsaved(f"the KV cache of {entry.name}", error)

    def unstored(self) -> list[str]:
        """Names of sessions whose text is not on disk, tried once more."""
        return [
            entry.name
            for entry in self.book.entries
            if (entry.record.messages or entry.record.draft)
            and not self._is_stored(entry)
        ]

    def _is_stored(self, entry: Entry) -> bool:
        if self.store is None or not self.store.writable:
            if entry.session is None:
                return True
            stored = None
            if self.store is not None:
                with contextlib.suppress(*_UNSAVED):
                    stored = self.store.read_record(entry.id)
            return stored is not None and (
                stored.messages == entry.record.messages
            )
        return entry.id not in self.unsaved or self.save_record(entry)

    def close(self) -> None:
        """Writes what is still to be written and lets go of the store."""
        if self._saver is not None:
            self._saver.close()
            self.report_failures()
        if self.store is not None:
            self.store.close()

    def show_where(self) -> None:
        """One line on the current session, and its last turn."""
        entry = self.book.current
        session = self.session(entry)
        if session.turns:
            turns = table.count(session.turns, "turn")
            tokens = table.count(entry.record.tokens, "token")
            self.view.say(f"{entry.name}: {turns}, {tokens}")
        else:
            self.view.say(f"{entry.name}: nothing said yet")
        self.show_last_turn()

    def show_last_turn(self) -> None:
        messages = self.session().messages
        starts = [i for i, m in enumerate(messages) if m.role == "user"]
        if starts:
            self.view.show_turn(
                [(m.role, m.text) for m in messages[starts[-1] :]]
            )

    def show_settings(self, session: Session) -> None:
        rows = []
        for setting in SETTINGS.values():
            value = show(self.setting_value(session, setting))
            rows.append((f"{setting.name} = {value}", setting.help))
        self.view.show(table.pairs(rows))
        self.view.show(table.note("/set KEY VALUE changes one"))

    def setting_value(self, session: Session, setting: Setting) -> object:
        if setting.name == "overflow":
            return session.overflow
        if setting.name == "think":
            return session.think
        default = setting.default_for(self.gemma)
        return session.options.get(setting.name, default)

    def apply_setting(
        self, session: Session, setting: Setting, value: object
    ) -> None:
        """Changes a setting; None goes back to its default."""
        if setting.name == "overflow":
            session.overflow = str(value or setting.default)
        elif setting.name == "think":
            _set_think(session, None if value is None else bool(value))
        elif value is None:
            session.options.pop(setting.name, None)
        else:
            self.check_option(setting.name, value)
            session.options[setting.name] = value

    def check_option(self, name: str, value: Any) -> None:
        """Raises the ValueError that a reply with this option would raise."""
        GenerationOptions.check({name: value}, self.gemma.config.vocab_size)
        if self._lacks_draft({name: value}):
            raise ValueError(
                "speculate: expected a chat with --draft for 'draft', found "
                "none"
            )

    def _lacks_draft(self, options: Mapping[str, Any]) -> bool:
        """Whether a draft is to guess, and there is none."""
        has_draft = requests_of(self.gemma).has_draft
        return options.get("speculate") == "draft" and not has_draft

    def _apply_defaults(self, entry: Entry, session: Session) -> None:
        """What the command line asks for, on a session that exists."""
        wanted = self.defaults
        before = _settings_of(session)
        session.options.update(wanted.options)
        if wanted.overflow is not None:
            session.overflow = wanted.overflow
        if wanted.system is not None and wanted.system != session.system:
            session.system = wanted.system
        if wanted.think is not None and wanted.think != session.think:
            _set_think(session, wanted.think)
        fixed = {
            "template": (wanted.template, session.template.name),
            "capacity_tokens": (
                wanted.capacity_tokens,
                session.cache.capacity_tokens,
            ),
            "kv_dtype": (wanted.kv_dtype, session.cache.kv_dtype),
        }
        for name, (asked, has) in fixed.items():
            if asked is not None and asked != has:
                self.view.say(
                    f"{entry.name} keeps its {name} {has}; /new starts a "
                    f"session with {asked}"
                )
        if before != _settings_of(session):
            self.save(entry)

    def _say_unsaved(
        self, what: str, error: Exception, said: str | None = None
    ) -> None:
        if said == str(error):
            return
        self.view.error(
            f"{what} is not saved: {describe(error)}; the chat continues, "
            "/save PATH keeps the session elsewhere"
        )


def _set_think(session: Session, think: bool | None) -> None:
    """Raises ValueError in words of a chat where the model cannot."""
    if think and not knows_thinking(session.template):
        raise ValueError(
            "think: expected a model that can think before it replies, found "
            f"one whose template, {session.template.name}, has no thoughts"
        )
    session.think = think


def _settings_of(session: Session) -> tuple[object, ...]:
    return (
        dict(session.options),
        session.overflow,
        session.system,
        session.think,
    )


def _tokens_of(session: Session) -> KeptTokens:
    ends = tuple(end for end in session._talk.ends if end is not None)
    return KeptTokens(session.cache.kv_dtype, session.cache.tokens, ends)
