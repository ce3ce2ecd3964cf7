"""Numbers in the text format of Prometheus."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping

_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 120.0, 300.0,
)  # fmt: skip
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

Labels = tuple[tuple[str, str], ...]
Numbers = float | Mapping[str, float] | Mapping[tuple[str, ...], float]


class Counter:
    """A number of each combination of labels."""

    kind = "counter"

    def __init__(self, name: str, help: str) -> None:
        self.name = name
        self.help = help
        self.values: dict[Labels, float] = {}

    def add(self, amount: float = 1, **labels: str) -> None:
        key = tuple(sorted(labels.items()))
        self.values[key] = self.values.get(key, 0) + amount

    def start(self, **labels: str) -> None:
        """Has the number said before it has counted."""
        self.add(0, **labels)

    def lines(self) -> Iterable[str]:
        for labels, value in self.values.items():
            yield _line(self.name, labels, value)


class Histogram:
    """Seconds, by how many took how long."""

    kind = "histogram"

    def __init__(self, name: str, help: str) -> None:
        self.name = name
        self.help = help
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(_SECONDS, seconds)] += times
        self._sum += seconds * times

    def lines(self) -> Iterable[str]:
        total = 0
        for bound, count in zip((*_SECONDS, math.inf), self._counts):
            total += count
            text = "+Inf" if math.isinf(bound) else f"{bound:g}"
            yield _line(f"{self.name}_bucket", (("le", text),), total)
        yield _line(f"{self.name}_sum", (), self._sum)
        yield _line(f"{self.name}_count", (), total)


class Gauge:
    """What is read when it is asked for: a number, or one for each value of a
    label, or for each tuple of values of several.
    """

    kind = "gauge"

    def __init__(
        self,
        name: str,
        help: str,
        read: Callable[[], Numbers],
        label: str | tuple[str, ...] = "",
        kind: str = "gauge",
    ) -> None:
        self.name = name
        self.help = help
        self.kind = kind
        self._read = read
        self._label = label

    def lines(self) -> Iterable[str]:
        found = self._read()
        if not isinstance(found, Mapping):
            yield _line(self.name, (), found)
            return
        names = (self._label,) if isinstance(self._label, str) else self._label
        for key, number in found.items():
            values = (key,) if isinstance(key, str) else key
            labels = tuple(zip(names, values, strict=True))
            yield _line(self.name, labels, number)


Metric = Counter | Histogram | Gauge


def text_of(metrics: Iterable[Metric]) -> str:
    """What a scrape is answered."""
    lines = []
    for metric in metrics:
        lines.append(f"# HELP {metric.name} {metric.help}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        lines += metric.lines()
    return "\n".join(lines) + "\n"


def merged(texts: Iterable[str], before: Iterable[str] = ()) -> str:
    """One scrape of several: what counts is added, also that of `before`.

    So are other numbers, those of `before` left out. Of what is said of a tier
    that processes share, the largest is it.
    """
    heads: dict[str, list[str]] = {}
    values: dict[str, dict[str, float]] = {}
    for counts_alone, text in (
        *((False, text) for text in texts), *((True, text) for text in before)
    ):  # fmt: skip
        name, kind = "", ""
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name, help_line = line.split(" ", 3)[2], line
            elif line.startswith("# TYPE "):
                kind = line.rsplit(" ", 1)[1]
                heads.setdefault(name, [help_line, line])
                values.setdefault(name, {})
            elif line and (kind != "gauge" or not counts_alone):
                series, _, number = line.rpartition(" ")
                _add(values[name], series, float(number), kind)
    lines = []
    for name, head in heads.items():
        lines += head
        lines += (f"{k} {v:.10g}" for k, v in values[name].items())
    return "\n".join(lines) + "\n"


def _add(
    values: dict[str, float], series: str, value: float, kind: str
) -> None:
    known = values.get(series, 0)
    shared = kind == "gauge" and any(
        f'tier="{tier}"' in series for tier in ("shared", "disk", "remote")
    )
    values[series] = max(known, value) if shared else known + value


def _line(name: str, labels: Labels, value: float) -> str:
    inner = ",".join(f'{k}="{v.translate(_ESCAPES)}"' for k, v in labels)
    return (
        f"{name}{{{inner}}} {value:.10g}" if inner else (f"{name} {value:.10g}")
    )
