"""Golden models as far as GGUF files can describe them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import gemmakv
from support import golden_configs, tiny_gguf
from support.golden_checks import NAMES, golden_of, tensors_of
from support.golden_models import Array

Metadata = dict[str, tuple[int, Any]]


def config_of(name: str) -> gemmakv.ModelConfig:
    return golden_configs.model_config(golden_of(name).config)


def period_of(config: gemmakv.ModelConfig) -> int | None:
    """Layers to a full one, if they come in periods."""
    for period in range(1, config.num_layers + 1):
        if config.layer_kinds == [
            "sliding" if (i + 1) % period else "full"
            for i in range(config.num_layers)
        ]:
            return period
    return None


def describable(name: str) -> bool:
    config = config_of(name)
    if config.architecture == "gemma3n":
        return config.altup_correct_scale
    if config.architecture == "gemma4":
        return True
    return period_of(config) is not None and math.isclose(
        config.query_scale, config.head_dim**-0.5)


GGUF_NAMES = [name for name in NAMES if describable(name)]


def metadata_of(config: gemmakv.ModelConfig) -> Metadata:
    """All that the format has a key for."""
    meta = {
        key: value
        for key, value in tiny_gguf.metadata(config).items()
        if not key.startswith("tokenizer.")
    }
    more: Metadata = {
        "attention.layer_norm_rms_epsilon": (
            tiny_gguf.F32, config.rms_epsilon),
        "attention.sliding_window_pattern": (
            tiny_gguf.U32, period_of(config)),
        "attn_logit_softcapping": (tiny_gguf.F32, config.attn_soft_cap),
        "final_logit_softcapping": (tiny_gguf.F32, config.final_soft_cap),
        "rope.freq_base": (tiny_gguf.F32, config.rope_base_full),
    }
    if config.architecture in ("gemma3n", "gemma4", "gemma4-assistant"):
        more |= _by_kind(config)
    if config.rope_factor_full != 1:
        more["rope.scaling.type"] = (tiny_gguf.STR, "linear")
        more["rope.scaling.factor"] = (
            tiny_gguf.F32, config.rope_factor_full)
    return {
        **meta,
        **{f"{config.architecture}.{key}": value
           for key, value in more.items()},
    }


def _by_kind(config: gemmakv.ModelConfig) -> Metadata:
    """Keys of full layers, of those that slide, and arrays."""
    slides = [kind == "sliding" for kind in config.layer_kinds]
    arguments = config.arguments()
    found: Metadata = {
        "attention.head_count_kv": (tiny_gguf.ARRAY, (
            tiny_gguf.U32, _listed(arguments["kv_heads"], slides))),
        "attention.sliding_window_pattern": (
            tiny_gguf.ARRAY, (tiny_gguf.BOOL, slides)),
        "rope.freq_base_swa": (tiny_gguf.F32, config.rope_base_sliding),
    }
    if isinstance(arguments["ffn_dim"], list):
        found["feed_forward_length"] = (tiny_gguf.ARRAY, (
            tiny_gguf.U32, arguments["ffn_dim"]))
    if arguments["shares_kv"]:
        shared = sum(owner is not None for owner in arguments["shares_kv"])
        found["attention.shared_kv_layers"] = (tiny_gguf.U32, shared)
        found["feed_forward_length"] = (tiny_gguf.ARRAY, (
            tiny_gguf.U32, _listed(arguments["ffn_dim"], slides)))
    if config.ple_dim:
        found["embedding_length_per_layer_input"] = (
            tiny_gguf.U32, config.ple_dim)
    if config.target_hidden:
        found["attention.shared_kv_layers"] = (
            tiny_gguf.U32, config.num_layers)
        found["embedding_length_out"] = (tiny_gguf.U32, config.target_hidden)
        found["nextn_predict_layers"] = (tiny_gguf.U32, config.num_layers)
    if config.num_experts:
        found["expert_count"] = (tiny_gguf.U32, config.num_experts)
        found["expert_used_count"] = (tiny_gguf.U32, config.experts_used)
        found["expert_feed_forward_length"] = (
            tiny_gguf.U32, config.expert_ffn_dim)
    for key, field in (
        ("attention.key_length", "head_dim"),
        ("attention.value_length", "head_dim"),
        ("rope.dimension_count", "rope_dim"),
    ):
        sizes = _listed(arguments[field], slides)
        found[key] = (tiny_gguf.U32, sizes[slides.index(False)])
        found[f"{key}_swa"] = (tiny_gguf.U32, sizes[slides.index(True)])
    return found


def _listed(value: Any, layers: list[bool]) -> list[int]:
    return value if isinstance(value, list) else [value] * len(layers)


def gguf_tensors(name: str) -> dict[str, Array]:
    """The weights, and what a file tells of rotations by a tensor."""
    return {
        **stacked(tensors_of(name)),
        **rotation_tensors(config_of(name)),
    }


def stacked(tensors: dict[str, Array]) -> dict[str, Array]:
    """With the matrices of streams as the format has them: one tensor."""
    found = dict(tensors)
    for stem in ("altup_proj", "altup_unembd_proj"):
        names = sorted(n for n in tensors if n.startswith(f"{stem}."))
        if names:
            found[f"{stem}.weight"] = np.stack([found.pop(n) for n in names])
    return found


def rotation_tensors(config: gemmakv.ModelConfig) -> dict[str, Array]:
    if config.architecture not in ("gemma4", "gemma4-assistant"):
        return {}
    full = config.layer_kinds.index("full")
    arguments = config.arguments()
    divisors = np.ones(arguments["rope_dim"][full] // 2, np.float32)
    divisors[divisors.size - arguments["still_pairs"][full]:] = 1e30
    return {"rope_freqs.weight": divisors}
