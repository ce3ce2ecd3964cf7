"""Pastes into a terminal, also those whose end never comes."""

from __future__ import annotations

from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

_START, _END = "\x1b[200~", "\x1b[201~"
_CTRL_C = "\x03"


class PasteParser(Vt100Parser):
    """Makes keys of what a terminal sends; a paste is one key.

    The parser of prompt_toolkit takes all that follows the start of a paste
    for a part of it, for ever if the end got lost. Here a pause, which
    `flush` tells of, ends a paste as well. What comes later may still belong
    to it, as on a slow line: several letters at a time with a line break are
    no keys, and none of their line breaks is Enter.
    """

    _paused = False  # a paste was given whose end has not come
    _paste_buffer = ""

    def reset(self, request: bool = False) -> None:
        super().reset(request)
        self._paused = False

    def feed(self, data: str) -> None:
        if self._in_bracketed_paste:
            if data == _CTRL_C:  # alone, so it was pressed
                self._end_paste()
                self._paused = False
        elif self._paused:
            if data in ("\r", "\n", _CTRL_C) or _START in data:
                self._paused = False
            elif _END in data or (len(data) > 1 and {"\r", "\n"} & {*data}):
                self._paused = False
                self._in_bracketed_paste = True
                self._paste_buffer = ""
        super().feed(data)

    def flush(self) -> None:
        if self._in_bracketed_paste:
            self._end_paste()
        super().flush()

    def _end_paste(self) -> None:
        self._in_bracketed_paste = False
        self._paused = True
        text, self._paste_buffer = self._paste_buffer, ""
        self.feed_key_callback(KeyPress(Keys.BracketedPaste, text))
