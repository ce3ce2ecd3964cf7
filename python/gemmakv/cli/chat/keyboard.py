"""The keys that no prompt reads: they wait in the next one, unsent."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import (
    clear_typeahead,
    get_typeahead,
    store_typeahead,
)
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output
from prompt_toolkit.shortcuts import confirm
from prompt_toolkit.utils import is_dumb_terminal

from gemmakv._support.interrupts import handled
from gemmakv.cli.chat.paste import PasteParser
from gemmakv.cli.chat.table import printable

# Written past the buffer of stdout, which a signal may find in use.
_PASTES_APART = b"\x1b[?2004h"
_PASTES_PLAIN_AND_CURSOR = b"\x1b[?2004l\x1b[?25h"

_ENTER = (Keys.ControlM, Keys.ControlJ)
_NEW_LINE = KeyPress(Keys.BracketedPaste, "\n")


class Keyboard:
    """The keys of a terminal between prompts, within `silent`."""

    def __init__(self, input: Input, output: Output) -> None:
        self._input = input
        self._output = output
        self._keys: list[KeyPress] = []
        self._reading = threading.RLock()  # a signal may come in `drop`
        self._open = contextlib.ExitStack()
        self._on_resume: Callable[[], None] = lambda: None
        if isinstance(input, Vt100Input):
            callback = input.vt100_parser.feed_key_callback
            input.vt100_parser = PasteParser(callback)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Shows nothing of what is typed between prompts, at no moment.

        The end of the body makes the terminal what it was.
        """
        terminal = self._input.fileno()
        before = _mode(terminal)
        _silence(terminal)
        try:
            yield
        finally:
            _set_mode(terminal, before)

    @contextlib.contextmanager
    def keep(self, on_resume: Callable[[], None]) -> Iterator[None]:
        """Reads keys while the body runs, and keeps them for the next prompt.

        Enter is a line break there: nothing is sent or run that was not seen.
        `on_resume` is called when the program goes on after Ctrl-Z.
        """
        self._on_resume = on_resume
        self._keys = []
        try:
            self._start()
            yield
        finally:
            self._open.close()
            self._keys += self._input.flush_keys()  # of a paste so far
            store_typeahead(self._input, _draft(self._keys))

    def confirm(self, question: str) -> bool:
        """Asks within `keep`; what was typed before is no answer."""
        self._open.close()
        try:
            return confirm(printable(question), " (y/n) ")
        except (KeyboardInterrupt, EOFError):
            self.drop()
            return False
        finally:
            self._start()

    def drop(self) -> None:
        """Forgets what was typed."""
        with self._reading:
            self._keys = []
            if isinstance(self._input, Vt100Input):
                self._input.vt100_parser.reset()  # the end of a paste is gone
            clear_typeahead(self._input)
        with contextlib.suppress(termios.error):
            termios.tcflush(self._input.fileno(), termios.TCIFLUSH)

    def _start(self) -> None:
        """Reads keys until `_open` is closed."""
        early = get_typeahead(self._input)
        while any(key.key is Keys.ControlC for key in early):
            # Pressed when the prompt had ended, before signals were on.
            if early.pop(0).key is Keys.ControlC:
                signal.raise_signal(signal.SIGINT)
        self._keys += early
        with _put_off(signal.SIGINT):
            self._start_reader()

    def _start_reader(self) -> None:
        stop, end = os.pipe()
        reader = threading.Thread(target=self._read, args=(stop,), daemon=True)
        self._open.callback(os.close, stop)
        self._open.callback(reader.join)
        self._open.callback(os.close, end)
        self._enter()
        for number, function in (
            (signal.SIGTSTP, self._suspend),
            (signal.SIGCONT, self._resume),
        ):
            self._open.enter_context(handled(number, function))
        reader.start()

    def _enter(self) -> None:
        _silence(self._input.fileno())
        self._control(_PASTES_APART)

    def _control(self, sequence: bytes) -> None:
        if not is_dumb_terminal():
            os.write(self._output.fileno(), sequence)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Leaves the terminal to the shell as it was, and stops."""
        self._control(_PASTES_PLAIN_AND_CURSOR)
        signal.signal(number, signal.SIG_DFL)
        with self._input.cooked_mode():
            os.kill(0, number)
        self._resume(number, frame)  # where there was no shell to stop it

    def _resume(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTSTP, self._suspend)
        self._enter()
        self._on_resume()

    def _read(self, stop: int) -> None:
        """Takes keys in, so that Ctrl-C comes through after any number."""
        keyboard = self._input.fileno()
        while not self._input.closed:
            if stop in select.select([keyboard, stop], [], [])[0]:
                return
            with self._reading:
                self._keys += self._input.read_keys()


def _silence(terminal: int) -> None:
    """Has a terminal show no keys, and give each at once and as it was pressed;
    those that mean signals still do.
    """
    if mode := _mode(terminal):
        mode[tty.IFLAG] &= ~(termios.IXON | termios.IXOFF)
        mode[tty.IFLAG] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
        mode[tty.LFLAG] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
        mode[tty.CC][termios.VMIN] = 1
        _set_mode(terminal, mode)


def _mode(terminal: int) -> list[Any]:
    """Reads the attributes of a terminal; there are none of one that went."""
    try:
        return termios.tcgetattr(terminal)
    except termios.error:
        return []


def _set_mode(terminal: int, mode: list[Any]) -> None:
    """Sets the attributes of a terminal if there are any, and it is there."""
    with contextlib.suppress(termios.error):
        if mode:
            termios.tcsetattr(terminal, termios.TCSANOW, mode)


@contextlib.contextmanager
def _put_off(number: signal.Signals) -> Iterator[None]:
    """A signal that comes while the body runs is handled at its end."""
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        del number, frame
        came = True

    with handled(number, note):
        yield
    if came:
        signal.raise_signal(number)


def _draft(keys: list[KeyPress]) -> list[KeyPress]:
    """The keys with line breaks where Enter was, but for the last ones."""
    while keys and keys[-1].key in _ENTER:
        keys = keys[:-1]
    return [_NEW_LINE if one.key in _ENTER else one for one in keys]
