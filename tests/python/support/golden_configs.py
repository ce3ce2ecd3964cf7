"""What a config.json means, read for tests alone.

An own reading of the configuration classes of transformers 5 and of the keys
that older files have, to hold the package's reader and the table of named
types against. It refuses nothing.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np

import gemmakv
from support import golden_models

# The published configurations, one file for each named type.
FOLDER = Path(__file__).resolve().parents[2] / "golden" / "configs"

Config = dict[str, Any]

_ARCHITECTURES = {
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "embedding_gemma2_text": "embeddinggemma2",
    "recurrent_gemma": "recurrentgemma",
    "vaultgemma": "vaultgemma",
}
# What the classes set where a file says nothing.
_DEFAULTS = {
    "gemma": {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "gemma2": {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
    },
    "gemma3_text": {
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
    },
    "gemma3n_text": {
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "altup_num_inputs": 4,
        "final_logit_softcapping": 30.0,
        "laurel_rank": 64,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 15,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
    },
    "gemma4_text": {
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
    "gemma4_unified_text": {
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "vocab_size": 262144,
    },
    "embedding_gemma2_text": {
        "embedding_dim": 768,
        "hidden_size_per_layer_input": 512,
        "max_position_embeddings": 262144,
        "sliding_window": 512,
        "vocab_size": 262144,
    },
    "recurrent_gemma": {
        "conv1d_width": 4,
        "partial_rotary_factor": 0.5,
    },
    "vaultgemma": {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
    },
}
_COMMON_DEFAULTS = {
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}


def types() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def published(name: str) -> Config:
    config: Config = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return config


def write_published(folder: Path, name: str) -> Path:
    """A directory's JSON files: config.json, and those of modules."""
    if (FOLDER / name).is_dir():
        shutil.copytree(FOLDER / name, folder, dirs_exist_ok=True)
    text = json.dumps(published(name))
    (folder / "config.json").write_text(text, "utf-8")
    return folder


def published_fields(name: str) -> dict[str, Any]:
    """Arguments of ModelConfig."""
    found = fields(published(name))
    dense = FOLDER / name / "2_Dense" / "config.json"
    if dense.exists():
        stated = json.loads(dense.read_text("utf-8"))
        found["dense_dim"] = stated["out_features"]
    longest = FOLDER / name / "sentence_bert_config.json"
    if longest.exists():
        stated = json.loads(longest.read_text("utf-8"))
        found["context_length"] = min(
            found["context_length"], stated["max_seq_length"])
    return found


def model_config(config: Config) -> gemmakv.ModelConfig:
    return gemmakv.ModelConfig(**fields(config))


def fields(config: Config) -> dict[str, Any]:
    """Arguments of ModelConfig."""
    stated = config.get("text_config", config)
    kind = stated["model_type"]
    text = {**_COMMON_DEFAULTS, **_DEFAULTS[kind], **stated}
    # Both parts of a multimodal model share what ends a reply.
    eos = config.get("eos_token_id", text["eos_token_id"])
    result = {
        "architecture": _ARCHITECTURES[kind],
        "bos_id": text["bos_token_id"],
        "context_length": text["max_position_embeddings"],
        "eos_ids": sorted(eos) if isinstance(eos, list) else [eos],
        "ffn_dim": text["intermediate_size"],
        "head_dim": text["head_dim"],
        "hidden_size": text["hidden_size"],
        "kv_heads": text["num_key_value_heads"],
        "num_heads": text["num_attention_heads"],
        "num_layers": text["num_hidden_layers"],
        "post_norms": kind in ("gemma2", "gemma3_text"),
        "qk_norm": kind == "gemma3_text",
        "query_scale": 1 / math.sqrt(text["query_pre_attn_scalar"]),
        "rms_epsilon": text["rms_norm_eps"],
        "vocab_size": text["vocab_size"],
    }
    if kind == "recurrent_gemma":
        return {**result, **_recurrent(text)}
    if text.get("use_bidirectional_attention") and kind == "gemma3_text":
        return {**result, **_rope(stated, kind), **_embedding(text)}
    if golden_models.encoder(text):
        return {**result, **_encoder(text)}
    if golden_models.gemma4(text):
        return {**result, **_gemma4(text)}
    if golden_models.gemma3n(text):
        return {**result, **_rope(stated, kind), **_kinds(text),
                **_gemma3n(text)}
    if kind == "gemma":
        theta = text.get("rope_parameters", text)["rope_theta"]
        return {
            **result,
            "layer_kinds": ["full"] * text["num_hidden_layers"],
            "query_scale": 1 / math.sqrt(text["head_dim"]),
            "rope_base_full": theta,
            "rope_base_sliding": 0.0,  # no layer slides
        }
    return {**result, **_rope(stated, kind), **_kinds(text),
            "attn_soft_cap": text.get("attn_logit_softcapping") or 0.0,
            "final_soft_cap": text.get("final_logit_softcapping") or 0.0}


