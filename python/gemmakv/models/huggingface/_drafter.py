"""Gemma 4's drafters: what their config.json has besides a Gemma 4's."""

from __future__ import annotations

from typing import Any

from gemmakv._core import ModelConfig
from gemmakv._support.documents import Section
from gemmakv.models.huggingface._layer_sizes import (
    full_layer_sizes,
    rope_by_kind,
)

# What the layers of the model that it guesses for may have, and its own not.
_NOT_IN_DRAFTERS = {
    "hidden_size_per_layer_input": "0 for a drafter",
    "vocab_size_per_layer_input": "0 for a drafter",
    "enable_moe_block": "false for a drafter",
    "use_double_wide_mlp": "false for a drafter",
}
_CLUSTER = 16  # tokens: a cluster is a multiple of them


def drafter_layers(
    text: Section, kinds: list[str], base: ModelConfig
) -> dict[str, Any]:
    """Arguments of ModelConfig: sizes and rotations of layers that have no
    keys and values of their own.

    Raises CorruptFile or MismatchError.
    """
    for key, expected in _NOT_IN_DRAFTERS.items():
        if text.values.get(key) not in (None, False, 0):
            raise text.refusal(key, expected)
    key = "num_kv_shared_layers"
    if text.values.get(key) not in (None, 0, len(kinds)):
        raise text.wrong(key, f"{len(kinds)}, all layers of a drafter")
    values = full_layer_sizes(text, kinds, base)
    # It is the other model that has the values.
    values["keys_are_values"] = False
    return {**values, **rope_by_kind(text, kinds, values["head_dim"])}


def drafter_values(top: Section, vocab_size: int) -> dict[str, Any]:
    """Arguments of ModelConfig: the model that it guesses for, and clusters of
    tokens.

    Raises CorruptFile or MismatchError.
    """
    values = {"target_hidden": top.size("backbone_hidden_size", 1536)}
    if not top.flag("use_ordered_embeddings", False):
        return values
    count = top.size("num_centroids", 2048)
    used = top.size("centroid_intermediate_top_k", 32)
    if vocab_size % (count * _CLUSTER):
        raise top.refusal(
            "num_centroids",
            f"clusters of a multiple of {_CLUSTER} tokens, of "
            f"vocab_size {vocab_size}",
        )
    if used > count:
        raise top.wrong(
            "centroid_intermediate_top_k", f"at most num_centroids {count}"
        )
    return {**values, "num_centroids": count, "centroids_used": used}
