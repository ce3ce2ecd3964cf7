"""Streams text to a terminal and breaks lines between words."""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len, chop_cells

_TAB = "    "


class WordWrap:
    """Writes text as it comes; a word that does not fit moves to a new line.

    The word is on the screen while it grows: when it meets the edge, its line
    is written again without it, and the word below; how wide the terminal
    draws it does not matter. Words longer than a line are cut by the terminal
    itself. `columns` gives the width of the terminal now; what
    no longer fits is taken to be wrapped by the terminal, as most do.
    """

    def __init__(
        self, write: Callable[[str], None], columns: Callable[[], int]
    ) -> None:
        self._write = write
        self._columns = columns
        self._width = 0
        self._line = ""  # what the line of the cursor holds
        self._writing = self._stale = False

    def write(self, text: str) -> None:
        columns = self._columns()
        # The last column stays free: terminals differ in what they do there.
        self._width = max(columns - 1, 1)
        if cell_len(self._line) > max(columns, 2):
            self._line = chop_cells(self._line, max(columns, 2))[-1]
        self._writing = True
        try:
            out = "".join(self._place(c) for c in text.replace("\t", _TAB))
            self._write(out)
        finally:
            self._writing = False
        if self._stale:
            self.redraw()

    def redraw(self) -> None:
        """Writes the line again where the cursor is now; where a signal asks
        for it in the middle of `write`, at the end of that.
        """
        self._stale = True
        if self._writing:
            return
        self._writing = True
        try:
            while self._stale:
                self._stale = False
                self._write(f"\r\x1b[K{self._line}")
        finally:
            self._writing = False

    def end(self) -> None:
        """Makes sure that the cursor is at the beginning of a line."""
        if self._line:
            self._writing = True
            try:
                self._write("\n")
                self._line = ""
            finally:
                self._writing = self._stale = False

    def _place(self, character: str) -> str:
        """Returns what to write for one character."""
        if character == "\n":
            self._line = ""
            return "\n"
        if cell_len(self._line + character) <= self._width:
            self._line += character
            return character
        if character == " ":  # at the edge: the next word begins a new line
            if cell_len(self._line) <= self._width:
                self._line += character
            return ""
        before, space, word = self._line.rpartition(" ")
        if not word or cell_len(word + character) > self._width:
            self._line = character
            return "\n" + character
        self._line = word + character
        return f"\r\x1b[K{before}{space}\n{self._line}"