def _gemma4(text: Config) -> dict[str, Any]:
    count = text["num_hidden_layers"]
    kinds = text.get("layer_types") or [
        "sliding_attention" if (layer + 1) % 6 and layer + 1 < count
        else "full_attention"
        for layer in range(count)
    ]
    text = {**text, "layer_types": kinds}
    sizes = [golden_models.layer_sizes(text, layer) for layer in range(count)]
    rope = text.get("rope_parameters") or {
        "full_attention": {"rope_theta": 1e6, "rope_type": "proportional",
                           "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    still = []
    for kind, (_, dim) in zip(kinds, sizes, strict=True):
        share = rope[kind].get("partial_rotary_factor", 1.0)
        still.append(dim // 2 - int(share * dim // 2))
    shared = golden_models.first_shared_layer(text)
    wide = 2 if text.get("use_double_wide_mlp") else 1
    ffn = text["intermediate_size"]
    ple = golden_models.per_layer_size(text)
    experts = {
        "num_experts": text["num_experts"],
        "experts_used": text["top_k_experts"],
        "expert_ffn_dim": text["moe_intermediate_size"],
    } if text.get("enable_moe_block") else {}
    return {
        **experts,
        "ffn_dim": [ffn * (wide if i >= shared else 1) for i in range(count)],
        "final_soft_cap": text.get("final_logit_softcapping") or 0.0,
        "head_dim": [dim for _, dim in sizes],
        "keys_are_values": text.get("attention_k_eq_v", False),
        "kv_heads": [heads for heads, _ in sizes],
        "layer_kinds": [kind.split("_")[0] for kind in kinds],
        "layer_scales": True,
        "ple_dim": ple,
        "ple_vocab": text["vocab_size_per_layer_input"] if ple else 0,
        "post_norms": True,
        "qk_norm": True,
        "query_scale": 1.0,
        "rope_base_full": rope["full_attention"]["rope_theta"],
        "rope_base_sliding": rope["sliding_attention"]["rope_theta"],
        "rope_factor_full": rope["full_attention"].get("factor", 1.0),
        "shares_kv": None if shared == count else [
            None if i < shared
            else max(j for j in range(shared) if kinds[j] == kinds[i])
            for i in range(count)
        ],
        "sliding_window": text["sliding_window"],
        "still_pairs": still,
        "value_norm": True,
    }


def _embedding(text: Config) -> dict[str, Any]:
    kinds = _kinds(text)
    return {
        **kinds,
        "architecture": "gemma-embedding",
        "bidirectional": True,
        "sliding_window": kinds["sliding_window"] // 2 + 1,
    }


def _encoder(text: Config) -> dict[str, Any]:
    kinds = text["layer_types"]
    sizes = [
        golden_models.layer_sizes(text, layer) for layer in range(len(kinds))
    ]
    rope = text["rope_parameters"]
    return {
        "bidirectional": True,
        "embedding_dim": text["embedding_dim"],
        "head_dim": [dim for _, dim in sizes],
        "kv_heads": [heads for heads, _ in sizes],
        "layer_kinds": [kind.split("_")[0] for kind in kinds],
        "layer_scales": True,
        "ple_dim": text["hidden_size_per_layer_input"],
        "post_norms": True,
        "qk_norm": True,
        "query_scale": 1.0,
        "rope_base_full": rope["full_attention"]["rope_theta"],
        "rope_base_sliding": rope["sliding_attention"]["rope_theta"],
        # The distance that is seen, itself included.
        "sliding_window": text["sliding_window"] + 1,
        "value_norm": True,
    }


def _gemma3n(text: Config) -> dict[str, Any]:
    count = text["num_hidden_layers"]
    own = golden_models.first_shared_layer(text)
    kinds = _kinds(text)["layer_kinds"]
    shares = text.get("activation_sparsity_pattern")
    if shares is None:
        sparse = 10 if count > 10 else 0
        shares = [0.95] * sparse + [0.0] * (count - sparse)
    # What torch makes of these shares in float32.
    cutoffs = {0.0: None, 0.5: 0.0, 0.95: 1.6448535919189453}
    ple = golden_models.per_layer_size(text)
    return {
        "altup_active": text["altup_active_idx"],
        "altup_correct_scale": text["altup_correct_scale"],
        "altup_inputs": text["altup_num_inputs"],
        "final_soft_cap": text.get("final_logit_softcapping") or 0.0,
        "laurel_rank": text["laurel_rank"],
        "ple_dim": ple,
        "ple_vocab": text["vocab_size_per_layer_input"],
        "post_norms": True,
        "qk_norm": True,
        "query_scale": 1.0,
        "shares_kv": None if own == count else [
            None if i < own
            else max(j for j in range(own) if kinds[j] == kinds[i])
            for i in range(count)
        ],
        "sparsity_cutoff": [cutoffs[share] for share in shares],
        "value_norm": True,
    }


def _kinds(text: Config) -> dict[str, Any]:
    period = text["sliding_window_pattern"]
    kinds = text.get("layer_types") or [
        "full_attention" if layer % period == period - 1
        else "sliding_attention"
        for layer in range(text["num_hidden_layers"])
    ]
    return {
        "layer_kinds": [kind.split("_")[0] for kind in kinds],
        "sliding_window": text["sliding_window"],
    }


def _rope(stated: Config, kind: str) -> dict[str, Any]:
    new = stated.get("rope_parameters")
    if kind in ("gemma2", "vaultgemma"):
        theta = (new or stated).get("rope_theta", 10000.0)
        return {"rope_base_full": theta, "rope_base_sliding": theta}
    if new:
        full, sliding = new["full_attention"], new["sliding_attention"]
        return {
            "rope_base_full": full["rope_theta"],
            "rope_base_sliding": sliding["rope_theta"],
            "rope_factor_full": full.get("factor", 1.0),
        }
    scaling = stated.get("rope_scaling") or {}
    return {
        "rope_base_full": stated.get("rope_theta", 1e6),
        "rope_base_sliding": stated.get("rope_local_base_freq", 1e4),
        "rope_factor_full": scaling.get("factor", 1.0),
    }


def _recurrent(text: Config) -> dict[str, Any]:
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    head_dim = hidden // heads  # whatever the file says
    kinds = text.get("block_types") or text["_block_types"]
    rope = text.get("rope_parameters", text)
    scale = np.float32(math.sqrt(hidden))
    return {
        "biases": True,
        "conv_width": text["conv1d_width"],
        "embedding_scale": float(golden_models.to_bfloat16(scale)),
        "ffn_dim": text["intermediate_size"] // 2,
        "final_soft_cap": text["logits_soft_cap"],
        "head_dim": head_dim,
        "layer_kinds": [
            {"recurrent": "recurrent", "attention": "sliding"}[
                kinds[layer % len(kinds)]]
            for layer in range(text["num_hidden_layers"])
        ],
        "lru_blocks": heads,
        "lru_width": text.get("lru_width") or hidden,
        "query_scale": 1 / math.sqrt(head_dim),
        "rope_base_full": 0.0,  # no layer sees everything
        "rope_base_sliding": rope["rope_theta"],
        "rope_dim": int(rope["partial_rotary_factor"] * head_dim),
        "sliding_window": text["attention_window_size"],
    }
