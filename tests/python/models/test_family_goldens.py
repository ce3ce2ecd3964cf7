"""Every family against logits that transformers computed in float32.

The models are those of tests/golden/families (golden_models.py), run past
several windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gemmakv
from support import golden_models
from support.golden_checks import (
    FACTOR,
    NAMES,
    ROUNDING_FACTOR,
    TOLERANCE,
    difference,
    fields_of,
    from_tensors,
    golden_of,
    logits_of,
    reference_of,
    tensors_of,
    tolerance_of,
)
from support.golden_models import Array, Golden


@pytest.mark.parametrize("name", NAMES)
def test_tensors_give_the_reference_s_logits(name: str) -> None:
    found = logits_of(from_tensors(name), golden_of(name).tokens())
    assert difference(reference_of(name), found) <= tolerance_of(name)


def test_the_goldens_have_every_shape() -> None:
    by_family: dict[str, set[str]] = {}
    for name in NAMES:
        found = by_family.setdefault(name.split("-")[0], set())
        found.update(_traits(golden_of(name)))
    assert sorted(by_family) == [
        "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "recurrentgemma"]
    for family, found in by_family.items():
        wanted = {
            "GQA", "MHA", "MQA", "64", "128", "256", "odd layers", "tied",
            "untied", "one file", "several files", "old keys", "new keys",
        }  # fmt: skip
        if family != "gemma":
            wanted.add("window")
        assert wanted <= found, (family, wanted - found)


def _traits(golden: Golden) -> Iterator[str]:
    text = golden.text_config
    heads = text.get("num_attention_heads", 8)
    kv_heads = text.get("num_key_value_heads", 4)
    yield "MQA" if kv_heads == 1 else "MHA" if kv_heads == heads else "GQA"
    if text["model_type"] == "recurrent_gemma":
        yield str(text["hidden_size"] // heads)
    else:
        yield str(text.get("head_dim", 256))
    if text["num_hidden_layers"] % 2 == 1:
        yield "odd layers"
    yield "tied" if text.get("tie_word_embeddings", True) else "untied"
    yield "several files" if golden.shards > 1 else "one file"
    newer = (
        "per_layer_config" if golden_models.gemma4(text) else "rope_parameters")
    yield "new keys" if newer in text else "old keys"
    window = text.get("sliding_window", text.get("attention_window_size"))
    if window and 3 * window <= golden_models.PROMPT:
        yield "window"


# ---- The goldens would notice.


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_part_of_the_model_counts(name: str) -> None:
    golden = golden_of(name)
    stated = fields_of(from_tensors(name).config)
    unnoticed = {}
    for what, fields, tensors in _wrong_models(stated, tensors_of(name)):
        changed = gemmakv.ModelConfig(**{**stated, **fields})
        gemma = gemmakv.Gemma.from_tensors(changed, tensors, threads=1)
        found = logits_of(gemma, golden.tokens())
        moved = difference(reference_of(name), found)
        factor = ROUNDING_FACTOR if "rounding" in what else FACTOR
        if not moved > factor * TOLERANCE:
            unnoticed[what] = moved
    assert unnoticed == {}


WrongModel = tuple[str, dict[str, Any], dict[str, Array]]


def _wrong_models(
    config: dict[str, Any], tensors: dict[str, Array]
) -> Iterator[WrongModel]:
    """(what is wrong, fields that change, weights)."""
    for what, fields in _wrong_fields(config):
        yield what, fields, tensors
    for what, field, parts in [
        ("no post-norms", "post_norms",
         ("post_attention_norm.", "post_ffw_norm.")),
        ("no q and k norms", "qk_norm", ("attn_q_norm", "attn_k_norm")),
        ("no biases", "biases", (".bias",)),
    ]:
        if config[field]:
            # Biases of the gates and of the convolution are always there.
            kept = {
                n: w for n, w in tensors.items()
                if not any(part in n for part in parts)
                or any(part in n for part in ("_gate.bias", "rec_conv"))
                and "ffn" not in n
            }
            yield what, {field: False}, kept
    if "output.weight" in tensors:
        yield "tied head", {}, _without(tensors, "output.weight")
    for kind in sorted({n.split(".")[-2] for n in tensors if "norm" in n}):
        # Of Gemma 4: with a 1 less than there is.
        yield f"{kind} without the 1", {}, {
            n: w - 1 if f".{kind}.weight" in f".{n}" else w
            for n, w in tensors.items()
        }
    if config["lru_width"]:
        yield from _wrong_recurrent_weights(config, tensors)
    if config["layer_scales"]:
        yield "no scales of layers", {"layer_scales": False}, {
            n: w for n, w in tensors.items() if "output_scale" not in n
        }
    for what, fields in _wrong_owners(config):
        yield what, fields, tensors
    if config["altup_inputs"]:
        yield from _wrong_streams(config, tensors)
    if config["laurel_rank"]:
        yield "no products beside attention", {"laurel_rank": 0}, {
            n: w for n, w in tensors.items() if "laurel" not in n
        }
    if config["ple_dim"]:
        yield from _wrong_per_layer_embeddings(config, tensors)
    if config["num_experts"]:
        yield from _wrong_experts(config, tensors)
    if config["keys_are_values"]:
        # Values of their own that are those of another order of keys.
        values = {
            n.replace("attn_k", "attn_v"): np.ascontiguousarray(w[::-1])
            for n, w in tensors.items() if n.endswith("attn_k.weight")
        }
        yield "other values", {"keys_are_values": False}, {**values, **tensors}


def _wrong_experts(
    config: dict[str, Any], tensors: dict[str, Array]
) -> Iterator[WrongModel]:
    none = {"num_experts": 0, "experts_used": 0, "expert_ffn_dim": 0}
    parts = ("_exps.", "ffn_gate_inp.", "ffw_norm_1.", "ffw_norm_2.")
    yield "no experts", none, {
        n: w for n, w in tensors.items()
        if not any(part in n for part in parts)
    }
    used, width = config["experts_used"], config["expert_ffn_dim"]
    yield "one expert less", {"experts_used": used - 1}, tensors
    yield "one expert more", {"experts_used": used + 1}, tensors

    def changed(end: str, change: Callable[[Array], Array]) -> dict[str, Array]:
        assert any(n.endswith(end) for n in tensors)
        return {
            n: np.ascontiguousarray(change(w), np.float32)
            if n.endswith(end) else w
            for n, w in tensors.items()
        }

    for what, end, change in (
        ("experts of other numbers", "ffn_gate_up_exps.weight",
         lambda w: np.roll(w, 1, 0)),
        ("down of other numbers", "ffn_down_exps.weight",
         lambda w: np.roll(w, 1, 0)),
        ("up before gate", "ffn_gate_up_exps.weight",
         lambda w: np.roll(w, width, 1)),
        ("gate and up by turns", "ffn_gate_up_exps.weight",
         lambda w: w.reshape(len(w), 2, width, -1).swapaxes(1, 2).reshape(
             w.shape)),
        ("scores of other numbers", "ffn_gate_inp.weight",
         lambda w: np.roll(w, 1, 0)),
        ("scores without their factor", "ffn_gate_inp.weight",
         lambda w: w * math.sqrt(config["hidden_size"])),
        ("no scale of the router", "ffn_gate_inp.scale", np.ones_like),
        ("no scale of experts", "ffn_down_exps.scale", np.ones_like),
        ("scales of other numbers", "ffn_down_exps.scale",
         lambda w: np.roll(w, 1)),
    ):
        yield what, {}, changed(end, change)
    # Norms in each other's place.
    for one, other in (("post_ffw_norm_1", "post_ffw_norm_2"),
                       ("pre_ffw_norm_2", "ffn_norm")):
        swap = {one: other, other: one}
        yield f"{one} for {other}", {}, {
            ".".join(swap.get(p, p) for p in n.split(".")): w
            for n, w in tensors.items()
        }


def _wrong_owners(
    config: dict[str, Any],
) -> Iterator[tuple[str, dict[str, Any]]]:
    owners, kinds = config["shares_kv"], config["layer_kinds"]
    for own in sorted({own for own in owners or [] if own is not None}):
        for other in range(own):
            if kinds[other] == kinds[own]:
                yield f"layer {other} for {own}", {"shares_kv": [
                    other if owner == own else owner for owner in owners]}


def _wrong_streams(
    config: dict[str, Any], tensors: dict[str, Array]
) -> Iterator[WrongModel]:
    inputs = config["altup_inputs"]
    active = (config["altup_active"] + 1) % inputs
    yield "another stream is computed", {"altup_active": active}, tensors
    if config["altup_correct_scale"]:
        yield "no scale behind the correction", {
            "altup_correct_scale": False}, tensors

    def changed(end: str, change: Callable[[Array], Array]) -> dict[str, Array]:
        return {
            n: np.ascontiguousarray(change(w)) if n.endswith(end) else w
            for n, w in tensors.items()
        }

    def transposed(maps: Array) -> Array:
        return maps.reshape(inputs, inputs, -1).swapaxes(0, 1).reshape(
            maps.shape)

    clipped = 0.5 * max(
        float(abs(w).max()) for n, w in tensors.items() if "predict_coef" in n)
    for what, end, change in (
        ("no prediction", "predict_coef.weight", np.zeros_like),
        ("transposed predictions", "predict_coef.weight", transposed),
        ("no correction", "correct_coef.weight", np.zeros_like),
        ("transposed correction", "correct_coef.weight", np.transpose),
        ("clipped predictions", "predict_coef.weight",
         lambda w: w.clip(-clipped, clipped)),
        ("clipped corrections", "correct_coef.weight",
         lambda w: w.clip(-clipped, clipped)),
        ("no router", "altup_router.weight", np.zeros_like),
        ("router without its divisor", "altup_router.weight",
         lambda w: config["hidden_size"] * w),
    ):
        yield what, {}, changed(end, change)
    for stem in ("altup_proj", "altup_unembd_proj"):
        first, second = f"{stem}.0.weight", f"{stem}.1.weight"
        yield f"{stem} of another stream", {}, {
            **tensors, first: tensors[second], second: tensors[first]}
    cutoffs, widths = config["sparsity_cutoff"], config["ffn_dim"]
    if cutoffs is None:
        return
    if not isinstance(widths, list):
        widths = [widths] * len(cutoffs)
    yield "all gates count", {"sparsity_cutoff": None}, tensors
    yield "the deviation of a sample", {"sparsity_cutoff": [
        z and z * math.sqrt(n / (n - 1))
        for z, n in zip(cutoffs, widths, strict=True)
    ]}, tensors
    if 0.0 in cutoffs:
        yield "a share of a half is none", {"sparsity_cutoff": [
            z or None for z in cutoffs]}, tensors


def _wrong_per_layer_embeddings(
    config: dict[str, Any], tensors: dict[str, Array]
) -> Iterator[WrongModel]:
    ends = (".inp_gate.weight", ".proj.weight", ".post_norm.weight")
    fields = {"ple_dim": 0, "ple_vocab": 0, "altup_correct_scale": False}
    yield "no per-layer embeddings", fields, {
        n: w for n, w in tensors.items()
        if not n.startswith("per_layer") and not n.endswith(ends)
    }
    table, proj = "per_layer_token_embd.weight", "per_layer_model_proj.weight"
    norm, dim = "per_layer_proj_norm.weight", config["ple_dim"]

    def changed(**arrays: Array) -> dict[str, Array]:
        return {**tensors, **arrays}

    rows, projected, weights = (tensors[n] for n in (table, proj, norm))
    # A factor of both parts together is taken out by the norm behind them.
    for what, arrays in {
        "rows of the next token": {table: np.roll(rows, 1, 0)},
        "rows by layer of another": {table: np.roll(rows, dim, 1)},
        "projections of another layer": {proj: np.roll(projected, dim, 0)},
        "table without its factor": {table: rows / math.sqrt(dim)},
        "no table": {table: 0 * rows},
        "no projection": {norm: 0 * weights},
    }.items():
        yield what, {}, changed(**{
            n: np.ascontiguousarray(w, np.float32) for n, w in arrays.items()})
    for end in ends:
        yield f"{end} of another layer", {}, changed(**{
            f"blk.2{end}": tensors[f"blk.3{end}"]})


def _wrong_fields(
    config: dict[str, Any],
) -> Iterator[tuple[str, dict[str, Any]]]:
    scale = config["embedding_scale"]
    exact = math.sqrt(config["hidden_size"])
    rounded = float(golden_models.to_bfloat16(np.float32(exact)))
    other = exact if config["lru_width"] else rounded
    if abs(other / scale - 1) > 1e-3:
        yield "rounding of the embedding's factor", {"embedding_scale": other}
    yield "no factor of the embedding", {"embedding_scale": 1.0}
    yield "query scale", {"query_scale": 1.1 * config["query_scale"]}
    if config["rms_epsilon"] > 1e-3:
        yield "epsilon", {"rms_epsilon": 1e-6}
    if config["value_norm"]:
        yield "no norm of values", {"value_norm": False}
    if config["still_pairs"]:
        yield from _wrong_still_pairs(config)
    else:
        half, whole = config["head_dim"] // 2, config["head_dim"]
        yield "rotated part", {
            "rope_dim": half if config["rope_dim"] == whole else whole}
    for cap in ("attn_soft_cap", "final_soft_cap"):
        if config[cap]:
            yield f"no {cap}", {cap: 0.0}
            yield f"larger {cap}", {cap: 1.2 * config[cap]}
    kinds = config["layer_kinds"]
    if "full" in kinds:
        yield "base of full layers", {
            "rope_base_full": 3 * config["rope_base_full"]}
        factor = config["rope_factor_full"]
        yield "factor of full layers", {
            "rope_factor_full": 2.0 if factor == 1 else 1.0}
    if "sliding" in kinds:
        yield "base of sliding layers", {
            "rope_base_sliding": 3 * config["rope_base_sliding"]}
        for step in (-1, 1):
            yield f"window by {step}", {
                "sliding_window": config["sliding_window"] + step}
    for layer, kind in enumerate(kinds):
        yield from _wrong_kind(config, layer, kind)


def _wrong_still_pairs(
    config: dict[str, Any],
) -> Iterator[tuple[str, dict[str, Any]]]:
    still = config["still_pairs"]
    yield "all pairs turn", {"still_pairs": 0}
    yield "one pair less turns", {
        "still_pairs": [n + 1 if n else 0 for n in still]}
    # The same number of values, but all in front, at their own frequencies.
    yield "leading values turn", {
        "still_pairs": 0,
        "rope_dim": [
            dim - 2 * n
            for dim, n in zip(config["rope_dim"], still, strict=True)
        ],
    }


def _wrong_kind(
    config: dict[str, Any], layer: int, kind: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    # Tensors of other shapes, and owners of another kind.
    if kind == "recurrent" or config["keys_are_values"] or config["shares_kv"]:
        return
    kinds = list(config["layer_kinds"])
    kinds[layer] = "full" if kind == "sliding" else "sliding"
    base = config[f"rope_base_{kind}"]
    yield f"kind of layer {layer}", {
        "layer_kinds": kinds,
        "sliding_window": config["sliding_window"] or 16,
        "rope_base_full": config["rope_base_full"] or base,
        "rope_base_sliding": config["rope_base_sliding"] or base,
    }


def _wrong_recurrent_weights(
    config: dict[str, Any], tensors: dict[str, Array]
) -> Iterator[WrongModel]:
    for gate in ("rec_input_gate", "rec_a_gate"):
        yield f"transposed {gate}", {}, {
            n: _transposed(w, config["lru_blocks"])
            if n.endswith(f"{gate}.weight") else w
            for n, w in tensors.items()
        }
    yield "reversed taps", {}, {
        n: np.ascontiguousarray(w[:, ::-1])
        if n.endswith("rec_conv.weight") else w
        for n, w in tensors.items()
    }
    for end in ("rec_a_param", "rec_conv.bias", "rec_input_gate.bias",
                "rec_a_gate.bias", "rec_x.bias", "rec_y.bias",
                "rec_output.bias", "attn_output.bias", "ffn_gate.bias",
                "ffn_up.bias", "ffn_down.bias"):
        yield f"zeros as {end}", {}, {
            n: np.zeros_like(w) if n.endswith(end) else w
            for n, w in tensors.items()
        }


def _transposed(gates: Array, blocks: int) -> Array:
    """Each block [outputs, inputs] the other way round."""
    parts = gates.reshape(blocks, -1, gates.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(parts).reshape(gates.shape)


def _without(tensors: dict[str, Array], name: str) -> dict[str, Array]:
    return {n: w for n, w in tensors.items() if n != name}
