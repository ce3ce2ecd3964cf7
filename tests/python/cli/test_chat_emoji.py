"""Emoji of several letters, where lines are edited."""

from __future__ import annotations

import pytest
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.document import Document
from prompt_toolkit.layout.controls import BufferControl
from prompt_toolkit.layout.processors import TransformationInput

from gemmakv.cli.chat.emoji import SeparateEmoji, separate

CASES = [
    ("", ""),
    ("plain é 日本", "plain é 日本"),
    ("a👨\u200d👩\u200d👧b", "a👨👩👧b"),
    ("👨\u200d", "👨"),  # while it is typed
    ("🇩🇪🇨🇭 🇩", "DECH D"),
    ("👍🏽!", "👍!"),
    ("❤\ufe0f ☎\ufe0e", "❤ ☎"),
    ("🏴\u200d☠\ufe0f", "🏴☠"),
    ("👩🏽\u200d🚀", "👩🚀"),
    # Scripts that need it; it has no width in any terminal.
    ("क\u094d\u200dष", "क\u094d\u200dष"),
    ("می\u200cخواهم", "می\u200cخواهم"),
]


@pytest.mark.parametrize("text, wanted", CASES)
def test_parts(text: str, wanted: str) -> None:
    assert separate(text) == wanted
    assert separate(wanted) == wanted


@pytest.mark.parametrize("text, wanted", CASES)
def test_a_line_that_is_edited(text: str, wanted: str) -> None:
    shown = SeparateEmoji().apply_transformation(
        TransformationInput(
            BufferControl(Buffer()),
            Document(text),
            0,
            lambda i: i,
            [("bold", text[:2]), ("", text[2:])],
            80,
            1,
        )
    )
    fragments = list(shown.fragments)
    assert "".join(fragment[1] for fragment in fragments) == wanted
    if wanted:
        assert fragments[0][0] == "bold"
    # The cursor is after what is shown of the letters before it.
    places = [shown.source_to_display(i) for i in range(len(text) + 2)]
    for i, place in enumerate(places[:-1]):
        assert len(separate(text[:i])) == place
    assert places[-1] == len(wanted) + 1
    for at in range(len(wanted) + 2):
        assert places[shown.display_to_source(at)] == at
