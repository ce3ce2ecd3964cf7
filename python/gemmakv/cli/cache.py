"""`gemmakv cache`: what saved conversations and folders hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import typer
from rich.table import Table

from gemmakv import _core
from gemmakv.cache._kv_cache import KVCache, LayerView
from gemmakv.chat import _session_file as session_file
from gemmakv.cli import (
    EXIT_FAILURE,
    EXIT_USAGE,
    cache_folder,
    cache_warm,
    console,
    fail,
)
from gemmakv.cli import describe as describe_error
from gemmakv.cli.arguments import examples, show_help
from gemmakv.errors import CorruptFile, GemmaKVError, MismatchError

app = typer.Typer(
    help="Look at saved conversations and at folders of the prefix cache.",
    rich_markup_mode=None,
    epilog=examples(
        "gemmakv cache inspect talk.kv",
        "gemmakv cache verify talk.kv",
        "gemmakv cache diff talk.kv other.kv",
        "gemmakv cache stats ~/.cache/prefixes",
    ),
)
app.callback(invoke_without_command=True)(show_help)
app.command(epilog=cache_folder.STATS_EXAMPLES)(cache_folder.stats)
app.command(epilog=cache_folder.SWEEP_EXAMPLES)(cache_folder.sweep)
app.command(epilog=cache_folder.CLEAR_EXAMPLES)(cache_folder.clear)
app.command(epilog=cache_warm.EXAMPLES)(cache_warm.warm)
_FILE = typer.Argument(
    ...,
    metavar="FILE",
    help="A conversation saved by KVCache.save, or a session saved by "
    "Session.save or by /save of the chat.",
)
_JSON = typer.Option(False, "--json", help="Print JSON.")
_COMPARED = ("key", "value", "state")
_SHOWN_TOKENS = 8  # of each end of the transcript


@app.command(
    epilog=examples(
        "gemmakv cache inspect talk.kv",
        "gemmakv cache inspect --json talk.kv | jq .tokens",
    )
)
def inspect(file: str = _FILE, as_json: bool = _JSON) -> None:
    """Show model, tokens, layers and sizes of a saved conversation."""
    document = describe(file)
    if as_json:
        console.write(json.dumps(document) + "\n")
        return
    tokens = document.pop("tokens")
    layers = document.pop("layers")
    document["tokens"] = _shortened(tokens)
    console.write(console.render(console.facts(document), _layer_table(layers)))


@app.command(
    epilog=examples(
        "gemmakv cache verify talk.kv",
        "gemmakv cache verify talk.kv && echo sound",
    )
)
def verify(file: str = _FILE, as_json: bool = _JSON) -> None:
    """Check every checksum of a saved conversation.

    Shows for each section where it lies and whether it is sound. The exit code
    is 1 if one is not.
    """
    saved = _read(file)
    with _naming(file):
        version, rows = _core.check_snapshot(saved.snapshot)
    if saved.offset:
        rows.insert(0, ("session", -saved.offset, saved.offset, ""))
    sections = [
        {"section": name, "offset": saved.offset + offset, "bytes": size,
         "problem": problem or None}
        for name, offset, size, problem in rows
    ]  # fmt: skip
    bad = [s for s in sections if s["problem"] is not None]
    if as_json:
        document = {"file": file, "format_version": version,
                    "sound": not bad, "sections": sections}  # fmt: skip
        console.write(json.dumps(document) + "\n")
    else:
        table = console.table("section", "offset", "bytes")
        table.add_column("state")
        for section in sections:
            problem = section["problem"]
            table.add_row(
                str(section["section"]),
                f"{section['offset']:,}",
                f"{section['bytes']:,}",
                f"BAD: {problem}" if problem else "good",
            )
        console.write(console.render(table))
    if bad:
        raise CorruptFile(f"{file}: {bad[0]['section']}: {bad[0]['problem']}")


@app.command(
    epilog=examples(
        "gemmakv cache diff talk.kv other.kv",
        "gemmakv cache diff --json talk.kv other.kv | jq .same",
    )
)
def diff(
    a: str = typer.Argument(
        ..., metavar="FILE", help="A saved conversation or session."
    ),
    b: str = typer.Argument(
        ..., metavar="OTHER", help="Another one of the same shape."
    ),
    as_json: bool = _JSON,
) -> int:
    """Compare two saved conversations.

    The exit code is 0 if they are the same, 1 if they differ and 2 if they
    cannot be compared, as that of diff.

    Shows the first position with different tokens and, for each layer, the
    largest difference between keys and between values, over the positions
    before it that both hold, or between the states of a recurrent layer if
    both stand at one position.
    """
    try:
        document = compare(a, b)
    except (GemmaKVError, ValueError, OSError) as error:
        return fail(describe_error(error), EXIT_USAGE)
    if as_json:
        console.write(json.dumps(document) + "\n")
    else:
        layers = document.pop("layers")
        same = document.pop("same")
        facts = {**document, "result": "same" if same else "different"}
        console.write(console.render(console.facts(facts), _diff_table(layers)))
        document["same"] = same
    return 0 if document["same"] else EXIT_FAILURE


def describe(file: str) -> dict[str, Any]:
    """Everything that `inspect` knows, as JSON has it."""
    saved = _read(file)
    with _naming(file):
        version, _ = _core.check_snapshot(saved.snapshot)
        cache = KVCache.from_bytes(saved.snapshot)
    text = saved.session
    return {
        "file": file,
        "holds": "a KV cache" if text is None else "a session",
        **({} if text is None else _describe_session(text)),
        "bytes": saved.offset + len(saved.snapshot),
        "format_version": version,
        "model_type": cache.model_type,
        "fingerprint": cache._core.fingerprint,
        "kv_dtype": cache.kv_dtype,
        "capacity_tokens": cache.capacity_tokens,
        "length": len(cache),
        "kv_bytes": cache.nbytes,
        "tokens": cache.tokens.tolist(),
        "layers": [_describe_layer(layer) for layer in cache.layers],
    }


def compare(a: str, b: str) -> dict[str, Any]:
    """Everything that `diff` knows, as JSON has it."""
    left, right = _load(a), _load(b)
    shapes = [
        [(v.kind, v.window, *_heads(v), v.state.shape) for v in cache.layers]
        for cache in (left, right)
    ]
    if shapes[0] != shapes[1]:
        raise MismatchError(
            f"{a} has {_shape_name(left)}, expected the same layers as {b}, "
            f"which has {_shape_name(right)}"
        )
    common = min(len(left), len(right))
    unequal = np.flatnonzero(left.tokens[:common] != right.tokens[:common])
    agreed = int(unequal[0]) if unequal.size else common
    layers = [
        {"layer": i, "kind": one.kind, **_layer_difference(one, other, agreed)}
        for i, (one, other) in enumerate(zip(left.layers, right.layers))
    ]
    differs = agreed < max(len(left), len(right))
    return {
        "a": a,
        "b": b,
        "length_a": len(left),
        "length_b": len(right),
        "first_divergent_token": agreed if differs else None,
        "kv_dtype_a": left.kv_dtype,
        "kv_dtype_b": right.kv_dtype,
        "same_weights": left._core.fingerprint == right._core.fingerprint,
        "same": not differs
        and all(
            layer[f"max_{name}_difference"] in (0, None)
            for layer in layers
            for name in _COMPARED
        ),
        "layers": layers,
    }


def _layer_difference(
    one: LayerView, other: LayerView, agreed: int
) -> dict[str, Any]:
    """Compares the positions that both hold and whose tokens agree so far."""
    ranges = [one.held_range, other.held_range]
    begin = max(r[0] for r in ranges)
    end = min([agreed, *(r[1] for r in ranges)])
    views = list(zip((one, other), ranges))
    pairs: dict[str, list[Any]] = {}
    if one.kind == "recurrent" and ranges[0] == ranges[1] and begin <= agreed:
        pairs["state"] = [one.state, other.state]
    elif begin < end:
        for name in ("key", "value"):
            pairs[name] = [
                getattr(view, f"{name}s")[begin - start : end - start]
                for view, (start, _) in views
            ]
    found: dict[str, Any] = {"positions": [begin, max(begin, end)]}
    for name in _COMPARED:
        found[f"max_{name}_difference"] = (
            float(np.abs(np.subtract(*pairs[name])).max())
            if name in pairs
            else None
        )
    return found


def _describe_layer(layer: LayerView) -> dict[str, Any]:
    kv_heads, head_dim = _heads(layer)
    return {
        "layer": layer.index,
        "kind": layer.kind,
        "window": layer.window,
        "start": layer.start,
        "length": layer.length,
        "kv_heads": kv_heads or None,
        "head_dim": head_dim or None,
        "bytes": layer.nbytes,
    }


def _heads(layer: LayerView) -> tuple[int, int]:
    """kv_heads and head_dim; (0, 0) of a recurrent layer."""
    return layer.cache._core.layer_shape(layer.index)


@contextmanager
def _naming(file: str) -> Iterator[None]:
    """Puts the file's name in front of this package's errors."""
    try:
        yield
    except GemmaKVError as error:
        raise type(error)(f"{file}: {error}") from None


@dataclasses.dataclass(frozen=True)
class _Saved:
    """A file's snapshot, and where it begins; before it is a session's text
    if it is that of a session.
    """

    snapshot: bytes
    offset: int = 0
    session: session_file.SessionText | None = None


def _read(file: str) -> _Saved:
    with open(file, "rb") as stream:
        data = stream.read(64)
        if data.startswith(b"GKV"):  # what is neither kind may be endless
            data += stream.read()
    if not data.startswith(session_file.MAGIC):
        return _Saved(data)
    with _naming(file):
        text, snapshot = session_file.split(memoryview(data))
        if isinstance(snapshot, session_file.TokenPart):
            raise MismatchError(
                "expected keys and values, found a session whose keys and "
                "values are in the prefix cache; /save of gemmakv chat "
                "writes a file with them"
            )
    return _Saved(bytes(snapshot), len(data) - len(snapshot), text)


def _load(file: str) -> KVCache:
    saved = _read(file)
    with _naming(file):
        return KVCache.from_bytes(saved.snapshot)


def _describe_session(text: session_file.SessionText) -> dict[str, Any]:
    return {
        "turns": sum(one.role == "user" for one in text.messages),
        "template": text.template,
        "system": text.system,
        "overflow": text.overflow,
    }


def _shape_name(cache: KVCache) -> str:
    layers = cache.layers
    heads, dim = max(_heads(layer) for layer in layers)
    return (
        f"{len(layers)} layers of {heads} x {dim} "
        f"({cache.model_type or 'custom model'})"
    )


def _shortened(tokens: list[int]) -> str:
    if len(tokens) <= 2 * _SHOWN_TOKENS:
        return " ".join(map(str, tokens)) or "none"
    first = " ".join(map(str, tokens[:_SHOWN_TOKENS]))
    return f"{first} ... {' '.join(map(str, tokens[-_SHOWN_TOKENS:]))}"


def _layer_table(layers: list[dict[str, Any]]) -> Table:
    names = (name.replace("_", " ") for name in layers[0])
    table = console.table(*names, left=0)
    for layer in layers:
        table.add_row(*("-" if v is None else str(v) for v in layer.values()))
    return table


def _diff_table(layers: list[dict[str, Any]]) -> Table:
    differ = (f"{name}s differ by" for name in _COMPARED)
    table = console.table("layer", "kind", "positions", *differ, left=3)
    for layer in layers:
        differences = [
            "-" if layer[name] is None else f"{layer[name]:.3g}"
            for name in (f"max_{what}_difference" for what in _COMPARED)
        ]
        begin, end = layer["positions"]
        table.add_row(
            str(layer["layer"]), layer["kind"], f"{begin}..{end}",
            *differences,
        )  # fmt: skip
    return table
