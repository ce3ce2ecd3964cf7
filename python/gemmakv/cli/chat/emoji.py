"""Emoji of several letters, shown so that all terminals agree on their width.

Some terminals draw a family, a flag or a hand with its skin tone as one
picture, and others draw the letters that it is made of. No terminal tells
which it does, so nobody knows where its cursor is after such an emoji. Where
lines are edited, the letters that join are therefore left out.
"""

from __future__ import annotations

import re
from bisect import bisect_left

from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.layout.processors import (
    Processor,
    Transformation,
    TransformationInput,
)
from prompt_toolkit.layout.utils import explode_text_fragments

# How an emoji looks, its skin tone, and the joiner after an emoji. Elsewhere
# a joiner has no width, and scripts need it.
_JOINING = re.compile(
    "[\ufe0e\ufe0f\U0001f3fb-\U0001f3ff]"
    "|(?<=[\u2000-\u33ff\ufe0f\U0001f000-\U0001faff])\u200d"
)
# Two of them are a flag.
_FLAG_LETTERS = {0x1F1E6 + i: chr(ord("A") + i) for i in range(26)}


def separate(text: str) -> str:
    """Returns what is shown of a text: no two letters join in any terminal."""
    return _JOINING.sub("", text).translate(_FLAG_LETTERS)


class SeparateEmoji(Processor):
    """Shows a line that is edited as `separate` does; it changes nothing."""

    def apply_transformation(
        self, transformation_input: TransformationInput
    ) -> Transformation:
        letters = explode_text_fragments(transformation_input.fragments)
        text = "".join(fragment[1] for fragment in letters)
        if separate(text) == text:
            return Transformation(transformation_input.fragments)
        left_out = [found.start() for found in _JOINING.finditer(text)]
        shown = sorted({*range(len(text))}.difference(left_out))
        fragments: StyleAndTextTuples = [
            (letters[i][0], text[i].translate(_FLAG_LETTERS)) for i in shown
        ]

        def to_display(i: int) -> int:
            return i - bisect_left(left_out, i)

        def to_source(i: int) -> int:
            return shown[i] if i < len(shown) else i + len(left_out)

        return Transformation(fragments, to_display, to_source)
