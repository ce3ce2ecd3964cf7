"""Tiny random models of every family, and how they are asked for.

    model = family_models.model("recurrentgemma")
    cache = create_kv_cache(model.config)

Each has every kind of layer of its family, the last period cut short, and a
window of 16 tokens where the family has windows: lengths of some hundred
tokens leave it far behind. Soft caps are small enough to bend what they cap.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from gemmakv import Gemma, ModelConfig, Tokenizer
from support import tiny_gguf

WINDOW = tiny_gguf.WINDOW
VOCAB = tiny_gguf.VOCAB
# 0.5, 1, 2 and 8 windows.
LENGTHS = (WINDOW // 2, WINDOW, 2 * WINDOW, 8 * WINDOW)

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 32,
    "ffn_dim": 96,
    "vocab_size": VOCAB,
    "context_length": 512,
    "query_scale": 1 / math.sqrt(32),
    "qk_norm": False,
    "post_norms": False,
    "eos_ids": [1, tiny_gguf.EOT],
}
_FIELDS: dict[str, dict[str, Any]] = {
    "gemma": {
        "num_layers": 3, "num_heads": 2, "kv_heads": 2,
        "layer_kinds": ["full"] * 3,
    },
    "gemma2": {
        "num_layers": 5, "num_heads": 4, "kv_heads": 2,
        "sliding_window": WINDOW,
        "layer_kinds": ["sliding", "full", "sliding", "full", "sliding"],
        "attn_soft_cap": 2.0, "final_soft_cap": 1.5, "post_norms": True,
    },
    "gemma3": {
        "num_layers": 7, "num_heads": 2, "kv_heads": 1,
        "sliding_window": WINDOW,
        "layer_kinds": ["sliding"] * 5 + ["full", "sliding"],
        "rope_base_full": 1e6, "qk_norm": True, "post_norms": True,
    },
    # With experts; full layers of other sizes.
    "gemma4": {
        "num_layers": 5, "num_heads": 4, "kv_heads": [2, 2, 1, 2, 1],
        "head_dim": [32, 32, 64, 32, 64],
        "rope_dim": [32, 32, 64, 32, 64],
        "still_pairs": [0, 0, 24, 0, 24],
        "sliding_window": WINDOW,
        "layer_kinds": ["sliding", "sliding", "full", "sliding", "full"],
        "rope_base_full": 1e6, "final_soft_cap": 1.5, "qk_norm": True,
        "post_norms": True, "value_norm": True, "keys_are_values": True,
        "layer_scales": True,
        "num_experts": 6, "experts_used": 2, "expert_ffn_dim": 32,
    },
    # Two layers share keys and values, two are sparse.
    "gemma3n": {
        "num_layers": 7, "num_heads": 2, "kv_heads": 1,
        "sliding_window": WINDOW,
        "layer_kinds": ["sliding", "sliding", "full", "sliding", "full",
                        "sliding", "full"],
        "rope_base_full": 1e6, "qk_norm": True, "post_norms": True,
        "query_scale": 1.0, "value_norm": True, "final_soft_cap": 1.5,
        "ple_dim": 32, "ple_vocab": VOCAB - 40,
        "altup_inputs": 4, "altup_correct_scale": True, "laurel_rank": 32,
        "shares_kv": [None] * 5 + [3, 4],
        "sparsity_cutoff": [1.25, 0.0, *[None] * 5],
    },
    "recurrentgemma": {
        "num_layers": 5, "num_heads": 2, "kv_heads": 1,
        "sliding_window": WINDOW,
        "layer_kinds": ["recurrent", "recurrent", "sliding", "recurrent",
                        "recurrent"],
        "final_soft_cap": 1.5, "rope_dim": 16, "biases": True,
        "lru_width": 96, "lru_blocks": 2, "conv_width": 4,
    },
}  # fmt: skip
FAMILIES = tuple(_FIELDS)


def config(family: str, **changes: Any) -> ModelConfig:
    """The shape of a family's tiny model, with other values of some fields."""
    fields = {"architecture": family, **_COMMON, **_FIELDS[family], **changes}
    return ModelConfig(**fields)


@functools.cache
def model(
    family: str,
    *,
    seed: int = 0,
    threads: int = 2,
    context: int = 512,
    tokenizer: Tokenizer | None = None,
) -> Gemma:
    """A model of a family, made once for the same arguments."""
    shape = config(family, context_length=context)
    return Gemma.from_tensors(
        shape, tiny_gguf.tensors(seed, shape), tokenizer, threads=threads
    )
