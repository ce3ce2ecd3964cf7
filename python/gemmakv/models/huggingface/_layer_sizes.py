"""Gemma 4: what its full layers have of their own in config.json."""

from __future__ import annotations

from typing import Any

from gemmakv._core import ModelConfig
from gemmakv._support.documents import Section
from gemmakv.errors import CorruptFile

_SIZES = {"head_dim": "head_dim", "kv_heads": "num_key_value_heads"}
_TYPES = {"full_attention": "full", "sliding_attention": "sliding"}


def encoder_layers(
    text: Section, kinds: list[str], base: ModelConfig
) -> dict[str, Any]:
    """What EmbeddingGemma 2 has of Gemma 4: arguments of ModelConfig.

    Raises CorruptFile or MismatchError.
    """
    for key, expected in _NOT_IN_ENCODERS.items():
        if text.values.get(key) not in (None, False, 0):
            raise text.refusal(key, expected)
    values = full_layer_sizes(text, kinds, base, full_kv_heads=1)
    return {
        **values,
        **rope_by_kind(text, kinds, values["head_dim"], share=1.0),
        "ple_dim": text.size("hidden_size_per_layer_input", 512),
        "ple_vocab": 0,
        "embedding_dim": text.size("embedding_dim", 768),
    }


_NOT_IN_ENCODERS = {
    "attention_k_eq_v": "false for this model_type",
    "num_kv_shared_layers": "0 for this model_type",
    "enable_moe_block": "false for this model_type",
    "final_logit_softcapping": "null for this model_type",
}


def full_layer_sizes(
    text: Section,
    kinds: list[str],
    base: ModelConfig,
    full_kv_heads: int | None = None,
) -> dict[str, Any]:
    """Arguments of ModelConfig, a number for each layer: newer files have a
    map of layers or of their types, older ones a key for all full layers.
    `full_kv_heads` is what that one means where it is not stated; None: it
    counts only where keys are values.

    Raises CorruptFile.
    """
    same = text.flag("attention_k_eq_v", False)
    sizes = {"head_dim": base.head_dim, "kv_heads": base.kv_heads}
    layers = [dict(sizes) for _ in kinds]
    overrides = text.section("per_layer_config")
    if overrides is not None:
        for key in overrides.values:
            _override(overrides, key, kinds, layers)
    else:
        full = {"head_dim": text.size("global_head_dim", 512)}
        heads = "num_global_key_value_heads"
        if full_kv_heads is not None or (same and heads in text):
            full["kv_heads"] = text.size(heads, full_kv_heads or 1)
        for kind, layer in zip(kinds, layers, strict=True):
            if kind == "full":
                layer.update(full)
    for name in sizes:
        if len(
            {(k, size[name]) for k, size in zip(kinds, layers, strict=True)}
        ) > len(set(kinds)):
            raise text.wrong(
                "per_layer_config", f"one {_SIZES[name]} for layers of a type"
            )
    return {
        **{name: [layer[name] for layer in layers] for name in sizes},
        "keys_are_values": same,
    }


def _override(
    overrides: Section,
    key: str,
    kinds: list[str],
    layers: list[dict[str, int]],
) -> None:
    section = overrides.section(key)
    if section is None:
        raise overrides.wrong(key, "an object")
    for name in section.values:
        if name not in _SIZES.values():
            raise section.refusal(name, f"{' or '.join(_SIZES.values())} only")
    if key in _TYPES:
        chosen = [i for i, kind in enumerate(kinds) if kind == _TYPES[key]]
    elif key.isdecimal() and int(key) < len(kinds):
        chosen = [int(key)]
    else:
        raise CorruptFile(
            f"{overrides.source}: {overrides.prefix.removesuffix('.')} has the "
            f"key {key!r}, expected {' or '.join(_TYPES)} or a layer below "
            f"{len(kinds)}"
        )
    for i in chosen:
        for name, stated in _SIZES.items():
            layers[i][name] = section.size(stated, layers[i][name])


