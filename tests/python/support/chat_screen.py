"""A terminal for tests: runs a program and keeps the screen it would show."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable

import pyte

from support.forks import FORKS
from support.waits import wait_until

ENTER, TAB, ESCAPE = "\r", "\t", "\x1b"
CTRL_C, CTRL_D, UP, DOWN = "\x03", "\x04", "\x1b[A", "\x1b[B"
JOINER, WIDE = "\u200d", "\ufe0f"  # joins two emoji; makes one of a letter
JOINING = (JOINER, WIDE, *map(chr, range(0x1F3FB, 0x1F400)))  # skin tones
FLAG_LETTERS = tuple(map(chr, range(0x1F1E6, 0x1F200)))
WAIT_S = 120  # far above what anything needs


class Ended(Exception):
    """The program has left the terminal."""


class _Letters(pyte.Screen):
    """Draws each letter by itself, and nothing of those without a width."""

    def draw(self, data: str) -> None:
        for letter in data:
            super().draw(letter)


class _Pictures(_Letters):
    """Draws an emoji of several letters as one picture, as wide as its first
    letter or as two.
    """

    _before = ("", -1, -1)  # the last letter, and where the cursor was then

    def draw(self, data: str) -> None:
        for letter in data:
            last, *place = self._before
            if place != [self.cursor.y, self.cursor.x]:
                last = ""
            flag = last in FLAG_LETTERS and letter in FLAG_LETTERS
            if not last or not (flag or last == JOINER or letter in JOINING):
                super().draw(letter)
            elif letter == WIDE and self._is_narrow():
                super().draw(" ")
            # A third letter of flags begins another one.
            last = " " if flag else letter
            self._before = last, self.cursor.y, self.cursor.x

    def _is_narrow(self) -> bool:
        """Whether the letter before the cursor has one column."""
        return bool(self.buffer[self.cursor.y][self.cursor.x - 1].data)


class Screen:
    """A program on a terminal of its own: a fork, but a new process of Python
    where `new` asks for that. With `joins`, it draws pictures of emoji.
    """

    def __init__(
        self,
        *arguments: object,
        columns: int = 80,
        rows: int = 40,
        new: bool = False,
        before: str = "",
        joins: bool = False,
        **env: str,
    ) -> None:
        self._screen = (_Pictures if joins else _Letters)(columns, rows)
        self._screen.write_process_input = self.type
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        # These would stand in for the terminal's own size.
        sizes = ("COLUMNS", "LINES")
        inherited = {k: v for k, v in os.environ.items() if k not in sizes}
        variables = {**inherited, "TERM": "xterm-256color", **env}
        self._terminal, program = pty.openpty()
        self._set_size()
        streams = (program, program, program)
        self.process = FORKS.start(
            arguments, streams, variables,
            before=before, terminal=True, new=new,
        )  # fmt: skip
        os.close(program)

    def type(self, *keys: str | bytes) -> None:
        for one in keys:
            data = one.encode() if isinstance(one, str) else one
            while data:
                data = data[os.write(self._terminal, data) :]

    def line(self, text: str) -> None:
        """Types a line and Enter, once the prompt is there to take it. The
        screen may show the same from before.
        """

        def shown() -> bool:
            screen = self._screen
            y, x = screen.cursor.y, screen.cursor.x
            above = screen.display[y - 1] if y else ""  # of a line that wraps
            return (above + screen.display[y][:x]).endswith(text[-20:])

        self.type(text)
        self.wait_until(shown, text)
        self.type(ENTER)

    @property
    def text(self) -> str:
        """What the screen shows now."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    def rows(self) -> list[list[pyte.screens.Char]]:
        """The characters of the lines above the prompt's, with their looks."""
        screen = self._screen
        return [
            [screen.buffer[y][x] for x in range(screen.columns)]
            for y in range(screen.cursor.y)
        ]

    @property
    def prompt(self) -> str:
        """The line that the cursor is in."""
        return self._screen.display[self._screen.cursor.y].rstrip()

    def update(self, seconds: float = 1) -> bool:
        """Takes in what the program writes next; whether it wrote within this
        time. Raises Ended.
        """
        if not select.select([self._terminal], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._terminal, 1 << 16)
        except OSError:  # Linux says so where no program has it open
            raise Ended from None
        self.raw += data
        self._stream.feed(data)
        return True

    def feed(self, data: bytes) -> None:
        """Shows what another program wrote."""
        self._stream.feed(data)

    def resize(self, columns: int) -> None:
        """The terminal gets another width."""
        self._screen.resize(columns=columns)
        self._set_size()

    def _set_size(self) -> None:
        size = (self._screen.lines, self._screen.columns, 0, 0)
        packed = struct.pack("HHHH", *size)
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, packed)

    def wait_until(self, done: Callable[[], object], what: str) -> None:
        """Takes in output until `done()`; fails with the screen if never."""
        end = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < end, f"no {what!r} in:\n{self.text}"
            try:
                self.update()
            except Ended:
                raise AssertionError(
                    f"ended without {what!r}:\n{self.text}"
                ) from None

    def wait_for(self, pattern: str, regex: bool = False) -> str:
        """Until the screen shows it; the whole screen."""
        wanted = pattern if regex else re.escape(pattern)
        self.wait_until(lambda: re.search(wanted, self.text), pattern)
        return self.text

    def wait_for_prompt(self, name: str) -> str:
        """Until an empty prompt of session `name` waits for input."""
        self.wait_until(lambda: self.prompt == f"{name}>", f"{name}>")
        return self.text

    def wait_for_exit(self) -> int:
        """Exit code; minus the signal's number if one ended it."""
        end = time.monotonic() + WAIT_S
        with contextlib.suppress(Ended):
            while time.monotonic() < end:
                self.update()
            raise AssertionError("still running:\n" + self.text)
        return self.process.wait(WAIT_S)

    def hang_up(self) -> None:
        """The terminal goes, as with its window; returns when the program has
        ended.
        """
        os.close(self._terminal)
        self._terminal = -1
        self.process.wait(WAIT_S)

    def stop(self) -> None:
        """Stops the program as SIGSTOP does; returns when it has."""
        os.kill(self.process.pid, signal.SIGSTOP)
        stat = f"/proc/{self.process.pid}/stat"

        def stopped() -> bool:
            with open(stat) as file:
                return file.read().rpartition(") ")[2][0] == "T"

        wait_until(stopped)

    def close(self) -> None:
        """Ends what still runs."""
        self.process.kill()
        self.process.wait(WAIT_S)
        if self._terminal >= 0:
            os.close(self._terminal)
