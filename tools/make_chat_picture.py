#!/usr/bin/env python3
"""Draws docs/chat.svg: a real session of `gemmakv chat` with the demo model.

    python tools/make_chat_picture.py [OUT.svg]

Plays the lines below on a terminal of its own (pyte) and draws what
its screen shows (rich). Nothing of it is made up; numbers differ each time.
"""

from __future__ import annotations

import io
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from support.chat_screen import CTRL_D, Screen  # noqa: E402

COLUMNS, ROWS = 80, 40
# (session whose prompt waits, what is typed)
LINES = [
    ("main", "What is the capital of France?"),
    ("main", "/fork"),
    ("main-2", "What is the capital of Japan?"),
    ("main-2", "/tree"),
]
# As rich's, without fonts that a browser would have to load.
FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
font: {char_height}px/{line_height}px ui-monospace, Menlo, Consolas, monospace;
}}
.{unique_id}-title {{ font: bold 18px sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})"
 clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def color(name: str) -> str | None:
    """A color of pyte as rich names it."""
    if name == "default":
        return None
    if len(name) == 6 and all(c in "0123456789abcdefABCDEF" for c in name):
        return f"#{name}"
    if name.startswith("bright"):
        return f"bright_{name.removeprefix('bright')}"
    return {"brown": "yellow"}.get(name, name)


def looks(char: Any) -> Style:
    return Style(
        color=color(char.fg),
        bgcolor=color(char.bg),
        bold=char.bold,
        italic=char.italics,
        underline=char.underscore,
        reverse=char.reverse,
    )


def picture(screen: Screen) -> str:
    console = Console(width=COLUMNS, record=True, file=io.StringIO())
    for row in screen.rows():
        line = Text(no_wrap=True)
        for style, chars in itertools.groupby(row, looks):
            line.append("".join(char.data for char in chars), style)
        line.rstrip()
        console.print(line)
    svg = console.export_svg(
        title="gemmakv chat",
        theme=MONOKAI,
        code_format=FORMAT,
        unique_id="chat",
    )
    lines = (line.strip() for line in svg.splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def main() -> int:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/chat.svg"
    with tempfile.TemporaryDirectory() as folder:
        screen = Screen(
            "chat",
            columns=COLUMNS,
            rows=ROWS,
            XDG_DATA_HOME=folder,
            COLORTERM="truecolor",
        )
        try:
            for name, text in LINES:
                screen.wait_for_prompt(name)
                screen.line(text)
            screen.wait_for_prompt(LINES[-1][0])
            out.write_text(picture(screen), "utf-8")
            screen.type(CTRL_D)
            screen.wait_for_exit()
        finally:
            screen.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
