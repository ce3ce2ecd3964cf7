"""Gemma 3n: residual streams, sparse layers and widths in config.json."""

from __future__ import annotations

import math
import statistics
import struct
from typing import Any

from gemmakv._core import ModelConfig
from gemmakv._support.documents import Section, is_size
from gemmakv.errors import brief


def widths(text: Section, key: str, default: int, layers: int) -> list[int]:
    """Of the feed-forward of each layer; a file states one, or a list.

    Raises CorruptFile.
    """
    stated = text.values.get(key)
    if not isinstance(stated, list):
        return [text.size(key, default)] * layers
    for entry in stated:
        if not is_size(entry) or entry == 0:
            raise text.wrong(key, f"sizes, found {brief(entry)}")
    if len(stated) != layers:
        raise text.wrong(
            key,
            f"one for each of {layers} layers, found {len(stated)}",
        )
    return list(stated)


def alternating_updates(
    text: Section, values: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of ModelConfig: streams, and embeddings for each layer.
    `values` has the sizes that have keys of their own.

    Raises CorruptFile.
    """
    inputs = values["altup_inputs"]
    if not 2 <= inputs <= 8:
        raise text.wrong("altup_num_inputs", "2..8")
    key = "altup_active_idx"
    active = text.values.get(key, 0)
    if not is_size(active) or active >= inputs:
        raise text.wrong(key, f"less than altup_num_inputs, {inputs}")
    # Weights are held below it while they are learned, and read as they are.
    clip = "altup_coef_clip"
    if clip in text and text.number(clip, 120.0) <= 0:
        raise text.wrong(clip, "a positive number or null")
    for key in ("laurel_rank", "hidden_size_per_layer_input"):
        if text.values.get(key, 1) in (0, None):
            raise text.wrong(key, "a size of 1 or more")
    return {
        "altup_active": active,
        "altup_correct_scale": text.flag("altup_correct_scale", True),
        "ple_dim": text.size("hidden_size_per_layer_input", 256),
        "ple_vocab": text.size("vocab_size_per_layer_input", 262_144),
    }


def sparse_layers(text: Section, base: ModelConfig) -> dict[str, Any]:
    """Arguments of ModelConfig: from shares of gates that are left out, the
    number of deviations above the mean beneath which such a share lies.

    Raises CorruptFile.
    """
    key = "activation_sparsity_pattern"
    stated = text.values.get(key)
    if stated is None:
        return {"sparsity_cutoff": base.arguments()["sparsity_cutoff"]}
    layers = base.num_layers
    if not isinstance(stated, list):
        raise text.wrong(key, f"a list of a share for each of {layers} layers")
    for share in stated:
        number = isinstance(share, (int, float)) and not isinstance(share, bool)
        if not number or (share != 0 and not abs(_argument(share)) < 1):
            raise text.wrong(
                key, f"shares from 0 to less than 1, found {brief(share)}"
            )
    if len(stated) != layers:
        raise text.wrong(
            key, f"one for each of {layers} layers, found {len(stated)}"
        )
    return {"sparsity_cutoff": [_cutoff(share) for share in stated]}


def _cutoff(share: float) -> float | None:
    """The quantile of a normal distribution, by the roundings of float32."""
    if share <= 0:
        return None
    quantile = statistics.NormalDist().inv_cdf((_argument(share) + 1) / 2)
    half = _float32(quantile / math.sqrt(2))
    return _float32(half * _float32(math.sqrt(2)))


def _argument(share: float) -> float:
    """Of erfinv, whose value is a quantile but for the root of 2; -1 or 1 has
    none.
    """
    return _float32(2 * _float32(share) - 1) if 0 <= share <= 1 else 1.0


def _float32(value: float) -> float:
    number: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return number
