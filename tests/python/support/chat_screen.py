"""A terminal for tests: runs a program and keeps the screen it would show."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable

import pexpect
import pyte

ENTER, TAB, ESCAPE = "\r", "\t", "\x1b"
CTRL_C, CTRL_D, UP, DOWN = "\x03", "\x04", "\x1b[A", "\x1b[B"
WAIT_S = 120  # far above what anything needs


class Screen:
    """A program on a terminal of its own."""

    def __init__(
        self,
        *arguments: object,
        columns: int = 80,
        rows: int = 40,
        **env: str,
    ) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._screen.write_process_input = self._answer
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        # These would stand in for the terminal's own size.
        sizes = ("COLUMNS", "LINES")
        inherited = {k: v for k, v in os.environ.items() if k not in sizes}
        self.process = pexpect.spawn(
            sys.executable,
            ["-m", "gemmakv", *map(str, arguments)],
            dimensions=(rows, columns),
            env={**inherited, "TERM": "xterm-256color", **env},
            # Tests that run under nohup ignore it, and so would the program.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        self.process.delaybeforesend = None

    def _answer(self, data: str) -> None:
        """What the terminal itself says, asked for the cursor's place."""
        self.process.send(data)

    def type(self, *keys: str) -> None:
        for one in keys:
            self.process.send(one)

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

    def update(self, seconds: float = 0.05) -> None:
        """Takes in what the program wrote within a moment."""
        try:
            data = self.process.read_nonblocking(1 << 16, seconds)
        except pexpect.TIMEOUT:
            return
        self.raw += data
        self._stream.feed(data)

    def feed(self, data: bytes) -> None:
        """Shows what another program wrote."""
        self._stream.feed(data)

    def resize(self, columns: int) -> None:
        """The terminal gets another width."""
        self._screen.resize(columns=columns)
        self.process.setwinsize(self._screen.lines, columns)

    def wait_until(self, done: Callable[[], object], what: str) -> None:
        """Takes in output until `done()`; fails with the screen if never."""
        end = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < end, f"no {what!r} in:\n{self.text}"
            try:
                self.update()
            except pexpect.EOF:
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
        end = time.monotonic() + 2 * WAIT_S
        try:
            while time.monotonic() < end:
                self.update(WAIT_S)
            raise AssertionError("still running:\n" + self.text)
        except pexpect.EOF:
            pass
        # `close` would send signals to one that is not gone yet.
        while self.process.isalive() and time.monotonic() < end:
            time.sleep(0.02)
        self.process.close()
        if self.process.signalstatus is not None:
            return -self.process.signalstatus
        return self.process.exitstatus

    def hang_up(self) -> None:
        """The terminal goes, as with its window; returns when the program has
        ended. `close` would kill it soon.
        """
        self.process.ptyproc.fileobj.close()
        end = time.monotonic() + WAIT_S
        while self.process.isalive():
            assert time.monotonic() < end, "still running without a terminal"
            time.sleep(0.02)

    def close(self) -> None:
        """Ends what still runs. A kernel that is busy takes its time: the
        terminal's own waits a tenth of a second for each signal.
        """
        try:
            self.process.close(force=True)
        except pexpect.ExceptionPexpect:
            end = time.monotonic() + WAIT_S
            while self.process.isalive():
                assert time.monotonic() < end, "not even killed"
                time.sleep(0.02)
