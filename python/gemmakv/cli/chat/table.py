"""The form of counts, texts and tables: plain words, no markup of the text."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_PREVIEW_CHARS = 48
# Of tables: columns before them and between theirs, and of the last at least.
_INDENT, _GAP, _LEAST_COLUMN = 2, 3, 12
# Control characters that would move the cursor or change colours.
_PICTURES = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **{code: 0xFFFD for code in range(0x80, 0xA0)},
}


def printable(text: str) -> str:
    """`text` with control characters made visible; newlines and tabs stay."""
    return text.translate(_PICTURES).encode("utf-8", "replace").decode("utf-8")


def count(number: int, noun: str) -> str:
    """count(2, "turn") == "2 turns"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def by_tier(tokens: Mapping[str, int]) -> str:
    """Tokens that were not computed: "disk 512, ram 64"."""
    return ", ".join(f"{tier} {n:,}" for tier, n in tokens.items())


def preview(text: str) -> str:
    """One short line of a text."""
    line = printable(" ".join(text.split()))
    if len(line) <= _PREVIEW_CHARS:
        return line
    return line[: _PREVIEW_CHARS - 1].rstrip() + "…"


def quoted(text: str) -> str:
    return f"“{preview(text)}”" if text else ""


def ago(when: float) -> str:
    """Tells how long ago a time since the epoch was."""
    seconds = max(0, int(time.time() - when))
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            return f"{count(seconds // size, unit)} ago"
    return "just now"


def pairs(rows: Iterable[tuple[str, str]]) -> Pairs:
    """Names and what they are, in two columns; in one where these are too
    narrow.
    """
    return Pairs([(printable(name), printable(text)) for name, text in rows])


@dataclasses.dataclass(frozen=True)
class Pairs:
    rows: list[tuple[str, str]]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        names = max((cell_len(name) for name, _ in self.rows), default=0)
        left = options.max_width - _INDENT - names - _GAP
        if left < _LEAST_COLUMN:
            for name, text in self.rows:
                yield Padding(Text(name, style="cyan"), (0, 0, 0, _INDENT))
                yield Padding(Text(text), (0, 0, 0, 2 * _INDENT))
            return
        table = Table.grid(padding=(0, _GAP))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column()
        for name, text in self.rows:
            table.add_row(Text(name), Text(text))
        yield Padding(table, (0, 0, 0, _INDENT), expand=False)


def note(text: str) -> Padding:
    """A remark below a table."""
    return Padding(Text(text, style="dim"), (0, 0, 0, 2), expand=False)
