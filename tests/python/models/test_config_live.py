"""config.json as the package reads it, against transformers' own classes.

Files of older and newer keys, with any of them left out. Needs transformers.
"""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv.models.huggingface._config import read_config

transformers = pytest.importorskip(
    "transformers", reason="the reference is transformers")

FILES = 150  # of each kind
# Refused are only combinations of random values that no model has.
ACCEPTED = 90

KINDS = {"full_attention": "full", "sliding_attention": "sliding",
         "linear_attention": "recurrent"}
CLASSES = {
    "gemma": transformers.GemmaConfig,
    "gemma2": transformers.Gemma2Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "recurrent_gemma": transformers.RecurrentGemmaConfig,
}


class Writer:
    """Random files of one model_type."""

    def __init__(self, model_type: str, seed: int) -> None:
        self.random = random.Random(f"{model_type} {seed}")
        self.config: dict[str, Any] = {"model_type": model_type}

    def may(self, key: str, *values: Any, share: float = 0.6) -> None:
        """Perhaps adds a key, with one of the values."""
        if self.random.random() < share:
            self.config[key] = self.random.choice(values)

    def file(self) -> dict[str, Any]:
        kind = self.config["model_type"]
        self.may("hidden_size", 256, 512, 1024, share=0.9)
        self.may("num_attention_heads", 4, 8, share=0.9)
        self.may("num_key_value_heads", 1, 2, share=0.9)
        self.may("num_hidden_layers", 1, 2, 5, 14, share=0.9)
        self.may("intermediate_size", 512, 1000)
        self.may("vocab_size", 300, 1000)
        self.may("rms_norm_eps", 1e-5, 1e-6)
        self.may("bos_token_id", 2, 5)
        # Without it, the family's own ids hold here.
        self.may("eos_token_id", 1, [1, 106], [106, 1], share=1)
        self.may("rope_theta", 1e4, 5e4, 1000000)
        if kind == "recurrent_gemma":
            self._recurrent()
        else:
            self.may("head_dim", 64, 128)
            self.may("max_position_embeddings", 512, 8192)
        if kind in ("gemma2", "gemma3_text"):
            self._windows(kind)
        if kind == "gemma3_text":
            self._rope_by_layer_type()
        elif kind == "gemma":
            self.may("rope_scaling", None,
                     {"rope_type": "linear", "factor": 8.0}, share=0.3)
        if kind != "gemma3_text":
            self.may("rope_parameters", {
                "rope_type": "default",
                "rope_theta": self.random.choice([2e4, 3e5]),
            }, share=0.4)
        return self.config

    def _recurrent(self) -> None:
        self.may("attention_window_size", 16, 64)
        self.may("block_types", ["attention"], ["recurrent", "attention"])
        self.may("conv1d_width", 3, 4)
        self.may("logits_soft_cap", 5.0, 30.0)
        self.may("lru_width", None, 1280)
        self.may("partial_rotary_factor", 0.25, 0.5, 1.0)

    def _windows(self, kind: str) -> None:
        self.may("sliding_window", 16, 512)
        self.may("query_pre_attn_scalar", 144, 168, 256)
        self.may("final_logit_softcapping", None, 12.0, 30.0)
        if kind == "gemma2":
            self.may("attn_logit_softcapping", None, 25.0, 50.0)
        else:
            self.may("attn_logit_softcapping", None)
            self.may("sliding_window_pattern", 2, 3, 6, share=0.3)
        layers = self.config.get("num_hidden_layers")
        if layers is not None:
            types = ["full_attention", "sliding_attention"]
            self.may("layer_types",
                     self.random.choices(types, k=layers), share=0.4)

    def _rope_by_layer_type(self) -> None:
        self.may("rope_local_base_freq", 1e4, 3e4)
        self.may("rope_scaling", None,
                 {"rope_type": "linear", "factor": 8.0}, share=0.4)
        self.may("rope_parameters", {
            "full_attention": self.random.choice([
                {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
                {"rope_type": "linear", "factor": 4.0},
                {"rope_type": "default", "rope_theta": 2e6},
                {"rope_type": "default"},
            ]),
            "sliding_attention": self.random.choice([
                {"rope_type": "default", "rope_theta": 2e4},
                {"rope_type": "default"},
            ]),
        }, share=0.4)


def expected_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig that transformers' object determines."""
    kind = config["model_type"]
    stated = {k: v for k, v in config.items() if k != "model_type"}
    theirs = CLASSES[kind](**copy.deepcopy(stated))
    layers = theirs.num_hidden_layers
    types = (["full_attention"] * layers if kind == "gemma"
             else theirs.layer_types)
    recurrent = kind == "recurrent_gemma"
    eos = theirs.eos_token_id
    divisor = getattr(theirs, "query_pre_attn_scalar", theirs.head_dim)
    final = "logits_soft_cap" if recurrent else "final_logit_softcapping"
    fields = {
        "bos_id": theirs.bos_token_id,
        "eos_ids": sorted(eos if isinstance(eos, list) else [eos]),
        "ffn_dim": theirs.intermediate_size // (2 if recurrent else 1),
        "final_soft_cap": getattr(theirs, final, None) or 0.0,
        "head_dim": theirs.head_dim,
        "hidden_size": theirs.hidden_size,
        "kv_heads": theirs.num_key_value_heads,
        "layer_kinds": [KINDS[t] for t in types],
        "num_heads": theirs.num_attention_heads,
        "num_layers": layers,
        "query_scale": 1 / math.sqrt(divisor),
        "rms_epsilon": float(np.float32(theirs.rms_norm_eps)),
        "vocab_size": theirs.vocab_size,
    }
    kinds = fields["layer_kinds"]
    if kind == "gemma2":
        fields["attn_soft_cap"] = theirs.attn_logit_softcapping or 0.0
    if not recurrent:
        fields["context_length"] = theirs.max_position_embeddings
    if "sliding" in kinds:
        fields["sliding_window"] = theirs.sliding_window
    if "recurrent" in kinds:
        fields["lru_width"] = theirs.lru_width
        fields["conv_width"] = theirs.conv1d_width
    return {**fields, **expected_rope(kinds, theirs)}


def expected_rope(kinds: list[str], theirs: Any) -> dict[str, Any]:
    rope = theirs.rope_parameters
    by_kind = {
        kind: rope.get(f"{kind}_attention", rope)
        for kind in ("full", "sliding") if kind in kinds
    }
    fields = {
        f"rope_base_{kind}": section["rope_theta"]
        for kind, section in by_kind.items()
    }
    if "full" in by_kind:
        full = by_kind["full"]
        linear = full["rope_type"] == "linear"
        fields["rope_factor_full"] = full["factor"] if linear else 1.0
    share = rope.get("partial_rotary_factor", 1.0)
    fields["rope_dim"] = int(share * theirs.head_dim)
    return fields


@pytest.mark.parametrize("model_type", CLASSES)
def test_files_mean_what_the_reference_s_classes_read(
    model_type: str, tmp_path: Path
) -> None:
    accepted = 0
    for seed in range(FILES):
        config = Writer(model_type, seed).file()
        (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
        try:
            found = read_config(tmp_path).config
        except gemmakv.GemmaKVError as error:
            # Sizes that do not fit together, or that no kernel has.
            assert "head_dim" in str(error) or "kv_heads" in str(error)
            continue
        accepted += 1
        expected = expected_fields(config)
        ours = {key: getattr(found, key) for key in expected}
        assert ours == expected, config
    assert accepted >= ACCEPTED
