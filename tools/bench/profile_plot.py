"""Draws where the time of steps goes, as SVG.

    gemmakv bench --profile --json > bench.json
    python tools/bench/profile_plot.py bench.json profile.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

Profile = dict[str, Any]  # as the JSON of `gemmakv bench` has it

# Parts that are alike have colors that are alike: products, attention, row
# work, and what several threads, or conversations, cost.
COLORS = {
    "qkv": "#08519c",
    "attention_output": "#3182bd",
    "gate_up": "#6baed6",
    "down": "#9ecae1",
    "experts": "#6a51a3",
    "per_layer_embeddings": "#807dba",
    "altup": "#9e9ac8",
    "recurrence": "#bcbddc",
    "head": "#08306b",
    "attention": "#31a354",
    "rope": "#fdae6b",
    "norms": "#fd8d3c",
    "activation": "#e6550d",
    "embedding": "#fdd0a2",
    "routing": "#a63603",
    "sampling": "#e7298a",
    "planning": "#969696",
    "drafting": "#737373",
    "masks": "#525252",
    "checks": "#bdbdbd",
    "joins": "#de2d26",
}
WIDTH, LEFT, RIGHT = 860, 170, 120
BAR, GAP, TOP = 24, 12, 30
KEY_COLUMNS, KEY_LINE = 5, 20
STYLE = (
    "text{font:13px sans-serif;fill:#222}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measured", type=Path, help="the JSON of gemmakv bench")
    parser.add_argument("drawn", type=Path, help="the SVG file to write")
    given = parser.parse_args(arguments)
    report = json.loads(given.measured.read_text("utf-8"))
    if not report["profile"]:
        parser.error(f"{given.measured}: expected that of bench --profile")
    title = (
        f"{report['model']}: time of steps by part, {report['threads']} "
        f"threads, {report['cpu']}"
    )
    given.drawn.write_text(picture(report["profile"], title), "utf-8")


def picture(profiles: Sequence[Profile], title: str) -> str:
    """Draws a bar for each work, of parts whose widths are their shares."""
    shown = [
        part
        for part in COLORS
        if any(p["parts"][part] > 0.002 * p["seconds"] for p in profiles)
    ]
    bars: list[str] = []
    y = TOP
    for profile in profiles:
        bars += _bar(profile, shown, y)
        y += BAR + GAP
    key: list[str] = []
    for i, part in enumerate(shown):
        column, line = i % KEY_COLUMNS, i // KEY_COLUMNS
        x = 12 + column * (WIDTH - 24) // KEY_COLUMNS
        at = y + 8 + line * KEY_LINE
        key += [
            f'<rect x="{x}" y="{at}" width="12" height="12" '
            f'fill="{COLORS[part]}"/>',
            f'<text x="{x + 18}" y="{at + 11}">{part}</text>',
        ]
    height = y + 16 + KEY_LINE * -(-len(shown) // KEY_COLUMNS)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} '
        f'{height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<text x="12" y="18">{escape(title)}</text>',
        *bars,
        *key,
        "</svg>",
        "",
    ])  # fmt: skip


def _bar(profile: Profile, shown: Sequence[str], y: int) -> list[str]:
    text_y = y + BAR - 7
    lines = [
        f'<text x="{LEFT - 8}" y="{text_y}" text-anchor="end">'
        f"{escape(profile['name'])}</text>"
    ]
    x = float(LEFT)
    for part in shown:
        share = profile["parts"][part] / profile["seconds"]
        width = share * (WIDTH - LEFT - RIGHT)
        if width > 0:
            lines.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" '
                f'height="{BAR}" fill="{COLORS[part]}">'
                f"<title>{part}: {100 * share:.1f} %</title></rect>"
            )
        x += width
    step = 1e3 * profile["seconds"] / profile["steps"]
    lines.append(
        f'<text x="{WIDTH - RIGHT + 8}" y="{text_y}">{step:.2f} ms a step'
        "</text>"
    )
    return lines


if __name__ == "__main__":
    main()
