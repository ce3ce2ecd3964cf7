"""`gemmakv bench`: speed and memory beside the machine's limits."""

from __future__ import annotations

import dataclasses
import json

import typer

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
    """Measure speed and memory, as shares of what this machine could do.

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
    limits = report.limits
    kept = f" quantized to {report.quantize}" if report.quantize else ""
    table = console.table(
        f"medians of {report.rounds}", "measured", "limit", "share"
    )
    for row in report.rows:
        table.add_row(
            row.name,
            _quantity(row.value, row.unit),
            _quantity(row.limit, row.unit),
            f"{100 * row.share:.0f} %",
        )
    return console.render(
        f"{report.model}{kept}: {in_bytes(report.weight_bytes)} of weights "
        f"read by each step, packed weights: {report.packed_weights}",
        f"{report.cpu}, {report.target}, {report.threads} threads",
        f"limits: read {limits.read_bytes_per_s / 1e9:.1f} GB/s, 8-bit dot "
        f"{limits.int8_ops_per_s / 1e9:,.0f} GOP/s, float multiply-add "
        f"{limits.float_ops_per_s / 1e9:,.0f} GFLOP/s",
        table,
        f"\n{report.parallel_loops_per_token:.0f} parallel loops for a "
        "decoded token",
    )


def _quantity(value: float, unit: str) -> str:
    if unit == "bytes":
        return in_bytes(value)
    if unit == "s":
        return f"{value:.3f} s"
    return f"{value:,.0f} {unit}"
