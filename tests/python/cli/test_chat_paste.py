"""Pastes as keys."""

from __future__ import annotations

import pytest
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

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
