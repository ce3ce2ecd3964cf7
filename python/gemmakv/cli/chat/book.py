"""The conversations of a chat: names, ancestry and which one is current."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gemmakv.chat.store import Record
from gemmakv.conversations._said import MAX_NAME_CHARS, QUOTES

if TYPE_CHECKING:
    from gemmakv.chat._session import Session
    from gemmakv.chat._session_file import KeptTokens
    from gemmakv.generation._result import Usage

FIRST_NAME = "main"


def check_form(name: str) -> None:
    """Raises ValueError for what is no name, whatever the book."""
    if any(c.isspace() for c in name):
        raise ValueError(
            f"{name!r} is no name: expected letters without spaces"
        )
    if not name.isprintable():
        raise ValueError(f"{name!r} is no name: expected letters that show")
    if name[:1] in QUOTES or name[-1:] in QUOTES:
        raise ValueError(
            f"{name} is no name: expected letters without quotes around them"
        )
    if not 0 < len(name) <= MAX_NAME_CHARS or name.startswith("/"):
        raise ValueError(
            f"{name!r} is no name: expected 1 to {MAX_NAME_CHARS} letters, "
            "the first not /"
        )


@dataclasses.dataclass(frozen=True)
class Turn:
    """What the last turn of a session took; `again` are tokens that the
    session had, and that had to be computed again.
    """

    usage: Usage
    again: int


@dataclasses.dataclass(eq=False)
class Entry:
    """A conversation: its record, and its session once it is needed.

    Attributes:
      label: what it is called here: the record's name, unless another one has
        that; "" if it is that.
    """

    record: Record
    session: Session | None = None
    held: bool = False  # nobody else may write it
    last_fork_us: float | None = None
    kept: KeptTokens | None = None  # as they were stored, or loaded
    last: Turn | None = None
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or self.record.name

    @property
    def id(self) -> str:
        return self.record.id


class Book:
    """Entries in the order in which they were made; one is current.

    Names of entries are unique: the second record of a name is called NAME-2
    here, and keeps its name in the store. A parent that is gone is replaced by
    its own parent, so that ancestry always leads to entries of the book.
    """

    def __init__(
        self, records: Iterable[Record] = (), taken: Iterable[str] = ()
    ) -> None:
        """`taken`: names that no entry may have."""
        self.entries: list[Entry] = []
        self._current: Entry | None = None
        self.update(records, taken)

    def update(self, records: Iterable[Record], taken: Iterable[str]) -> None:
        """Makes of `records` all entries that this chat does not hold."""
        self._taken = set(taken)
        found = {record.id: record for record in records}
        known = {entry.id: entry for entry in self.entries}
        self.entries = [
            entry
            for entry in self.entries
            if entry.held or entry.session is not None
        ]
        for entry in self.entries:
            record = found.pop(entry.id, entry.record)
            entry.record.parent = record.parent
            entry.record.forked_at = record.forked_at
        names = {entry.name for entry in self.entries} | self._taken
        for record in sorted(found.values(), key=lambda one: one.created):
            entry = known.get(record.id, Entry(record))
            entry.record = record
            entry.label = _unused_name(record.name, names)
            names.add(entry.label)
            self.entries.append(entry)
        self.entries.sort(key=lambda entry: entry.record.created)
        ids = {entry.id for entry in self.entries}
        for entry in self.entries:
            if entry.record.parent not in ids:
                entry.record.parent = None

    @property
    def current(self) -> Entry:
        if self._current is None:
            raise LookupError("the book has no current entry yet")
        return self._current

    def select(self, entry: Entry) -> None:
        self._current = entry

    def add(self, entry: Entry) -> Entry:
        self.entries.append(entry)
        return entry

    def with_id(self, wanted: str | None) -> Entry | None:
        return next((e for e in self.entries if e.id == wanted), None)

    def find(self, name: str) -> Entry:
        """The entry of that name, or the only one that begins with it."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        found = [e for e in self.entries if e.name.startswith(name)]
        if len(found) == 1:
            return found[0]
        names = [entry.name for entry in self.entries]
        if found:
            several = ", ".join(entry.name for entry in found)
            raise ValueError(f"{name!r} could be {several}; type more of it")
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}?" if near else "/list shows them all"
        raise ValueError(f"no session is named {name!r}; {hint}")

    def check_new_name(self, name: str) -> str:
        """`name` if an entry may take it; ValueError if not."""
        check_form(name)
        if name in self._taken:
            raise ValueError(
                f"there is a session {name!r} of a newer gemmakv already; "
                "choose another name"
            )
        if any(entry.name == name for entry in self.entries):
            raise ValueError(
                f"there is a session {name!r} already; choose another name, "
                f"or /switch {name}"
            )
        return name

    def unused_name(self, base: str) -> str:
        """`base`, or `base-2`, `base-3`, ... whichever is free first."""
        names = {entry.name for entry in self.entries} | self._taken
        return _unused_name(base, names)

    def name_for_fork(self, entry: Entry) -> str:
        """main -> main-2 -> main-3, whichever of them is forked."""
        stem, _, number = entry.name.rpartition("-")
        base = stem if stem and number.isdigit() else entry.name
        return self.unused_name(base)

    def children(self, parent: Entry | None) -> list[Entry]:
        """Forks of an entry; with None, those that are forks of none."""
        wanted = None if parent is None else parent.id
        return [e for e in self.entries if e.record.parent == wanted]

    def remove(self, entry: Entry) -> list[Entry]:
        """Takes an entry out; gives its forks, whose ancestry has changed.

        If it was current, no entry is: see `heirs`.
        """
        forks = self.children(entry)
        for fork in forks:
            fork.record.parent = entry.record.parent
            fork.record.forked_at = min(
                fork.record.forked_at, entry.record.forked_at
            )
        self.entries.remove(entry)
        if self._current is entry:
            self._current = None
        return forks

    def heirs(self, entry: Entry) -> list[Entry]:
        """Gives the entries to go to when `entry` goes, the best one first:
        its parent, then the others, the one that changed last first.
        """
        others = [e for e in self.entries if e is not entry]
        others.sort(key=lambda e: e.record.changed, reverse=True)
        others.sort(key=lambda e: e.id != entry.record.parent)
        return others


def _unused_name(base: str, names: set[str]) -> str:
    if base not in names and len(base) <= MAX_NAME_CHARS:
        return base
    stem = base[: MAX_NAME_CHARS - 5]
    name, number = stem, 1
    while name in names:
        number += 1
        name = f"{stem}-{number}"
    return name
