"""Rotary embeddings of a config.json, in its older and newer keys."""

from __future__ import annotations

from typing import Any

from gemmakv._core import ModelConfig
from gemmakv._support.documents import Section

_LAYER_TYPES = ("full_attention", "sliding_attention")


def rope_values(
    text: Section, base: ModelConfig, kinds: list[str]
) -> dict[str, Any]:
    """Arguments of ModelConfig for layers of these kinds; `base` states the
    family.

    Raises CorruptFile or MismatchError.
    """
    if base.architecture in ("gemma3", "gemma3n", "gemma-embedding"):
        return _by_layer_type(text, base)
    key = "rope_scaling"
    section = text.section(key)
    if section is None or not section.values:
        key = "rope_parameters"
        section = text.section(key)
    for layer_type in _LAYER_TYPES:
        if section is not None and layer_type in section:
            raise text.refusal(key, "the same for all layer types")
    theta, factor = _base_and_factor(
        text, section, text.number("rope_theta", 10000.0)
    )
    values: dict[str, Any] = {"rope_dim": _rope_dim(text, section, base)}
    if "full" in kinds:
        values["rope_base_full"] = theta
    if "sliding" in kinds:
        values["rope_base_sliding"] = theta
        if factor != 1:
            raise text.refusal(key, "no scaling for this model_type")
    else:
        values["rope_factor_full"] = factor
    return values


def _by_layer_type(text: Section, base: ModelConfig) -> dict[str, Any]:
    full = sliding = None
    both = text.section("rope_parameters")
    if both is not None:
        full = both.section("full_attention")
        sliding = both.section("sliding_attention")
        if full is None and sliding is None and both.values:
            raise text.wrong("rope_parameters", "an object for each layer type")
    # The older keys; a scaling there is that of full layers.
    scaling = text.section("rope_scaling")
    theta, factor = _base_and_factor(
        text, full, text.number("rope_theta", 1e6)
    )
    if scaling is not None and scaling.values:
        theta, factor = _base_and_factor(text, scaling, theta)
    local, local_factor = _base_and_factor(
        text, sliding, text.number("rope_local_base_freq", 1e4)
    )
    if local_factor != 1:
        raise text.refusal("rope_parameters", "no scaling of sliding layers")
    for section in (text, full, sliding, scaling):
        if section and section.number("partial_rotary_factor", 1) != 1:
            raise section.refusal("partial_rotary_factor", "1")
    return {
        "rope_dim": base.head_dim,
        "rope_base_full": theta,
        "rope_base_sliding": local,
        "rope_factor_full": factor,
    }


def _base_and_factor(
    text: Section, section: Section | None, theta: float
) -> tuple[float, float]:
    """Base frequency and linear factor; `theta` where `section` has none."""
    if section is None:
        return _above_one(text, theta), 1.0
    theta = _above_one(section, section.number("rope_theta", theta))
    key = "rope_type" if "rope_type" in section else "type"
    kind = section.text(key, "default")
    if kind == "default":
        return theta, 1.0
    if kind != "linear":
        raise section.refusal(key, "'default' or 'linear'")
    factor = section.number("factor", 0.0)
    if factor < 1:
        raise section.wrong("factor", "a number >= 1")
    return theta, factor


def _above_one(section: Section, theta: float) -> float:
    if theta <= 1:
        raise section.wrong("rope_theta", "a number above 1")
    return theta


def _rope_dim(text: Section, section: Section | None, base: ModelConfig) -> int:
    recurrent = base.architecture == "recurrentgemma"
    share = text.number("partial_rotary_factor", 0.5 if recurrent else 1.0)
    if section is not None:
        share = section.number("partial_rotary_factor", share)
    if not recurrent and share != 1:
        raise text.refusal("partial_rotary_factor", "1")
    rope_dim = int(base.head_dim * share)
    if not 0 < rope_dim <= base.head_dim or rope_dim % 2 != 0:
        raise text.wrong(
            "partial_rotary_factor",
            f"a part of head_dim {base.head_dim} that is even",
        )
    return rope_dim
