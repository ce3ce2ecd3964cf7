"""GGUF files of the golden models, as far as that format can describe them.

It has no key for how queries are scaled, none for kinds of layers that follow
no period, and no names for recurrent layers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gemmakv
from support import tiny_gguf
from support.golden_checks import (
    FACTOR,
    TOLERANCE,
    difference,
    fields_of,
    golden_of,
    logits_of,
    reference_of,
)
from support.golden_gguf import (
    GGUF_NAMES,
    config_of,
    gguf_tensors,
    metadata_of,
)


def test_every_family_of_the_format_is_here() -> None:
    families = {name.split("-")[0] for name in GGUF_NAMES}
    assert families == {"gemma", "gemma2", "gemma3", "gemma3n", "gemma4"}


@pytest.mark.parametrize("name", GGUF_NAMES)
def test_files_give_the_reference_s_logits(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    path = tiny_gguf.write(
        tmp_path / "m.gguf", metadata_of(config), gguf_tensors(name))
    gemma = gemmakv.Gemma.load(path)
    found, stated = fields_of(gemma.config), fields_of(config)
    for fields in (found, stated):
        del fields["eos_ids"]  # stand among the tokenizer's keys
    assert found == stated
    logits = logits_of(gemma, golden_of(name).tokens())
    assert difference(reference_of(name), logits) <= TOLERANCE


@pytest.mark.slow
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
            gguf_tensors(name),
        )
        found = logits_of(
            gemmakv.Gemma.load(path), golden_of(name).tokens())
        moved = difference(reference_of(name), found)
        if not moved > FACTOR * TOLERANCE:
            unnoticed[key] = moved
    assert unnoticed == {}


@pytest.mark.parametrize("name", [n for n in GGUF_NAMES if "moe" in n])
def test_gates_of_experts_may_stand_apart(name: str, tmp_path: Path) -> None:
    """The form of older converters: the same bits."""
    config, tokens = config_of(name), golden_of(name).tokens()
    tensors, meta = gguf_tensors(name), metadata_of(config)
    both = gemmakv.Gemma.load(
        tiny_gguf.write(tmp_path / "a.gguf", meta, tensors))
    for layer in range(config.num_layers):
        prefix = f"blk.{layer}.ffn_"
        gate_up = tensors.pop(f"{prefix}gate_up_exps.weight")
        width = config.expert_ffn_dim
        tensors[f"{prefix}gate_exps.weight"] = gate_up[:, :width]
        tensors[f"{prefix}up_exps.weight"] = gate_up[:, width:]
    apart = gemmakv.Gemma.load(
        tiny_gguf.write(tmp_path / "b.gguf", meta, tensors))
    assert np.array_equal(logits_of(both, tokens), logits_of(apart, tokens))


_CHANGES = {
    "attention.sliding_window": lambda v: v + 1,
    "attn_logit_softcapping": lambda v: v / 2 if v else 2.0,
    "final_logit_softcapping": lambda v: v / 2 if v else 5.0,
    # Of streams: the flags of arrays behind their type.
    "altup.active_idx": lambda v: v + 1,
    "activation_sparsity_scale": lambda v: (v[0], [*v[1][1:], v[1][0]]),
    "rope.freq_base": lambda v: 3 * v,
    "rope.freq_base_swa": lambda v: 3 * v,
    "rope.scaling.factor": lambda v: v / 2,
    "expert_used_count": lambda v: v - 1,
}
