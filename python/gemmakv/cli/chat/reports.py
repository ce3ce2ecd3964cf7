"""Commands that tell something and change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from gemmakv._support.sizes import in_bytes
from gemmakv.cli.chat import table
from gemmakv.cli.chat.table import count, printable, quoted

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmakv.cli.chat.book import Book, Entry, Turn
    from gemmakv.cli.chat.chat import Chat

    _Shortening = Callable[[list[Entry]], list[Entry | int]]

_HERE = "bold green"
_LEAST_PREVIEW = 12
# Of trees: columns of a level and of a label at least, and levels at least.
_GUIDE, _LEAST_LABEL, _LEAST_LEVELS = 4, 40, 3
_ENDS = 8  # of many siblings in a tree: so many first and so many last
# The last tokens of a turn are computed with the next one.
_UNCOUNTED = 16


def list_sessions(chat: Chat) -> None:
    """Mark, name and turns always; of the others those that have room."""
    rows = []
    for entry in chat.book.entries:
        record = entry.record
        here = entry is chat.book.current
        rows.append(
            [
                Text("*" if here else " ", style=_HERE),
                Text(printable(entry.name), style=_HERE if here else "bold"),
                Text(count(record.turns, "turn")),
                Text(count(record.tokens, "token")),
                Text(table.ago(record.changed), style="dim"),
                Text(quoted(record.last_text), no_wrap=True),
            ]
        )
    widths = [max(cell.cell_len for cell in cells) for cells in zip(*rows)]
    widths[-1] = min(widths[-1], _LEAST_PREVIEW)
    room = chat.view.width - 1 - sum(widths[:3]) - 2 * 2
    shown = 3
    while shown < len(widths) and room >= widths[shown] + 2:
        room -= widths[shown] + 2
        shown += 1
    grid = Table.grid(padding=(0, 2))
    for i in range(shown):
        # Only the last one, or a name that is too long by itself, is cut.
        whole = i < 5 and not (i == 1 and shown == 3)
        grid.add_column(
            justify="right" if i in (2, 3) else "left",
            no_wrap=whole,
            overflow="ellipsis" if i == 5 else "fold",
        )
    for row in rows:
        grid.add_row(*row[:shown])
    chat.view.show(Padding(grid, (0, 0, 0, 1), expand=False))


def show(chat: Chat, what: str | int | None) -> None:
    """Shows the messages of the current session, or of one of its turns."""
    entry = chat.book.current
    session = chat.session(entry)
    turn, messages = 0, []
    for message in session.messages:
        turn += message.role == "user"
        messages.append((turn, message))
    if isinstance(what, int):
        if not 0 < what <= session.turns:
            raise ValueError(
                f"{entry.name} has {count(session.turns, 'turn')}, so there is "
                f"no turn {what} to show"
            )
        messages = [one for one in messages if one[0] == what]
    with chat.view.stoppable():
        chat.view.show_messages(entry.name, messages, what is not None)


def stats(chat: Chat) -> None:
    entry = chat.book.current
    session = chat.session(entry)
    numbers = session.stats
    cache = session.cache
    fork_us = entry.last_fork_us
    rows = [
        ("session", f"{entry.name}, {count(session.turns, 'turn')}"),
        ("tokens", f"{entry.record.tokens:,} of {cache.capacity_tokens:,}"),
        (
            "KV cache",
            f"{in_bytes(numbers.own_bytes)} own, "
            f"{in_bytes(numbers.shared_bytes)} shared with forks, "
            f"{cache.kv_dtype}",
        ),
        ("last fork", "none yet" if fork_us is None else f"{fork_us:.1f} µs"),
        ("prefill saved", count(numbers.saved_prefill_tokens, "token")),
        *_last_turn(entry.last),
        ("all sessions", _sum(chat)),
    ]
    if chat.store is not None and chat.store.writable:
        rows.append(("kept in", chat.store.where))
    chat.view.show(table.pairs(rows))


def _sum(chat: Chat) -> str:
    entries = chat.book.entries
    live = sum(
        entry.session is not None and entry.session.in_memory
        for entry in entries
    )
    return f"{len(entries)}, {live} in memory"


def _last_turn(last: Turn | None) -> list[tuple[str, str]]:
    """Tells where its beginning came from, in lines of 40 columns."""
    if last is None:
        return []
    usage = last.usage
    rows = [("last turn", table.by_tier(usage.cached) or "none cached")]
    why = usage.miss_reason
    if last.again > _UNCOUNTED:
        # What it had was in the prefix cache once.
        why = "evicted" if why == "divergent" else why
        rows.append(("computed again", count(last.again, "token")))
    # A new message parts from what is known by itself.
    if why is not None and (why != "divergent" or not usage.cached):
        rows.append(("not cached", why))
    return rows


def tree(chat: Chat, whole: str | None) -> None:
    """Shows the sessions and their forks; of many siblings without the middle,
    unless it is to be `whole`. What would begin too far to the right is a tree
    of its own below.
    """
    room = chat.view.width - 2 - _LEAST_LABEL
    levels = max(room // _GUIDE, _LEAST_LEVELS)
    shortened = _everything if whole else _Shortened(chat.book)
    waiting = shortened(chat.book.children(None))
    cut: set[str] = set()
    while waiting:
        entry = waiting.pop(0)
        if isinstance(entry, int):
            root = Tree(_left_out(entry))
            below = []
        else:
            label = _label(chat, entry)
            if entry.id in cut:
                name = printable(entry.name)
                label = Text(f"{name}, continued:", style="bold")
            root = Tree(label, guide_style="dim")
            below = _grow(chat, root, entry, levels, shortened)
        chat.view.show(Padding(root, (0, 0, 0, 2), expand=False))
        cut.update(one.id for one in below)
        waiting = [*below, *waiting]


def _grow(
    chat: Chat, node: Tree, parent: Entry, levels: int, shortened: _Shortening
) -> list[Entry]:
    """Adds forks; gives the entries whose forks are to be shown below."""
    forks = sorted(chat.book.children(parent), key=lambda e: e.record.forked_at)
    if forks and levels == 0:
        node.add(_dim(f"… {count(len(forks), 'fork')} below"))
        return [parent]
    below = []
    for fork in shortened(forks):
        if isinstance(fork, int):
            node.add(_left_out(fork))
            continue
        grown = node.add(_label(chat, fork))
        below += _grow(chat, grown, fork, levels - 1, shortened)
    return below


def _everything(siblings: list[Entry]) -> list[Entry | int]:
    return [*siblings]


class _Shortened:
    """Siblings, with a number in the place of those that are left out: never
    the current session, nor what it descends from.
    """

    def __init__(self, book: Book) -> None:
        self._kept: set[str] = set()
        entry: Entry | None = book.current
        while entry is not None and entry.id not in self._kept:
            self._kept.add(entry.id)
            entry = book.with_id(entry.record.parent)

    def __call__(self, siblings: list[Entry]) -> list[Entry | int]:
        if len(siblings) <= 2 * _ENDS + 1:  # a line for one saves none
            return [*siblings]
        shown: list[Entry | int] = [*siblings[:_ENDS]]
        left_out = 0
        for entry in siblings[_ENDS:-_ENDS]:
            if entry.id not in self._kept:
                left_out += 1
                continue
            shown += [left_out, entry] if left_out else [entry]
            left_out = 0
        shown += [left_out] if left_out else []
        return shown + siblings[-_ENDS:]


def _left_out(siblings: int) -> Text:
    return _dim(f"… {siblings} more; /tree all shows them")


def _dim(text: str) -> Text:
    return Text(text, style="dim", no_wrap=True, overflow="ellipsis")


def _label(chat: Chat, entry: Entry) -> Text:
    record = entry.record
    here = entry is chat.book.current
    label = Text(no_wrap=True, overflow="ellipsis")
    label.append(printable(entry.name), style=_HERE if here else "bold")
    if here:
        label.append(" ← here", style="green")
    if record.parent is not None:
        label.append(f"  from turn {record.forked_at}", style="cyan")
    label.append(f"  {count(record.turns, 'turn')}")
    if record.last_text:
        label.append(f"  {quoted(record.last_text)}", style="dim")
    return label
