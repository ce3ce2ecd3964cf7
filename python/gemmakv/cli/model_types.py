"""Shapes of models and the bytes of their caches, for `gemmakv info`."""

from __future__ import annotations

from typing import Any

from gemmakv._core import ModelConfig
from gemmakv.cli import console
from gemmakv.models._config import ModelType

_DTYPES = ("bf16", "int8", "f32")


def describe(config: ModelConfig) -> dict[str, Any]:
    """A model's shape and the bytes of its caches, as JSON has it."""
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
    experts = {
        "num_experts": config.num_experts,
        "experts_used": config.experts_used,
        "expert_ffn_dim": config.expert_ffn_dim,
    }
    drafter = {
        "guesses_for_hidden_size": config.target_hidden,
        "clusters_of_tokens": config.num_centroids,
        "clusters_used": config.centroids_used,
    }
    return {
        "model_type": config.name or None,
        "architecture": config.architecture,
        "num_layers": config.num_layers,
        "full_layers": config.layer_kinds.count("full"),
        "sliding_layers": config.layer_kinds.count("sliding"),
        "recurrent_layers": config.layer_kinds.count("recurrent"),
        "sliding_window": config.sliding_window,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "ffn_dim": config.ffn_dim,
        **(experts if config.num_experts else {}),
        **(drafter if config.target_hidden else {}),
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "state_bytes": config.state_bytes,
        "kv_cache": kv,
    }


def describe_all() -> list[dict[str, Any]]:
    """Describes all named types, in the order of their enumeration."""
    return [describe(ModelConfig.from_name(t.value)) for t in ModelType]


def render(types: list[dict[str, Any]]) -> str:
    """Makes tables of what `describe_all` gives."""
    shapes = console.table(
        "model type", "layers", "full", "sliding", "recurrent", "window",
        "context",
    )  # fmt: skip
    tokens = console.table("bytes a token: full + sliding", *_DTYPES)
    totals = console.table(
        "bytes at full context", *_DTYPES, "recurrent state in it"
    )
    for entry in types:
        name = entry["model_type"]
        keys = (
            "num_layers", "full_layers", "sliding_layers", "recurrent_layers",
            "sliding_window", "context_length",
        )  # fmt: skip
        shapes.add_row(name, *(f"{entry[key]:,}" for key in keys))
        kv = [entry["kv_cache"][dtype] for dtype in _DTYPES]
        tokens.add_row(
            name,
            *(
                f"{one['full_bytes_per_token']:,} + "
                f"{one['sliding_bytes_per_token']:,}"
                for one in kv
            ),
        )
        totals.add_row(
            name,
            *(f"{one['bytes_at_full_context']:,}" for one in kv),
            f"{entry['state_bytes']:,}",
        )
    return console.render(shapes, tokens, totals) + (
        "\nSliding layers keep the tokens of their window only, recurrent "
        "layers a state\nof one size, in float32 for each way of storing the "
        "rest.\n"
    )
