"""GGUF files of the golden models, as far as that format can describe them.

It has no key for how queries are scaled, none for kinds of layers that follow
no period, and no names for recurrent layers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import gemmakv
from support import golden_configs, tiny_gguf
from support.golden_checks import (
    FACTOR,
    NAMES,
    TOLERANCE,
    difference,
    fields_of,
    golden_of,
    logits_of,
    reference_of,
    tensors_of,
)

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


def test_every_family_of_the_format_is_here() -> None:
    families = {name.split("-")[0] for name in GGUF_NAMES}
    assert families == {"gemma", "gemma2", "gemma3"}


@pytest.mark.parametrize("name", GGUF_NAMES)
def test_files_give_the_reference_s_logits(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    path = tiny_gguf.write(
        tmp_path / "m.gguf", metadata_of(config), tensors_of(name))
    gemma = gemmakv.Gemma.load(path)
    found, stated = fields_of(gemma.config), fields_of(config)
    for fields in (found, stated):
        del fields["eos_ids"]  # stand among the tokenizer's keys
    assert found == stated
    logits = logits_of(gemma, golden_of(name).tokens())
    assert difference(reference_of(name), logits) <= TOLERANCE


@pytest.mark.parametrize("name", GGUF_NAMES)
def test_each_key_counts(name: str, tmp_path: Path) -> None:
    meta = metadata_of(config_of(name))
    unnoticed = {}
    for key, (kind, value) in meta.items():
        change = _CHANGES.get(key.partition(".")[2])
        if change is None:
            continue
        path = tiny_gguf.write(
            tmp_path / "m.gguf",
            {**meta, key: (kind, change(value))},
            tensors_of(name),
        )
        found = logits_of(
            gemmakv.Gemma.load(path), golden_of(name).tokens())
        moved = difference(reference_of(name), found)
        if not moved > FACTOR * TOLERANCE:
            unnoticed[key] = moved
    assert unnoticed == {}


_CHANGES = {
    "attention.sliding_window": lambda v: v + 1,
    "attn_logit_softcapping": lambda v: v / 2 if v else 2.0,
    "final_logit_softcapping": lambda v: v / 2 if v else 5.0,
    "rope.freq_base": lambda v: 3 * v,
    "rope.scaling.factor": lambda v: v / 2,
}
