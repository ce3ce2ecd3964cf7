"""Directories of every family in Hugging Face's form, against the goldens."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemmakv.models.huggingface._config import read_config
from support import golden_configs, golden_models
from support.golden_checks import (
    FACTOR,
    MEAN_KL_TOLERANCE,
    NAMES,
    TOLERANCE,
    difference,
    fields_of,
    from_tensors,
    golden_of,
    load,
    logits_of,
    mean_kl,
    reference_of,
)
from support.golden_models import Golden


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_float32_files_are_the_same_model(name: str, tmp_path: Path) -> None:
    golden = golden_of(name)
    path = golden_models.write(tmp_path, golden, "F32")
    gemma = load(path, golden.multimodal)
    same = from_tensors(name)
    assert fields_of(gemma.config) == fields_of(same.config)
    assert gemma.fingerprint == same.fingerprint
    tokens = golden.tokens()
    found = logits_of(gemma, tokens)
    np.testing.assert_array_equal(found, logits_of(same, tokens))
    assert difference(reference_of(name), found) <= TOLERANCE


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("name", NAMES)
def test_files_of_16_bits_give_the_reference_s_distribution(
    name: str, dtype: str, tmp_path: Path
) -> None:
    golden = golden_of(name)
    path = golden_models.write(tmp_path, golden, dtype)
    gemma = load(path, golden.multimodal)
    found = logits_of(gemma, golden.tokens())
    assert mean_kl(reference_of(name), found) <= MEAN_KL_TOLERANCE


@pytest.mark.parametrize("type_name, changes", [
    ("gemma2-2b", {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
    ("recurrentgemma-2b", {
        "num_hidden_layers": 2, "_block_types": ["recurrent", "attention"]}),
])
def test_rotary_base_where_the_family_s_pattern_has_no_such_layer(
    type_name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = {
        **golden_configs.published(type_name), **changes, "rope_theta": 5e5}
    golden_models.write_config(tmp_path, config)
    found = read_config(tmp_path).config
    expected = golden_configs.model_config(config)
    assert found.layer_kinds == expected.layer_kinds
    for kind in set(found.layer_kinds) - {"recurrent"}:
        assert getattr(found, f"rope_base_{kind}") == 5e5


# ---- Every key of config.json that counts is read.


@pytest.mark.parametrize("name", NAMES)
def test_each_key_of_the_config_counts(name: str, tmp_path: Path) -> None:
    golden = golden_of(name)
    path = golden_models.write(tmp_path, golden)
    unnoticed = {}
    for what, config in _edited_configs(golden):
        golden_models.write_config(path, config)
        found = logits_of(load(path, golden.multimodal), golden.tokens())
        moved = difference(reference_of(name), found)
        if not moved > FACTOR * TOLERANCE:
            unnoticed[what] = moved
    assert unnoticed == {}


def _edited_configs(golden: Golden) -> Iterator[tuple[str, dict[str, Any]]]:
    """(key, config.json with another value for it)."""
    for keys, value in _leaves(golden.config):
        edit = _EDITS.get(keys[-1])
        if edit is None or value is None:
            continue
        if keys[-1] == "layer_types" and golden_models.gemma4(
            golden.text_config
        ):
            continue  # tensors of the types have shapes of their own
        config = copy.deepcopy(golden.config)
        place = config
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = edit(value)
        if place[keys[-1]] != value:
            yield ".".join(keys), config


def _leaves(
    config: dict[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in config.items():
        if key == "vision_config":
            continue
        if isinstance(value, dict):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


_EDITS = {
    "activation_sparsity_pattern": lambda v: [*v[1:], v[0]],
    "altup_active_idx": lambda v: (v + 1) % 3,
    "altup_correct_scale": lambda v: not v,
    "attention_window_size": lambda v: v + 1,
    "attn_logit_softcapping": lambda v: None,
    "factor": lambda v: v / 2,
    "final_logit_softcapping": lambda v: None,
    "layer_types": lambda v: [*v[1:], v[0]],
    "logits_soft_cap": lambda v: 0.8 * v,
    "partial_rotary_factor": lambda v: v / 2,
    "query_pre_attn_scalar": lambda v: v + v // 4,
    # What is below counts too little to be seen.
    "rms_norm_eps": lambda v: 1e-6 if v > 1e-3 else v,
    "rope_local_base_freq": lambda v: 3 * v,
    "rope_theta": lambda v: 3 * v,
    "sliding_window": lambda v: v + 1,
    "sliding_window_pattern": lambda v: v - 1,
}
