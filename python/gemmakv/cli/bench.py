"""`gemmakv bench`: speed and memory beside the machine's limits."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import typer

from gemmakv._support.sizes import in_bytes
from gemmakv.cli import console
from gemmakv.cli.arguments import (
    PIN_THREADS,
    QUANTIZE,
    THREADS,
    examples,
    model_option,
)
from gemmakv.diagnostics import _bench as measure
from gemmakv.diagnostics._profile import table_of

EXAMPLES = examples(
    "gemmakv bench",
    "gemmakv bench -m model.gguf --threads 4 --rounds 9",
    "gemmakv bench --json > bench.json",
    "gemmakv bench --profile",
)


def _moved(flag: str, tool: str) -> Any:
    """Makes a flag of former versions, which names the tool that took over."""

    def refuse(given: str | None) -> None:
        if given is not None:
            raise typer.BadParameter(
                f"expected none, found {given!r}: {tool} of the sources does "
                "that"
            )

    return typer.Option(None, flag, hidden=True, callback=refuse)


def bench(
    model: str = model_option("gemma-3-270m"),
    threads: int | None = THREADS,
    pin_threads: bool = PIN_THREADS,
    quantize: str | None = QUANTIZE,
    draft: str | None = _moved("--draft", "tools/bench/speculation.py"),
    rounds: int = typer.Option(
        5, metavar="N", help="Number of rounds; their medians are shown."
    ),
    no_packed_cache: bool = typer.Option(
        False, "--no-packed-cache", help="Load without a packed file."
    ),
    profile: bool = typer.Option(
        False, "--profile", help="Also show where the time of steps goes."
    ),
    plot: str | None = _moved("--plot", "tools/bench/profile_plot.py"),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Measure speed and memory, as shares of what this machine could do.

    Prefill, decode, batches, loading and memory of a model, each as a share
    of what the measured bandwidth and arithmetic of the machine allow: a
    token a step, without guesses.
    """
    del draft, plot
    path = console.fetch(model)
    with console.work_progress("measuring") as progress:
        report = measure.run(
            path,
            threads=threads,
            pin_threads=pin_threads,
            rounds=rounds,
            packed_cache=not no_packed_cache,
            quantize=quantize,
            profile=profile,
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
    left_out = [
        f"left out, longer than the model's context: {name}"
        for name in report.left_out
    ]
    parts: list[Any] = []
    if report.profile:
        head, *lines = table_of(report.profile)
        shares = console.table("share of a step's time", *head[1:])
        for line in lines:
            shares.add_row(*line)
        parts = [shares]
    return console.render(
        f"{report.model}{kept}: {in_bytes(report.weight_bytes)} of weights "
        f"read by each step, packed weights: {report.packed_weights}",
        f"{report.cpu}, {report.target}",
        str(report.placement),
        f"limits: read {limits.read_bytes_per_s / 1e9:.1f} GB/s, 8-bit dot "
        f"{limits.int8_ops_per_s / 1e9:,.0f} GOP/s, float multiply-add "
        f"{limits.float_ops_per_s / 1e9:,.0f} GFLOP/s",
        table,
        *left_out,
        f"\n{report.parallel_loops_per_token:.0f} parallel loops for a "
        "decoded token\n",
        *parts,
    )


def _quantity(value: float, unit: str) -> str:
    if unit == "bytes":
        return in_bytes(value)
    if unit == "s":
        return f"{value:.3f} s"
    return f"{value:,.0f} {unit}"
