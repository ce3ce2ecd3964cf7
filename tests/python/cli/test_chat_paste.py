"""Pastes as keys."""

from __future__ import annotations

import os
import pty
import termios
import tty

import pytest
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import DummyOutput

from gemmakv.cli.chat.keyboard import Keyboard
from gemmakv.cli.chat.paste import PasteParser

PAUSE = None
START, END = "\x1b[200~", "\x1b[201~"


@pytest.mark.parametrize(
    "chunks, wanted",
    [
        ([START + "a\nb" + END + "c"], ["paste a\nb", "c"]),
        ([START + "a", "\n", "b" + END], ["paste a\nb"]),
        ([START, "a\x03b", END], ["paste a\x03b"]),
        # No end comes.
        ([START + "a\nb", PAUSE, "c", "\r"], ["paste a\nb", "c", "\r"]),
        ([START + "a", PAUSE, "\r", "b\r"], ["paste a", "\r", "b", "\r"]),
        ([START + "a", "\x03", "b"], ["paste a", "\x03", "b"]),
        # It comes late.
        ([START + "a", PAUSE, "b\nc", "d" + END + "e"],
         ["paste a", "paste b\ncd", "e"]),
        ([START + "a", PAUSE, "b\nc", PAUSE, "d\ne" + END + "\r"],
         ["paste a", "paste b\nc", "paste d\ne", "\r"]),
        ([START + "a", PAUSE, END, "b\rc"], ["paste a", "paste ", *"b\rc"]),
        ([START + "a", PAUSE, START + "b\n" + END], ["paste a", "paste b\n"]),
        ([PAUSE, "a\r"], ["a", "\r"]),
        # Marks come in pieces.
        (["a\x1b[20", "0~b\x1b", "[201~c"], ["a", "paste b", "c"]),
        ([START + "a", PAUSE, "\x1b[20", "1~b"], ["paste a", "paste ", "b"]),
        ([START + "a\x1b[2", PAUSE, "b"], ["paste a\x1b[2", "b"]),
        (["\x1b" + START + "a" + END], ["\x1b", "paste a"]),
        # Keys whose beginning a mark has, too.
        (["\x1b", "[A"], ["\x1b[A"]),
        (["\x1b", PAUSE, "[A"], ["\x1b", "[", "A"]),
        (["\x1b[2", PAUSE, "00~"], ["\x1b", *"[200~"]),
    ],
)
def test_keys(chunks: list[str | None], wanted: list[str]) -> None:
    found = []

    def take(key: KeyPress) -> None:
        paste = key.key is Keys.BracketedPaste
        found.append(f"paste {key.data}" if paste else key.data)

    parser = PasteParser(take)
    for chunk in chunks:
        if chunk is None:
            parser.flush()
        else:
            parser.feed(chunk)
    assert found == wanted


def test_a_long_paste_in_pieces() -> None:
    found: list[KeyPress] = []
    parser = PasteParser(found.append)
    parser.feed(START)
    for _ in range(20_000):
        parser.feed("x" * 1024)  # as much as is read at once
    parser.feed(END)
    [paste] = found
    assert len(paste.data) == 20_000 * 1024


def test_a_silent_terminal_is_afterwards_what_it_was() -> None:
    terminal, program = pty.openpty()
    with os.fdopen(terminal), os.fdopen(program) as file:
        keyboard = Keyboard(Vt100Input(file), DummyOutput())
        before = termios.tcgetattr(program)
        hidden = termios.ECHO | termios.ICANON
        assert before[tty.LFLAG] & hidden == hidden
        with keyboard.silent():
            now = termios.tcgetattr(program)
            assert not now[tty.LFLAG] & hidden
            assert not now[tty.IFLAG] & termios.ICRNL  # Enter as it was typed
            assert now[tty.LFLAG] & termios.ISIG  # Ctrl-C is a signal
        assert termios.tcgetattr(program) == before


def test_a_terminal_that_went_is_no_error() -> None:
    terminal, program = pty.openpty()
    with os.fdopen(program) as file:
        keyboard = Keyboard(Vt100Input(file), DummyOutput())
        with keyboard.silent():
            os.close(terminal)
        with keyboard.silent():
            pass
