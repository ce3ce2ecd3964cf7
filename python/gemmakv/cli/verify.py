"""`gemmakv verify`: many ways of computing, one result; or a reference."""

from __future__ import annotations

import dataclasses
import json
from itertools import groupby

import typer
from rich.table import Table

from gemmakv.cli import EXIT_FAILURE, console
from gemmakv.cli.arguments import (
    QUANTIZE,
    THREADS,
    check_kv_dtype,
    examples,
    model_option,
)
from gemmakv.diagnostics import _reference
from gemmakv.diagnostics import _verify as check
from gemmakv.errors import unexpected

EXAMPLES = examples(
    "gemmakv verify",
    "gemmakv verify -m org/repo/model-Q4_K_M.gguf --tokens 2000",
    "gemmakv verify --json > report.json && echo sound",
    "gemmakv verify -m ./gemma-3-1b-it --reference ./gemma-3-1b-it",
)

_LIMIT = 0.01  # activations of 8 bits cost 0.001 to 0.002, a wrong scale nats


def verify(
    model: str = model_option("gemma-3-270m"),
    tokens: int | None = typer.Option(
        None,
        metavar="N",
        help="Number of tokens to compute. Default: enough to leave the "
        "sliding window, fewer on slow machines.",
    ),
    kv_dtype: str | None = typer.Option(
        None,
        metavar="TYPE",
        callback=check_kv_dtype,
        help="How keys and values are stored: f32, bf16 or int8. Default: "
        "bf16; f32 with --reference.",
    ),
    threads: int | None = THREADS,
    quantize: str | None = QUANTIZE,
    reference: str | None = typer.Option(
        None,
        metavar="PATH",
        help="Compare with what transformers computes of this directory or "
        "GGUF file instead (needs torch and transformers).",
    ),
    limit: float | None = typer.Option(
        None,
        metavar="KL",
        help="With --reference: the largest mean KL, in nats, that counts as "
        "agreement. Default: 0.01.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> int:
    """Prove that every way of computing gives the same bits here.

    Computes the same tokens in one chunk and in many, with other numbers of
    threads, in a batch, on a fork, after a restore and a rewind, by several
    callers at once and on each SIMD target of this processor, and compares a
    hash of the logits of each. Takes half a minute for a small model.

    With --reference, compares logits with those of transformers in float32, of
    tokens that the model writes: 256, or as many as --tokens says.

    The exit code is 0 if all agree, 1 if not.
    """
    if limit is not None and reference is None:
        raise typer.BadParameter(
            "expected it with --reference alone", param_hint="--limit"
        )
    path = console.fetch(model)
    if reference is not None:
        return _against(
            path, model, reference, tokens, kv_dtype, threads, quantize,
            _LIMIT if limit is None else limit, as_json,
        )  # fmt: skip
    with console.work_progress("verifying") as progress:
        report = check.run(
            path,
            tokens=tokens,
            kv_dtype=kv_dtype or "bf16",  # type: ignore[arg-type]
            threads=threads,
            quantize=quantize,  # type: ignore[arg-type]
            progress=progress,
        )
    report = dataclasses.replace(report, model=model)
    if as_json:
        document = dataclasses.asdict(report) | {"equal": report.equal}
        console.write(json.dumps(document) + "\n")
    else:
        console.write(_render(report))
    return 0 if report.equal else EXIT_FAILURE


def _against(
    path: str,
    model: str,
    reference: str,
    tokens: int | None,
    kv_dtype: str | None,
    threads: int | None,
    quantize: str | None,
    limit: float,
    as_json: bool,
) -> int:
    if not limit >= 0:
        raise unexpected("limit", "a number of at least 0", limit)
    try:
        with console.work_progress("comparing") as progress:
            report = _reference.against(
                path,
                reference,
                tokens=tokens,
                kv_dtype=kv_dtype or "f32",  # type: ignore[arg-type]
                threads=threads,
                quantize=quantize,  # type: ignore[arg-type]
                progress=progress,
            )
    except ModuleNotFoundError as error:
        raise ValueError(f"reference: {error}") from None
    report = dataclasses.replace(report, model=model)
    agrees = report.mean_kl <= limit
    if as_json:
        document = dataclasses.asdict(report)
        document |= {"limit": limit, "agrees": agrees}
        console.write(json.dumps(document) + "\n")
    else:
        console.write(_render_reference(report, limit))
    return 0 if agrees else EXIT_FAILURE


def _render_reference(report: _reference.ReferenceReport, limit: float) -> str:
    kept = f" quantized to {report.quantize}" if report.quantize else ""
    made = ", ".join(f"{name} {v}" for name, v in report.versions.items())
    table = console.table("", "", left=1)
    window = report.sliding_window
    beyond = f" (sliding window {window:,})" if window else ""
    for name, value in (
        ("tokens compared", f"{report.tokens:,}{beyond}"),
        ("mean KL, nats", f"{report.mean_kl:.3g}"),
        (
            "largest KL",
            f"{report.max_kl:.3g} at position {report.max_kl_position:,}",
        ),
        ("same most likely token", f"{report.same_top:.2%}"),
        ("largest difference, of the range", f"{report.max_difference:.3g}"),
    ):
        table.add_row(name, value)
    parts: list[str | Table] = [
        f"{report.model}{kept}, {report.kv_dtype} cache",
        f"against {report.reference} in float32 ({made})",
        table,
    ]
    if report.differences:
        other = console.table(
            "position", "after", "reference", "p", "found", "p", left=3
        )
        for one in report.differences:
            other.add_row(
                f"{one.position:,}",
                repr(one.before)[-40:],
                repr(one.reference),
                f"{one.reference_probability:.3f}",
                repr(one.found),
                f"{one.found_probability:.3f}",
            )
        parts.append("\nFirst positions with another most likely token:")
        parts.append(other)
    verdict = "It agrees" if report.mean_kl <= limit else "It DIFFERS"
    parts.append(f"\n{verdict}: a mean KL of up to {limit:g} is allowed.")
    return console.render(*parts)


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
