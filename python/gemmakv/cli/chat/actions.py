"""Commands that change something.

Each takes the chat and the values of its arguments as the table in commands.py
declares them, and raises ValueError, OSError or GemmaKVError with one line
that says what to do next.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gemmakv._support.sizes import in_bytes
from gemmakv.chat._session_file import is_session
from gemmakv.chat.store import Record, from_file
from gemmakv.cli.chat.book import Entry
from gemmakv.cli.chat.settings import SETTINGS, show
from gemmakv.cli.chat.table import count, quoted

if TYPE_CHECKING:
    from gemmakv.cli.chat.chat import Chat


class Leave(Exception):
    """The person wants to go."""


def leave(chat: Chat) -> None:
    del chat
    raise Leave


def new(chat: Chat, name: str | None) -> None:
    chat.start(name)
    chat.view.say(f"new session {chat.book.current.name}")


def switch(chat: Chat, name: str) -> None:
    entry = chat.book.find(name)
    if entry is chat.book.current:
        chat.view.say(f"this is {entry.name} already")
        return
    chat.session(entry)
    chat.select(entry)
    chat.show_where()


def fork(chat: Chat, name: str | None) -> None:
    source = chat.book.current
    book = chat.book
    new_name = book.name_for_fork(source) if name is None else name
    book.check_new_name(new_name)
    session = chat.session(source).fork()
    stats = session.stats
    source.last_fork_us = stats.last_fork_us
    record = Record(
        new_name, parent=source.id, forked_at=source.record.turns
    )
    entry = Entry(record, session, last_fork_us=stats.last_fork_us)
    chat.adopt(entry)
    chat.view.say(
        f"forked {source.name} at {count(record.forked_at, 'turn')} in "
        f"{stats.last_fork_us:.0f} µs, "
        f"{in_bytes(stats.shared_bytes)} shared; you are in {new_name} now"
    )


def undo(chat: Chat, turns: int | None) -> None:
    wanted = 1 if turns is None else turns
    if wanted == 0:
        raise ValueError("/undo takes back at least 1 turn; usage: /undo [N]")
    entry = chat.book.current
    session = chat.session(entry)
    if wanted > session.turns:
        raise ValueError(
            f"{entry.name} has {count(session.turns, 'turn')}, so {wanted} "
            "cannot be undone"
        )
    removed = session.undo(wanted)
    chat.save(entry)
    said = [m.text for m in removed if m.role == "user"]
    what = quoted(said[0]) if len(said) == 1 else count(wanted, "turn")
    chat.view.say(f"took back {what}; {count(session.turns, 'turn')} left")


def goto(chat: Chat, turn: int) -> None:
    entry = chat.book.current
    session = chat.session(entry)
    if turn > session.turns:
        raise ValueError(
            f"{entry.name} has {count(session.turns, 'turn')}; expected "
            f"/goto 0 to {session.turns}"
        )
    session.goto(turn)
    chat.save(entry)
    chat.show_where()


def rename(chat: Chat, name: str) -> None:
    entry = chat.book.current
    old = entry.name
    if name != old:
        chat.book.check_new_name(name)
    entry.record.name = entry.label = name
    chat.save_record(entry)
    chat.view.say(f"{old} is {name} now")


def delete(chat: Chat, name: str | None) -> None:
    book = chat.book
    entry = book.current if name is None else book.find(name)
    chat.check_deletable(entry)  # before it asks, and as it is now
    turns = entry.record.turns
    if turns and not chat.view.confirm(
        f"Delete {entry.name} with its {count(turns, 'turn')}?"
    ):
        chat.let_go(entry)
        chat.view.say(f"{entry.name} is kept")
        return
    was_current = entry is book.current
    heir = None
    if was_current:
        heir = next(filter(chat.may_open, book.heirs(entry)), None)
    if heir is not None:
        chat.session(heir)
    chat.forget(entry)
    if not was_current:
        chat.view.say(f"deleted {entry.name}")
        return
    if heir is None:
        chat.start(None)
    else:
        chat.select(heir)
    chat.view.say(f"deleted {entry.name}; you are in {book.current.name} now")


def restore(chat: Chat) -> None:
    entry = chat.bring_back()
    chat.view.say(f"{entry.name} is back; /switch {entry.name} opens it")


def save(chat: Chat, path: str) -> None:
    target = _expanded(path)
    session = chat.session()
    if target.is_dir():
        raise ValueError(
            f"{path} is a folder; give a file, as in {path.rstrip('/')}/chat"
        )
    if not target.parent.is_dir():
        raise ValueError(f"there is no folder {target.parent}; make it first")
    if target.exists() and not (target.is_file() and is_session(target)):
        raise ValueError(
            f"{path} exists and is no saved session; choose another name"
        )
    with chat.view.stoppable():
        session.save(target)
    chat.view.say(
        f"saved {chat.book.current.name} to {path} "
        f"({in_bytes(target.stat().st_size)}); /load opens it"
    )


def load(chat: Chat, path: str) -> None:
    source = _expanded(path)
    try:
        with chat.view.stoppable():
            session, note = from_file(chat.gemma, source)
    except OSError as error:
        error.filename = error.filename or path
        raise
    record = Record(chat.book.unused_name(_name_of(source)))
    entry = chat.adopt(Entry(record, session))
    chat.view.say(
        f"opened {path} as {entry.name}: {count(session.turns, 'turn')}, "
        f"{count(entry.record.tokens, 'token')}"
    )
    if note:
        chat.view.say(note)
    chat.show_last_turn()


def _expanded(path: str) -> Path:
    """The path that was typed, with the home folder for a ~."""
    if not path or "\0" in path:
        raise ValueError(f"expected the path of a file, found {path!r}")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = path.split("/")[0]
        raise ValueError(
            f"{path}: {user} is no home folder that is known here; a file of "
            f"that name is ./{path}"
        ) from None


def _name_of(path: Path) -> str:
    """A session name from a file's name."""
    stem = os.path.splitext(path.name)[0]
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in stem)
    return name.strip("-.") or "loaded"


def system(chat: Chat, text: str | None) -> None:
    entry = chat.book.current
    session = chat.session(entry)
    if text is None:
        chat.view.say(
            f"system text: {session.system}; /system none removes it"
            if session.system
            else "no system text; /system TEXT sets one"
        )
        return
    session.system = None if text == "none" else text
    chat.save(entry)
    again = (
        "; what was said is computed again with the next message"
        if session.turns
        else ""
    )
    what = "removed" if session.system is None else "set"
    chat.view.say(f"system text {what}{again}")


def set_option(chat: Chat, key: str | None, text: str | None) -> None:
    entry = chat.book.current
    session = chat.session(entry)
    if key is None:
        chat.show_settings(session)
        return
    setting = SETTINGS.get(key)
    if setting is None:
        raise ValueError(
            f"no setting {key!r}; there are {', '.join(SETTINGS)}"
        )
    if text is None:
        value = chat.setting_value(session, setting)
        chat.view.say(f"{key} is {show(value)} ({setting.help})")
        return
    chat.apply_setting(session, setting, setting.read(text))
    chat.save(entry)
    value = chat.setting_value(session, setting)
    chat.view.say(f"{key} is {show(value)} now")
