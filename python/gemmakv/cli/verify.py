"""`gemmakv verify`: many ways of computing, one result."""

from __future__ import annotations

import dataclasses
import json
from itertools import groupby

import typer
from rich.table import Table

from gemmakv.cli import EXIT_FAILURE, console
from gemmakv.cli.arguments import QUANTIZE, THREADS, examples, model_option
from gemmakv.diagnostics import _verify as check

EXAMPLES = examples(
    "gemmakv verify",
    "gemmakv verify -m org/repo/model-Q4_K_M.gguf --tokens 2000",
    "gemmakv verify --json > report.json && echo sound",
)


def verify(
    model: str = model_option("gemma-3-270m"),
    tokens: int | None = typer.Option(
        None,
        metavar="N",
        help="How many to compute; default: enough to leave the sliding "
        "window, fewer on slow machines.",
    ),
    kv_dtype: str = typer.Option(
        "bf16", metavar="TYPE", help="f32, bf16 or int8."
    ),
    threads: int | None = THREADS,
    quantize: str | None = QUANTIZE,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> int:
    """Prove that every way of computing gives the same bits here.

    Computes the same tokens in one chunk and in many, with other numbers of
    threads, in a batch, on a fork, after a restore and a rewind, by several
    callers at once and on each SIMD target of this processor, and compares a
    hash of the logits of each. Takes half a minute for a small model.

    The exit code is 0 if all agree, 1 if not.
    """
    path = console.fetch(model)
    with console.work_progress("verifying") as progress:
        report = check.run(
            path,
            tokens=tokens,
            kv_dtype=kv_dtype,
            threads=threads,
            quantize=quantize,
            progress=progress,
        )
    report = dataclasses.replace(report, model=model)
    if as_json:
        document = dataclasses.asdict(report) | {"equal": report.equal}
        console.write(json.dumps(document) + "\n")
    else:
        console.write(_render(report))
    return 0 if report.equal else EXIT_FAILURE


def _render(report: check.Report) -> str:
    kept = f" quantized to {report.quantize}" if report.quantize else ""
    groups = groupby(report.checks, key=lambda entry: entry.arithmetic)
    return console.render(
        f"{report.model}{kept} on {report.cpu}",
        f"{report.tokens:,} tokens, {report.kv_dtype} cache, "
        f"{report.threads} threads and {report.target} unless said otherwise",
        f"SHA256 of the logits at the last {report.positions} positions "
        f"({report.positions * report.vocab_size * 4 / 1e6:.0f} MB of "
        "float32)",
        *(_table(name, list(entries)) for name, entries in groups),
        "\n" + _verdict(report),
    )


def _table(arithmetic: str, checks: list[check.Check]) -> Table:
    table = console.table(arithmetic, "logits", "", "s", left=3)
    for i, entry in enumerate(checks):
        verdict = "equal" if entry.equal else "DIFFERS"
        table.add_row(
            entry.way,
            entry.digest[:16],
            "reference" if i == 0 and entry.equal else verdict,
            f"{entry.seconds:.1f}",
        )
    return table


def _verdict(report: check.Report) -> str:
    different = [entry.way for entry in report.checks if not entry.equal]
    count = len(report.checks)
    if different:
        return (
            f"{len(different)} of {count} ways DIFFER: "
            + "; ".join(different)
            + "\nPlease report this with the output of --json."
        )
    arithmetics = len({entry.arithmetic for entry in report.checks})
    if arithmetics == 1:
        return f"All {count} ways give the same bits."
    return (
        f"All {count} ways agree. Targets without fused multiply-add round "
        "differently,\nso they agree among themselves; a cache made with one "
        "kind is refused with the\nother."
    )
