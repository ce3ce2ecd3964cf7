"""Folders of files, which chats kept once, into the database.

Each session is taken over in a transaction of its own, between which others
write. Not a byte of the folder is changed before all are in the database. Then
it gets another name. Where that is interrupted, the next start goes on: it
finds what is in the database already by its id.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from gemmakv._support.locks import lock
from gemmakv.chat import _session_file as session_file
from gemmakv.chat._session_file import SessionState, TokenPart
from gemmakv.chat.store import NewerRecord, Record
from gemmakv.chat.store._folder import read_current, read_file
from gemmakv.chat.store._live import common_turns
from gemmakv.conversations._chat import ChatStore, Taken
from gemmakv.errors import CorruptFile, GemmaKVError


def take_over(folder: Path, store: ChatStore) -> list[str]:
    """Takes over a folder, if it is there. Gives a line for whatever is left
    where it is, for people. Raises OSError, StoreError.
    """
    if not folder.is_dir() or not store.takes_in:
        return []
    with _locked(folder / "lock") as free:
        if not free:
            return [
                f"an older gemmakv chat uses {folder}, or another chat takes "
                "it over; its sessions come here at the first start after it "
                "has ended"
            ]
        new = folder
        if store.writable:
            new = _unused(folder.with_name(f"{folder.name}.taken-over"))
        lines: list[str] = []
        found = [
            *_records(folder, new, lines),
            *_records(folder / "trash", new / "trash", []),
        ]
        found.sort(key=lambda one: one[0].created)
        for record, file, deleted in found:
            store.take_in(_taken(record, file, deleted))
        current = read_current(folder)
        if current is not None:
            store.take_in_current(current)
        if store.writable:
            os.rename(folder, new)
        return lines


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Holds the lock that the chats of then shared; tells whether it could."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    except OSError:  # it can only be read, so nobody uses it
        yield True
        return
    try:
        yield lock(descriptor, wait=False)
    finally:
        os.close(descriptor)


def _records(
    folder: Path, new: Path, lines: list[str]
) -> Iterator[tuple[Record, Path, float | None]]:
    """Gives what can be read, each with its session file and the seconds since
    it was deleted; and adds a line for what cannot, and where that will be.
    """
    now = time.time()
    for path in sorted(folder.glob("*.json")):
        try:
            record = read_file(path)
            deleted = None
            if folder.name == "trash":
                deleted = max(now - path.stat().st_ctime, 0.0)
        except NewerRecord as error:
            lines.append(
                f"the stored session {error.name or path.name} is of a newer "
                f"gemmakv ({error}); it is kept as {new / path.name}"
            )
            continue
        except (CorruptFile, OSError) as error:
            lines.append(
                f"a stored session cannot be read ({error}); it is kept as "
                f"{new / path.name}"
            )
            continue
        yield record, path.with_suffix(".session"), deleted


def _taken(record: Record, file: Path, deleted: float | None) -> Taken:
    """Gives a record with what its session file holds."""
    try:
        with open(file, "rb") as opened:
            state = session_file.kept_state(opened)
    except OSError:
        return Taken(record, deleted)
    except GemmaKVError:  # whoever opens it says what is wrong with it
        return Taken(record, deleted, keys=file)
    if state is None:
        return Taken(record, deleted, keys=file)
    text, part = state
    # The record may be newer than the file.
    same = common_turns(text.messages, record.messages)
    ends = [*text.ends, *[None] * record.turns][:same]
    if 2 * same < len(text.messages):
        held = max((end for end in ends if end is not None), default=0)
        part = TokenPart(part.fingerprint, part.ids[:held])
    text.ends = [*ends, *[None] * (record.turns - len(ends))]
    return Taken(record, deleted, SessionState(text, part))


def _unused(path: Path) -> Path:
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found
