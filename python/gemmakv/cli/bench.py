"""`gemmakv bench`: speed and memory beside the machine's limits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import typer

from gemmakv._support.files import write_atomically
from gemmakv._support.sizes import in_bytes
from gemmakv.cli import console
from gemmakv.cli.arguments import (
    DRAFT,
    PIN_THREADS,
    QUANTIZE,
    THREADS,
    examples,
    model_option,
)
from gemmakv.diagnostics import _bench as measure
from gemmakv.diagnostics._profile import table_of
from gemmakv.diagnostics._profile_plot import picture

EXAMPLES = examples(
    "gemmakv bench",
    "gemmakv bench -m model.gguf --threads 4 --rounds 9",
    "gemmakv bench --json > bench.json",
    "gemmakv bench --profile --plot profile.svg",
    "gemmakv bench -m large.gguf --draft gemma-3-270m",
)


def bench(
    model: str = model_option("gemma-3-270m"),
    threads: int | None = THREADS,
    pin_threads: bool = PIN_THREADS,
    quantize: str | None = QUANTIZE,
    draft: str | None = DRAFT,
    rounds: int = typer.Option(
        5, metavar="N", help="Rounds that the medians are of."
    ),
    no_packed_cache: bool = typer.Option(
        False, "--no-packed-cache", help="Load without a packed file."
    ),
    profile: bool = typer.Option(
        False, "--profile", help="Also where the time of steps goes."
    ),
    plot: str | None = typer.Option(
        None, metavar="FILE", help="Draw that as SVG, too; for --profile."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Measure speed and memory, as shares of what this machine could do.

    Prefill, decode, batches, loading and memory of a model, each as a share
    of what the measured bandwidth and arithmetic of the machine allow: a
    token a step, without guesses. What these bring by lookup, and by a draft
    model, is measured besides.
    """
    if plot is not None and not profile:
        raise typer.BadParameter(
            "it draws what --profile measures: expected both",
            param_hint="--plot",
        )
    # Before minutes of measuring. An empty path is this folder.
    if plot is not None and (
        Path(plot).is_dir() or not Path(plot).parent.is_dir()
    ):
        raise typer.BadParameter(
            f"{plot!r}: expected a file in a folder that is there",
            param_hint="--plot",
        )
    path = console.fetch(model)
    guesses = console.load_draft(draft, path, threads, not no_packed_cache)
    with console.work_progress("measuring") as progress:
        report = measure.run(
            path,
            threads=threads,
            pin_threads=pin_threads,
            rounds=rounds,
            packed_cache=not no_packed_cache,
            quantize=quantize,
            profile=profile,
            draft=guesses,
            progress=progress,
        )
    report = dataclasses.replace(report, model=model)
    if plot is not None:
        write_atomically(plot, _picture(report).encode("utf-8"))
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
    guesses = console.table(
        "speculation",
        "with",
        "without",
        "ratio",
        "guesses right, in all",
    )
    for spec in report.speculation:
        guesses.add_row(
            f"{spec.speculate}: {spec.name}",
            _quantity(spec.tokens_per_s, "tokens/s"),
            _quantity(spec.without_tokens_per_s, "tokens/s"),
            f"{spec.ratio:.2f}",
            f"{spec.accepted} of {spec.drafted}",
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
        guesses,
        *parts,
    )


def _picture(report: measure.Report) -> str:
    return picture(
        report.profile or [],
        f"{report.model}: time of steps by part, {report.threads} threads, "
        f"{report.cpu}",
    )


def _quantity(value: float, unit: str) -> str:
    if unit == "bytes":
        return in_bytes(value)
    if unit == "s":
        return f"{value:.3f} s"
    return f"{value:,.0f} {unit}"
