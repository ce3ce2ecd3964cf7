"""Golden models as far as GGUF files can describe them."""

from __future__ import annotations

import math
from typing import Any

import gemmakv
from support import golden_configs, tiny_gguf
from support.golden_checks import NAMES, golden_of

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
    if config.rope_factor_full != 1:
        more["rope.scaling.type"] = (tiny_gguf.STR, "linear")
        more["rope.scaling.factor"] = (
            tiny_gguf.F32, config.rope_factor_full)
    return {
        **meta,
        **{f"{config.architecture}.{key}": value
           for key, value in more.items()},
    }
