"""Streams text to a terminal and breaks lines between words."""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len

_TAB = "    "


class WordWrap:
    """Writes text as it comes; a word that does not fit moves to a new line.

    The word is on the screen while it grows: when it meets the edge, it is
    erased there and written again below. Words longer than a line are cut by
    the terminal itself.
    """

    def __init__(self, write: Callable[[str], None], width: int) -> None:
        self._write = write
        # The last column stays free: terminals differ in what they do there.
        self._width = max(width - 1, 1)
        self._column = 0
        self._word = ""  # the end of the line as far as it is one word
        self._word_width = 0

    def write(self, text: str) -> None:
        out = "".join(self._place(c) for c in text.replace("\t", _TAB))
        self._write(out)

    def end(self) -> None:
        """Makes sure that the cursor is at the beginning of a line."""
        if self._column:
            self._write("\n")
            self._column = 0
            self._word, self._word_width = "", 0

    def _place(self, character: str) -> str:
        """What to write for one character."""
        if character == "\n":
            self._column = 0
            self._word, self._word_width = "", 0
            return "\n"
        size = cell_len(character)
        if character == " ":
            self._word, self._word_width = "", 0
            if self._column >= self._width:
                return ""  # at the edge: the next word begins a new line
            self._column += 1
            return " "
        if self._column + size <= self._width:
            self._grow(character, size)
            return character
        word, word_width = self._word, self._word_width
        self._column = 0
        self._word, self._word_width = "", 0
        if not word or word_width + size > self._width:
            self._grow(character, size)
            return "\n" + character
        self._grow(word + character, word_width + size)
        erase = f"\x1b[{word_width}D\x1b[K"
        return f"{erase}\n{word}{character}"

    def _grow(self, text: str, size: int) -> None:
        self._word += text
        self._word_width += size
        self._column += size
