"""`gemmakv bench`: speed and memory beside the machine's limits."""

from __future__ import annotations

import dataclasses
import io
import json

import typer
from rich.console import Console
from rich.table import Table

from gemmakv._support.sizes import in_bytes
from gemmakv.cli import console
from gemmakv.cli.arguments import QUANTIZE, THREADS, examples, model_option
from gemmakv.diagnostics import _bench as measure

EXAMPLES = examples(
    "gemmakv bench",
    "gemmakv bench -m model.gguf --threads 4 --rounds 9",
    "gemmakv bench --json > bench.json",
)


def bench(
    model: str = model_option("gemma-3-270m"),
    threads: int | None = THREADS,
    quantize: str | None = QUANTIZE,
    rounds: int = typer.Option(
        5, metavar="N", help="Rounds that the medians are of."
    ),
    no_packed_cache: bool = typer.Option(
        False, "--no-packed-cache", help="Load without a packed file."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Measure speed and memory beside what this machine could do at most.

    Prefill, decode, batches, loading and memory of a model, each as a share
    of what the measured bandwidth and arithmetic of the machine allow.
    """
    path = console.fetch(model)
    with console.work_progress("measuring") as progress:
        report = measure.run(
            path,
            threads=threads,
            rounds=rounds,
            packed_cache=not no_packed_cache,
            quantize=quantize,
            progress=progress,
        )
    report = dataclasses.replace(report, model=model)
    if as_json:
        console.write(json.dumps(dataclasses.asdict(report)) + "\n")
    else:
        console.write(_render(report))


def _render(report: measure.Report) -> str:
    """Plain text: the same on a terminal, in a pipe and in a narrow window."""
    out = io.StringIO()
    page = Console(file=out, width=200, highlight=False, markup=False)
    limits = report.limits
    kept = f" quantized to {report.quantize}" if report.quantize else ""
    page.print(
        f"{report.model}{kept}: {in_bytes(report.weight_bytes)} of weights "
        f"read by each step, packed weights: {report.packed_weights}"
    )
    page.print(f"{report.cpu}, {report.target}, {report.threads} threads")
    page.print(
        f"limits: read {limits.read_bytes_per_s / 1e9:.1f} GB/s, 8-bit dot "
        f"{limits.int8_ops_per_s / 1e9:,.0f} GOP/s, float multiply-add "
        f"{limits.float_ops_per_s / 1e9:,.0f} GFLOP/s"
    )
    page.print()
    table = Table(box=None, pad_edge=False)
    table.add_column(f"medians of {report.rounds}")
    for name in ("measured", "limit", "share"):
        table.add_column(name, justify="right")
    for row in report.rows:
        table.add_row(
            row.name,
            _quantity(row.value, row.unit),
            _quantity(row.limit, row.unit),
            f"{100 * row.share:.0f} %",
        )
    page.print(table)
    page.print()
    page.print(
        f"{report.parallel_loops_per_token:.0f} parallel loops for a decoded "
        "token"
    )
    lines = out.getvalue().splitlines()
    return "".join(line.rstrip() + "\n" for line in lines)


def _quantity(value: float, unit: str) -> str:
    if unit == "bytes":
        return in_bytes(value)
    if unit == "s":
        return f"{value:.3f} s"
    return f"{value:,.0f} {unit}"
