"""Goldens as models, and how near logits are to those of the reference."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import gemmakv
from support import golden_configs, golden_models
from support.golden_models import Array, Golden

# Of the reference logits' range. Measured: 3e-5 where scores reach a cap of
# 50 and attention looks at one position, below 4e-6 elsewhere.
TOLERANCE = 2e-4
MEAN_KL_TOLERANCE = 1e-4
# By what a wrong model must exceed TOLERANCE; where only a factor's rounding
# is wrong, by less.
FACTOR = 20
ROUNDING_FACTOR = 2.5

# Measured of Gemma 3n, past four windows: 2e-5 at most.
_CLOSER = {"gemma3n": 5e-5}

NAMES = golden_models.names()


def tolerance_of(name: str) -> float:
    """Of a golden's logits."""
    return _CLOSER.get(name.split("-")[0], TOLERANCE)


@functools.cache
def golden_of(name: str) -> Golden:
    return golden_models.read(name)


@functools.cache
def reference_of(name: str) -> Array:
    return golden_of(name).reference()


@functools.cache
def tensors_of(name: str) -> dict[str, Array]:
    return golden_models.core_tensors(golden_of(name))


def fields_of(config: gemmakv.ModelConfig) -> dict[str, Any]:
    """All fields but the name."""
    fields = config.arguments()
    del fields["name"]
    return fields


def logits_of(gemma: gemmakv.Gemma, tokens: list[int]) -> Array:
    cache = gemmakv.create_kv_cache(
        gemma.config, capacity_tokens=len(tokens), kv_dtype="f32")
    return gemma.logits(cache, tokens, all_positions=True)


def difference(reference: Array, found: Array) -> float:
    """The largest, in shares of the reference's range."""
    span = float(reference.max() - reference.min())
    return float(np.abs(reference - found).max()) / span


def mean_kl(reference: Array, found: Array) -> float:
    def log_softmax(x: Array) -> npt.NDArray[np.float64]:
        y = x.astype(np.float64) - x.max(-1, keepdims=True)
        result: npt.NDArray[np.float64] = (
            y - np.log(np.exp(y).sum(-1, keepdims=True)))
        return result

    p, q = log_softmax(reference), log_softmax(found)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@functools.cache
def from_tensors(name: str) -> gemmakv.Gemma:
    config = golden_configs.model_config(golden_of(name).config)
    return gemmakv.Gemma.from_tensors(config, tensors_of(name))


def load(path: Path, multimodal: bool) -> gemmakv.Gemma:
    """Loads a directory, which must tell of images if it is for them."""
    if multimodal:
        with pytest.warns(gemmakv.PartialModelWarning, match="images"):
            return gemmakv.Gemma.load(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return gemmakv.Gemma.load(path)