def shared_layers(
    text: Section,
    kinds: list[str],
    ffn_dim: int | list[int],
    default: int = 0,
) -> dict[str, Any]:
    """Arguments of ModelConfig: the last layers read the keys and values of
    the last one before them that is of their kind. `default` is how many they
    are where the file does not say.

    Raises CorruptFile.
    """
    key = "num_kv_shared_layers"
    stated = text.values.get(key)
    if (default if stated is None else stated) == 0:
        return {}
    shared = text.size(key, default)
    own = kinds[: max(0, len(kinds) - shared)]
    last = {kind: i for i, kind in enumerate(own)}
    if set(last) != set(kinds):
        raise text.wrong(key, "layers of each type before those that share")
    wide = 2 if text.flag("use_double_wide_mlp", False) else 1
    dims = ffn_dim if isinstance(ffn_dim, list) else [ffn_dim] * len(kinds)
    return {
        "shares_kv": [
            None if i < len(own) else last[kind] for i, kind in enumerate(kinds)
        ],
        "ffn_dim": [
            dim if i < len(own) else wide * dim for i, dim in enumerate(dims)
        ],
    }


def per_layer_embeddings(text: Section, has_table: bool) -> dict[str, Any]:
    """Arguments of ModelConfig, of a kind of model that has such a table
    unless it says otherwise, or that never has one.

    Raises CorruptFile or MismatchError.
    """
    key = "hidden_size_per_layer_input"
    if text.values.get(key, 256 if has_table else 0) in (0, None):
        return {}
    if not has_table:
        raise text.refusal(key, "0 for this model_type")
    return {
        "ple_dim": text.size(key, 256),
        "ple_vocab": text.size("vocab_size_per_layer_input", 262_144),
    }


def experts(text: Section) -> dict[str, Any]:
    """Arguments of ModelConfig. Sizes of experts that are not there, which
    files may state, count for nothing.

    Raises CorruptFile.
    """
    if not text.flag("enable_moe_block", False):
        return {}
    sizes = {
        "num_experts": "num_experts",
        "experts_used": "top_k_experts",
        "expert_ffn_dim": "moe_intermediate_size",
    }
    for key in sizes.values():
        if key not in text:
            raise text.wrong(key, "a size with enable_moe_block")
    found = {name: text.size(key, 0) for name, key in sizes.items()}
    if found["experts_used"] > found["num_experts"]:
        raise text.wrong(
            "top_k_experts", f"at most num_experts {found['num_experts']}"
        )
    if found["expert_ffn_dim"] % 16:
        raise text.wrong("moe_intermediate_size", "a multiple of 16")
    return found


def rope_by_kind(
    text: Section, kinds: list[str], head_dims: list[int], share: float = 0.25
) -> dict[str, Any]:
    """Arguments of ModelConfig. Pairs of all values of a head turn, or in
    proportional embeddings a leading share of these pairs; `share` is that of
    full layers where the file says nothing.

    Raises CorruptFile or MismatchError.
    """
    both = text.section("rope_parameters")
    if both is None:
        both = Section(
            _default_rope(share), text.source, f"{text.prefix}rope_parameters."
        )
    values: dict[str, Any] = {"rope_dim": head_dims}
    still = [0] * len(kinds)
    for layer_type, kind in _TYPES.items():
        if kind not in kinds:
            continue
        section = both.section(layer_type)
        if section is None:
            raise both.wrong(layer_type, "an object")
        theta = section.number("rope_theta", 0.0)
        if theta <= 1:
            raise section.wrong("rope_theta", "a number above 1")
        values[f"rope_base_{kind}"] = theta
        known = ("default", "proportional")
        rope_type = section.text("rope_type", "")
        if rope_type not in known:
            raise section.refusal("rope_type", f"{known[0]!r} or {known[1]!r}")
        if rope_type == "default":
            for key in ("factor", "partial_rotary_factor"):
                if section.number(key, 1.0) != 1:
                    raise section.refusal(key, "1 with rope_type 'default'")
            continue
        factor = section.number("factor", 1.0)
        if factor < 1:
            raise section.wrong("factor", "a number >= 1")
        values[f"rope_factor_{kind}"] = factor
        turning = section.number("partial_rotary_factor", 1.0)
        if not 0 <= turning <= 1:
            raise section.wrong("partial_rotary_factor", "a share of 0 to 1")
        for i, dim in enumerate(head_dims):
            if kinds[i] == kind:
                still[i] = dim // 2 - int(turning * dim // 2)
    values["still_pairs"] = still
    return values


def _default_rope(share: float) -> dict[str, Any]:
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": share,
            "rope_theta": 1_000_000.0,
        },
    }
