"""`gemmakv info`: what a model file holds."""

from __future__ import annotations

import json
import math
from typing import Any

import typer
from rich.table import Table

from gemmakv import _core
from gemmakv.cli import console
from gemmakv.cli.arguments import MODEL_HELP, complete_model, examples
from gemmakv.errors import CorruptFile, MismatchError

EXAMPLES = examples(
    "gemmakv info gemma-3-270m",
    "gemmakv info --types model.gguf",
    "gemmakv info --json org/repo | jq .model.kv_cache",
)

_DTYPES = ("bf16", "int8", "f32")


def info(
    file: str = typer.Argument(
        ..., metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model
    ),
    types: bool = typer.Option(
        False, "--types", help="List every tensor with its type and shape."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show what a model file holds.

    Architecture, parameters, tensor types, and the bytes that a KV cache
    takes for each way of storing it. Only the file's header is read.
    """
    document = describe(console.fetch(file))
    if not types:
        del document["tensors"]
    if as_json:
        console.write(json.dumps(document, ensure_ascii=False) + "\n")
    else:
        console.write(_render(document))


def describe(path: str) -> dict[str, Any]:
    """Everything that the command knows, as JSON has it."""
    gguf = _core.GgufFile(path)
    keys = set(gguf.keys())

    def metadata(key: str) -> Any:
        return gguf.get(key) if key in keys else None

    architecture = metadata("general.architecture")
    if not isinstance(architecture, str):
        raise CorruptFile(
            f"{path}: expected a string general.architecture, found "
            f"{architecture!r}"
        )
    tensors = [
        {
            "name": name,
            "type": type_name,
            "shape": [int(n) for n in reversed(shape)],
            "values": math.prod(shape),
            "bytes": size_bytes,
        }
        for name, type_name, _, shape, size_bytes in gguf.tensors()
    ]
    document: dict[str, Any] = {
        "file": path,
        "gguf_version": gguf.version,
        "architecture": architecture,
        "name": metadata("general.name"),
        "parameters": sum(t["values"] for t in tensors),
        "tensor_bytes": sum(t["bytes"] for t in tensors),
        "types": _by_type(tensors),
    }
    try:
        document["model"] = _describe_model(_core.ModelConfig.from_gguf(path))
        document["supported"] = True
    except MismatchError as error:
        document["model"] = None
        document["supported"] = False
        document["reason"] = " ".join(str(error).split())
    document["tensors"] = tensors
    return document


def _by_type(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sums of each type, the one with most bytes first."""
    sums: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        entry = sums.setdefault(
            tensor["type"],
            {"type": tensor["type"], "count": 0, "values": 0, "bytes": 0},
        )
        entry["count"] += 1
        entry["values"] += tensor["values"]
        entry["bytes"] += tensor["bytes"]
    return sorted(sums.values(), key=lambda e: (-e["bytes"], e["type"]))


def _describe_model(config: _core.ModelConfig) -> dict[str, Any]:
    kv = {}
    for dtype in _DTYPES:
        full, sliding = config.kv_bytes_per_token(dtype)
        kv[dtype] = {
            "full_bytes_per_token": full,
            "sliding_bytes_per_token": sliding,
            "bytes_at_full_context": config.kv_bytes_at(
                config.context_length, dtype
            ),
        }
    return {
        "model_type": config.name or None,
        "num_layers": config.num_layers,
        "full_layers": config.layer_kinds.count("full"),
        "sliding_layers": config.layer_kinds.count("sliding"),
        "sliding_window": config.sliding_window,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "ffn_dim": config.ffn_dim,
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "kv_cache": kv,
    }


def _render(document: dict[str, Any]) -> str:
    title = Table(box=None, show_header=False, pad_edge=False)
    for key in ("file", "name", "architecture", "gguf_version"):
        title.add_row(key.replace("_", " "), str(document[key]))
    title.add_row("parameters", f"{document['parameters']:,}")
    title.add_row("tensor bytes", f"{document['tensor_bytes']:,}")
    tables = [title, _types_table(document["types"])]
    model = document["model"]
    if model is None:
        title.add_row("supported", f"no: {document['reason']}")
    else:
        for key, value in model.items():
            if key != "kv_cache":
                text = f"{value:,}" if isinstance(value, int) else str(value)
                title.add_row(key.replace("_", " "), text)
        tables.append(_kv_table(model["kv_cache"], model["context_length"]))
    if "tensors" in document:
        tables.append(_tensors_table(document["tensors"]))
    return console.render(*tables)


def _types_table(types: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("type")
    for name in ("tensors", "values", "bytes"):
        table.add_column(name, justify="right")
    for entry in types:
        table.add_row(
            entry["type"],
            f"{entry['count']:,}",
            f"{entry['values']:,}",
            f"{entry['bytes']:,}",
        )
    return table


def _kv_table(kv: dict[str, dict[str, int]], context_length: int) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("KV cache")
    table.add_column("bytes a token, full layers", justify="right")
    table.add_column("sliding layers (in the window)", justify="right")
    table.add_column(f"bytes at {context_length:,} tokens", justify="right")
    for dtype, sizes in kv.items():
        table.add_row(dtype, *(f"{value:,}" for value in sizes.values()))
    return table


def _tensors_table(tensors: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("tensor")
    table.add_column("type")
    table.add_column("shape", justify="right")
    table.add_column("bytes", justify="right")
    for tensor in tensors:
        table.add_row(
            tensor["name"],
            tensor["type"],
            " x ".join(str(n) for n in tensor["shape"]),
            f"{tensor['bytes']:,}",
        )
    return table
