"""`Gemma.from_tensors`, every family: what does not fit is one clear error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv import Gemma, ModelConfig
from support import family_models, tiny_gguf
from support.bad_files import one_line
from support.family_models import FAMILIES


def refused(config: ModelConfig, tensors: dict[str, Any]) -> str:
    with pytest.raises((ValueError, gemmakv.CorruptFile)) as caught:
        Gemma.from_tensors(config, tensors, threads=1)
    text = one_line(caught.value)
    assert "expected" in text or "missing" in text
    return text


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_needed(family: str) -> None:
    config = family_models.config(family)
    whole = tiny_gguf.tensors(0, config)
    for name in whole:
        rest = {key: value for key, value in whole.items() if key != name}
        assert f"{name} is missing" in refused(config, rest)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_and_types(family: str) -> None:
    config = family_models.config(family)
    whole = tiny_gguf.tensors(0, config)
    for name, array in whole.items():
        for bad in (
            array[:-1], array[..., :-1], array[None, None],
            array.astype(np.float64), array.astype(np.int8), "text", None,
        ):  # fmt: skip
            assert name in refused(config, {**whole, name: bad})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("other", FAMILIES)
def test_tensors_of_another_family(family: str, other: str) -> None:
    if family == other:
        return
    config = family_models.config(family)
    refused(config, tiny_gguf.tensors(0, family_models.config(other)))


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_that_the_configuration_does_not_know(family: str) -> None:
    config = family_models.config(family)
    whole = tiny_gguf.tensors(0, config)
    layers = config.num_layers
    for name in (
        f"blk.{layers}.attn_norm.weight", "blk.0.attn_norm.bias",
        "blk.1.no_such.weight",
    ):  # fmt: skip
        text = refused(config, {**whole, name: np.ones(64, np.float32)})
        assert f"found tensor {name}" in text
        assert f"a {family} model of {layers} layers" in text


def test_a_configuration_that_contradicts_the_tensors() -> None:
    for family, changes, name in (
        ("gemma", {"kv_heads": 1}, "blk.0.attn_k.weight"),
        ("gemma", {"qk_norm": True}, "blk.0.attn_q_norm.weight"),
        ("gemma", {"biases": True}, "blk.0.attn_output.bias"),
        ("gemma", {"vocab_size": 99}, "token_embd.weight"),
        ("gemma", {"layer_kinds": ["full"] * 2, "num_layers": 2}, "blk.2."),
        ("gemma2", {"post_norms": False}, "blk.0.post_attention_norm.weight"),
        ("gemma3", {"qk_norm": False}, "blk.0.attn_q_norm.weight"),
        ("gemma3", {"head_dim": 64}, "blk.0.attn_q.weight"),
        ("gemma4", {"num_experts": 5}, "blk.0.ffn_gate_inp.weight"),
        ("gemma4", {"expert_ffn_dim": 16}, "blk.0.ffn_gate_up_exps.weight"),
        ("gemma4", {"num_experts": 0, "experts_used": 0, "expert_ffn_dim": 0},
         "blk.0."),
        ("recurrentgemma", {"biases": False}, "blk.0."),
        ("recurrentgemma", {"lru_width": 64}, "blk.0.rec_x.weight"),
        ("recurrentgemma", {"lru_blocks": 3}, "blk.0.rec_input_gate.weight"),
        ("recurrentgemma", {"conv_width": 3}, "blk.0.rec_conv.weight"),
        (
            "recurrentgemma",
            {"layer_kinds": ["recurrent"] * 4 + ["sliding"]},
            "blk.2.attn_q.weight",
        ),
    ):
        config = family_models.config(family, **changes)
        tensors = tiny_gguf.tensors(0, family_models.config(family))
        assert name in refused(config, tensors)


@pytest.mark.parametrize(
    "family, changes, name",
    [
        ("gemma", {"architecture": "llama"}, "architecture"),
        ("gemma", {"layer_kinds": ["full", "full", "half"]}, "layer_kinds"),
        ("gemma", {"layer_kinds": ["full"] * 2}, "layer_kinds"),
        ("gemma", {"layer_kinds": ["sliding"] * 3}, "sliding_window"),
        ("gemma", {"layer_kinds": ["recurrent"] * 3}, "lru_width"),
        ("gemma", {"lru_width": 64}, "lru_width"),
        ("gemma", {"conv_width": 4}, "conv_width"),
        ("gemma", {"rope_dim": 33}, "rope_dim"),
        ("gemma", {"rope_dim": 0}, "rope_dim"),
        ("gemma2", {"attn_soft_cap": -1.0}, "attn_soft_cap"),
        ("gemma2", {"final_soft_cap": float("nan")}, "final_soft_cap"),
        ("gemma2", {"kv_heads": 3}, "kv_heads"),
        ("gemma3", {"embedding_scale": float("inf")}, "embedding_scale"),
        ("gemma3", {"num_experts": 4, "experts_used": 2,
                    "expert_ffn_dim": 32}, "num_experts"),
        ("gemma4", {"experts_used": 7}, "experts_used"),
        ("gemma4", {"experts_used": 0}, "experts_used"),
        ("gemma4", {"num_experts": 0}, "experts_used"),
        ("gemma4", {"expert_ffn_dim": 0}, "expert_ffn_dim"),
        ("gemma4", {"expert_ffn_dim": 40}, "expert_ffn_dim"),
        ("recurrentgemma", {"lru_width": 0}, "lru_width"),
        ("recurrentgemma", {"lru_blocks": 0}, "lru_blocks"),
        ("recurrentgemma", {"lru_blocks": 4}, "lru_width"),
        ("recurrentgemma", {"conv_width": 0}, "conv_width"),
        ("recurrentgemma", {"conv_width": 1000}, "conv_width"),
    ],
)
def test_configurations_that_contradict_themselves(
    family: str, changes: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValueError) as caught:
        family_models.config(family, **changes)
    text = one_line(caught.value)
    assert name in text and "expected" in text
