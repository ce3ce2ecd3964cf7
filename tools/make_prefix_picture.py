#!/usr/bin/env python3
"""Draws docs/prefix-cache.svg: what requests of many chats took from where.

    python tools/make_prefix_picture.py [OUT.svg] [--model gemma-3-270m] \
        [--chats 24] [--turns 6] [--disk DIR]

Runs chats by turns (tools/bench/chats.py) with a RAM tier of a quarter of their
size and a disk below, asks `stats()` after each request, and draws that.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "bench"))

from chats import Chats, Ours, Shape, chat_bytes  # noqa: E402

import gemmakv  # noqa: E402

WIDTH, HEIGHT = 800, 460
LEFT, RIGHT = 78, 14
TOP, GAP = 62, 58  # above the first panel, between the two
PANEL = 140
MIB = 1 << 20
# Both on white and on black.
COLORS = {"computed": "#e0672f", "ram": "#4a8fe0", "disk": "#2e9e76"}
NAMES = {
    "ram": "from RAM", "disk": "from disk", "computed": "computed",
}
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f; }
.title { font-weight: 600; }
.axis, .grid { stroke: #57606a; stroke-width: 1; }
.grid { stroke-opacity: .22; }
.line { fill: none; stroke-width: 2; }
.budget { stroke-dasharray: 5 4; stroke-width: 1.2; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.axis, .grid { stroke: #8b949e; }
}
"""


@dataclasses.dataclass(frozen=True)
class Sample:
    """After one request: its positions by origin; bytes of each tier."""

    positions: dict[str, int]
    bytes: dict[str, int]


def run(
    gemma: gemmakv.Gemma, prefix: gemmakv.PrefixCache, shape: Shape
) -> list[Sample]:
    samples = []
    chats = Chats(shape, gemma.config)
    before = prefix.stats().cached
    for _ in range(shape.turns):
        for answer in chats.round(Ours(gemma)):
            stats = prefix.stats()
            positions = {
                tier: stats.cached.get(tier, 0) - before.get(tier, 0)
                for tier in ("ram", "disk")
            }
            positions["computed"] = answer.computed
            samples.append(Sample(positions, stats.bytes))
            before = stats.cached
    return samples


def round_step(most: float) -> float:
    """Of an axis that ends at `most`: three to six steps."""
    step = 1.0
    while most / step > 6:
        step *= 2.5 if str(step)[0] == "2" else 2
    return step


class Panel:
    """A part of the picture with axes: x from 0 to `count`, y up to `most`."""

    def __init__(
        self, top: float, title: str, count: int, most: float
    ) -> None:
        self.top, self.count = top, count
        self.step = round_step(most)
        self.most = self.step * -(-most // self.step)
        self.parts = [
            f'<text class="title" x="{LEFT}" y="{top - 12}">{title}</text>'
        ]
        for i in range(round(self.most / self.step) + 1):
            y = self.y(i * self.step)
            self.parts += [
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" '
                f'y1="{y:.1f}" y2="{y:.1f}"/>',
                f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
                f"{i * self.step:,.0f}</text>",
            ]

    def x(self, at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at / self.count

    def y(self, value: float) -> float:
        return self.top + PANEL * (1 - value / self.most)

    def turns(self, turns: int) -> None:
        for turn in range(turns + 1):
            x = self.x(self.count * turn / turns)
            self.parts.append(
                f'<line class="{"grid" if turn else "axis"}" x1="{x:.1f}" '
                f'x2="{x:.1f}" y1="{self.top}" y2="{self.top + PANEL}"/>'
            )
            if turn:
                x -= (self.x(self.count) - LEFT) / turns / 2
                self.parts.append(
                    f'<text x="{x:.1f}" y="{self.top + PANEL + 18}" '
                    f'text-anchor="middle">turn {turn}</text>'
                )

    def band(
        self, low: Sequence[float], high: Sequence[float], color: str
    ) -> None:
        """A value for each x, as steps."""
        def steps(values: Sequence[float], order: range) -> list[str]:
            points = []
            for i in order:
                ends = (i, i + 1) if order.step > 0 else (i + 1, i)
                points += [
                    f"{self.x(at):.1f},{self.y(values[i]):.1f}" for at in ends
                ]
            return points

        count = len(low)
        points = steps(high, range(count))
        points += steps(low, range(count - 1, -1, -1))
        self.parts.append(
            f'<polygon fill="{color}" points="{" ".join(points)}"/>'
        )

    def line(self, values: Sequence[float], color: str) -> None:
        points = " ".join(
            f"{self.x(i + 1):.1f},{self.y(value):.1f}"
            for i, value in enumerate(values)
        )
        self.parts.append(
            f'<polyline class="line" stroke="{color}" points="{points}"/>'
        )

    def budget(self, value: float, color: str, text: str) -> None:
        y = self.y(value)
        self.parts += [
            f'<line class="budget" stroke="{color}" x1="{LEFT}" '
            f'x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
            f'<text x="{WIDTH - RIGHT - 4}" y="{y - 6:.1f}" '
            f'text-anchor="end">{text}</text>',
        ]


def picture(samples: list[Sample], shape: Shape, budget: int) -> str:
    count = len(samples)
    upper = Panel(
        TOP, "Positions of each request, by where they came from", count,
        max(sum(s.positions.values()) for s in samples),
    )
    low = [0.0] * count
    for name in NAMES:
        high = [
            base + s.positions[name] for base, s in zip(low, samples)
        ]
        upper.band(low, high, COLORS[name])
        low = high
    lower = Panel(
        TOP + PANEL + GAP, "MiB in each tier", count,
        max(max(s.bytes.values()) for s in samples) / MIB,
    )
    for tier in ("ram", "disk"):
        lower.line([s.bytes[tier] / MIB for s in samples], COLORS[tier])
    lower.budget(budget / MIB, COLORS["ram"], "budget of RAM")
    x, legend = float(LEFT), []
    for name, text in NAMES.items():
        legend.append(
            f'<rect x="{x}" y="14" width="12" height="12" '
            f'fill="{COLORS[name]}"/>'
            f'<text x="{x + 18}" y="25">{text}</text>'
        )
        x += 110
    for panel in (upper, lower):
        panel.turns(shape.turns)
    computed = sum(s.positions["computed"] for s in samples)
    summary = (
        f"{shape.chats} chats x {shape.turns} turns: {computed:,} positions "
        f"computed, {shape.needed:,} never computed before"
    )
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} '
        f'{HEIGHT}" role="img">',
        f"<title>{summary}</title>",
        f"<style>{STYLE}</style>",
        *legend, *upper.parts, *lower.parts,
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">'
        f"{summary}</text>",
        "</svg>", "",
    ])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "out", nargs="?", type=Path, default=ROOT / "docs/prefix-cache.svg")
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--chats", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    args = parser.parse_args()
    shape = Shape(chats=args.chats, turns=args.turns)
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        plain = gemmakv.Gemma.load(args.model, prefix_cache=False)
        budget = shape.chats * chat_bytes(plain, shape) // 4
        with gemmakv.PrefixCache(
            ram=budget, disk=os.path.join(folder, "prefixes")
        ) as prefix:
            gemma = gemmakv.Gemma.load(args.model, prefix_cache=prefix)
            samples = run(gemma, prefix, shape)
    args.out.write_text(picture(samples, shape, budget), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
