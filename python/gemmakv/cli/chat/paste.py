"""The pastes into a terminal, also those whose end never comes."""

from __future__ import annotations

from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

from gemmakv._support.text import overlap

_START, _END = "\x1b[200~", "\x1b[201~"
_CTRL_C = "\x03"
_ENTER = ("\r", "\n")


class PasteParser(Vt100Parser):
    """Makes keys of what a terminal sends; a paste is one key.

    The parser of prompt_toolkit, which is given no mark of a paste here, takes
    all that follows the start of a paste for a part of it, for ever if the end
    got lost. Here a pause, which `flush` tells of, ends a paste as well. What
    comes later may still belong to it, as on a slow line: several letters at a
    time with a line break are no keys, and none of their line breaks is Enter.
    """

    def reset(self, request: bool = False) -> None:
        self._pasted: list[str] | None = None  # in a paste: its text so far
        self._held = ""  # what may be the beginning of a mark
        self._paused = False  # a paste was given whose end has not come
        super().reset(request)

    def feed(self, data: str) -> None:
        if data == _CTRL_C and self._pasted is not None:  # pressed
            self._give_paste()
        elif self._paused:
            self._resume(data)
        data = self._held + data
        while True:
            mark = _START if self._pasted is None else _END
            text, found, data = data.partition(mark)
            end = len(text) - (0 if found else overlap(text, mark))
            text, self._held = text[:end], text[end:]
            if self._pasted is None:
                super().feed(text)
            else:
                self._pasted.append(text)
            if not found:
                return
            if self._pasted is None:
                super().flush()  # an Escape before the mark is a key
                self._pasted = []
            else:
                self._give_paste()

    def flush(self) -> None:
        if self._pasted is not None:
            self._give_paste()
            self._paused = True
        super().feed(self._held)
        self._held = ""
        super().flush()

    def _resume(self, data: str) -> None:
        """Notes whether a paste without an end goes on, or is over."""
        several = len(data) > 1 and any(key in data for key in _ENTER)
        all_data = self._held + data
        if data in (*_ENTER, _CTRL_C) or _START in all_data:
            self._paused = False
        elif _END in all_data or several:
            self._paused = False
            self._pasted = []

    def _give_paste(self) -> None:
        text = "".join(self._pasted or ()) + self._held
        self._pasted, self._held = None, ""
        self.feed_key_callback(KeyPress(Keys.BracketedPaste, text))
