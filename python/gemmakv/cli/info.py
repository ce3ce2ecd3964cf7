"""`gemmakv info`: what a model holds; the named types."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.table import Table

from gemmakv._support.sizes import in_bytes
from gemmakv.cli import console, model_files, model_types
from gemmakv.cli.arguments import MODEL_HELP, complete_model, examples
from gemmakv.diagnostics._cpu import cpu_info

EXAMPLES = examples(
    "gemmakv info gemma-3-270m",
    "gemmakv info --tensors model.gguf",
    "gemmakv info --types",
    "gemmakv info --cpu",
    "gemmakv info --json org/repo | jq .model.kv_cache",
)


def info(
    file: str | None = typer.Argument(
        None, metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model
    ),
    tensors: bool = typer.Option(
        False, "--tensors", help="List every tensor with its type and shape."
    ),
    types: bool = typer.Option(
        False,
        "--types",
        help="Instead of a MODEL: the named types that create_kv_cache knows, "
        "with the bytes of their caches.",
    ),
    cpu: bool = typer.Option(
        False,
        "--cpu",
        help="Instead of a MODEL: the processors that this process may use, "
        "and where threads are placed.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show what a model holds.

    Architecture, parameters, tensor types, and the bytes that a KV cache
    takes for each way of storing it. Only the headers of its files are read.
    """
    if cpu:
        if file is not None or tensors or types:
            raise typer.BadParameter(
                "expected no MODEL, --tensors or --types with it",
                param_hint="--cpu",
            )
        document: dict[str, Any] = {"cpu": cpu_info()}
        text = _render_cpu(document["cpu"])
    elif types:
        if file is not None or tensors:
            raise typer.BadParameter(
                "expected no MODEL or --tensors with it; --tensors MODEL "
                "lists the tensors of a model",
                param_hint="--types",
            )
        document = {"types": model_types.describe_all()}
        text = model_types.render(document["types"])
    elif file is None:
        raise typer.BadParameter(
            "expected a model, --types or --cpu", param_hint="MODEL"
        )
    else:
        document = model_files.describe(console.fetch(file))
        if not tensors:
            del document["tensors"]
        text = _render(document)
    if as_json:
        text = json.dumps(document, ensure_ascii=False) + "\n"
    console.write(text)


def _render(document: dict[str, Any]) -> str:
    keys = (
        "file", "name", "format", "architecture", "gguf_version",
        "parameters",
    )  # fmt: skip
    shown = {k: document[k] for k in keys if k in document}
    shown["tensor_bytes"] = _count(document["tensor_bytes"])
    title = console.facts(shown)
    tables = [title, _types_table(document["types"])]
    if "left_out" in document:
        title.add_row("not used", document["left_out"])
    model = document["model"]
    if model is None:
        title.add_row("supported", f"no: {document['reason']}")
    else:
        for key, value in model.items():
            if key not in document and key != "kv_cache":
                title.add_row(key.replace("_", " "), _shown(value))
        if any(any(s.values()) for s in model["kv_cache"].values()):
            context = model["context_length"]
            tables.append(_kv_table(model["kv_cache"], context))
        elif not model["state_bytes"]:
            title.add_row("KV cache", "none: it holds no conversation")
    if "tensors" in document:
        tables.append(_tensors_table(document["tensors"]))
    return console.render(*tables)


def _render_cpu(cpu: dict[str, Any]) -> str:
    """Its cores, and in what order pinned threads take them."""
    shown = {
        "cpu": cpu["cpu"],
        "kernels": cpu["target"],
        "compiled for": ", ".join(cpu["compiled"]),
        "processors": cpu["threads"],
        "cores": cpu["cores"],
        "NUMA nodes": cpu["nodes"],
        "quota": cpu["quota"],
        "threads by default": cpu["default_threads"],
    }
    for size in ("l1_bytes", "l2_bytes", "l3_bytes"):
        shown[f"{size[:2].upper()} cache"] = in_bytes(cpu[size])
    table = console.table("pinned thread", "processor", "core", "NUMA node")
    for thread, place in enumerate(cpu["placement"]):
        table.add_row(str(thread), *map(str, place))
    return console.render(console.facts(shown), table)


def _shown(value: Any) -> str:
    if value is None:
        return "none of the named ones"
    if isinstance(value, list):  # one for each layer
        sizes = " or ".join(f"{size:,}" for size in sorted(set(value)))
        return f"{sizes}, by layer"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _types_table(types: list[dict[str, Any]]) -> Table:
    table = console.table("type", "tensors", "values", "bytes")
    for entry in types:
        table.add_row(
            entry["type"],
            f"{entry['count']:,}",
            f"{entry['values']:,}",
            _count(entry["bytes"]),
        )
    return table


def _kv_table(kv: dict[str, dict[str, int]], context_length: int) -> Table:
    table = console.table(
        "KV cache",
        "bytes a token, full layers",
        "sliding layers (in the window)",
        f"bytes at {context_length:,} tokens",
    )
    for dtype, sizes in kv.items():
        table.add_row(dtype, *(f"{value:,}" for value in sizes.values()))
    return table


def _tensors_table(tensors: list[dict[str, Any]]) -> Table:
    table = console.table("tensor", "type", "shape", "bytes", left=2)
    for tensor in tensors:
        table.add_row(
            tensor["name"],
            tensor["type"],
            " x ".join(str(n) for n in tensor["shape"]),
            _count(tensor["bytes"]),
        )
    return table


def _count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"
