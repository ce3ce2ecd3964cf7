"""Models of embeddings against vectors that transformers computed in float32.

The models are those of tests/golden/embeddings (embedding_models.py), whose
texts are longer than two windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from support import embedding_models
from support.embedding_checks import fields, from_tensors
from support.golden_checks import difference
from support.golden_models import Array

# Of the range of the vectors' values. Measured: below 2e-6.
TOLERANCE = 5e-5
FACTOR = 20
NAMES = embedding_models.names()


def vectors_of(gemma: gemmakv.Gemma, texts: list[list[int]]) -> Array:
    return gemma.embed(texts)


@pytest.mark.parametrize("name", NAMES)
def test_vectors_are_those_of_the_reference(name: str) -> None:
    golden = embedding_models.read(name)
    found = vectors_of(from_tensors(golden), golden.texts())
    assert found.dtype == np.float32
    assert found.shape == (len(golden.lengths), golden.vector_size)
    assert difference(golden.reference(), found) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_a_directory_gives_the_same_vectors(name: str, tmp_path: Path) -> None:
    golden = embedding_models.read(name)
    folder = embedding_models.write(tmp_path / "model", golden)
    if golden.dense_dim or golden.vector_size != golden.hidden_size:
        gemma = gemmakv.Gemma.load(folder)
    else:
        with pytest.warns(gemmakv.PartialModelWarning, match="2_Dense"):
            gemma = gemmakv.Gemma.load(folder)
    expected = from_tensors(golden)
    assert gemma.config.arguments() == expected.config.arguments()
    found = gemma.embed(golden.texts())
    assert np.array_equal(found, expected.embed(golden.texts()))
    assert gemma.embedding_prompts == embedding_models.PROMPTS


@pytest.mark.parametrize("name", NAMES)
def test_each_part_of_the_model_counts(name: str) -> None:
    golden = embedding_models.read(name)
    unnoticed = {}
    for what, changed, tensors in _wrong_models(golden):
        config = gemmakv.ModelConfig(**{**fields(golden), **changed})
        gemma = gemmakv.Gemma.from_tensors(config, tensors)
        found = gemma.embed(golden.texts())
        moved = difference(golden.reference(), found)
        if not moved > FACTOR * TOLERANCE:
            unnoticed[what] = moved
    assert unnoticed == {}


def _wrong_models(
    golden: embedding_models.EmbeddingGolden,
) -> Iterator[tuple[str, dict[str, Any], dict[str, Array]]]:
    """(what is wrong, fields that change, weights)."""
    stated, tensors = fields(golden), golden.core_tensors()
    window = stated["sliding_window"]
    for step in (-1, 1):
        yield f"window by {step}", {"sliding_window": window + step}, tensors
    # As the files state it, and what the other family makes of that.
    written = golden.model.config["sliding_window"]
    yield "the window of a causal model", {"sliding_window": written}, tensors
    yield "full layers everywhere", {
        "layer_kinds": ["full"] * stated["num_layers"], "sliding_window": 0,
    }, tensors
    yield "query scale", {"query_scale": 1.1 * stated["query_scale"]}, tensors
    yield "base of full layers", {"rope_base_full": 3e6}, tensors
    yield "base of sliding layers", {"rope_base_sliding": 3e4}, tensors
    for kind in sorted({n.split(".")[-2] for n in tensors if "norm" in n}):
        yield f"{kind} without the 1", {}, {
            n: w - 1 if f".{kind}.weight" in f".{n}" else w
            for n, w in tensors.items()
        }
    if stated.get("embedding_dim"):
        yield from _wrong_second(stated, tensors)
    if not golden.dense_dim:
        return
    yield "nothing behind the mean", {"dense_dim": 0}, {
        n: w for n, w in tensors.items() if "dense" not in n}
    yield "one product behind the mean", {}, {
        **tensors,
        "dense_2.weight": np.eye(
            golden.dense_dim, golden.hidden_size, dtype=np.float32),
    }


def _wrong_second(
    stated: dict[str, Any], tensors: dict[str, Array]
) -> Iterator[tuple[str, dict[str, Any], dict[str, Array]]]:
    yield "no norm of values", {"value_norm": False}, tensors
    yield "a quarter of the pairs turns", {
        "still_pairs": [
            3 * dim // 8 if kind == "full" else 0
            for dim, kind in zip(
                stated["head_dim"], stated["layer_kinds"], strict=True)
        ],
    }, tensors
    yield "no scales of layers", {"layer_scales": False}, {
        n: w for n, w in tensors.items() if "layer_output_scale" not in n}
    names = ("inp_gate", ".proj.", "post_norm", "per_layer")
    without = {
        n: w for n, w in tensors.items()
        if not any(part in n for part in names) or "attn" in n
    }
    yield "no embeddings for layers", {"ple_dim": 0}, without
    # A factor of them would not: what comes of them is normed.
    yield "embeddings for the next layer", {}, {
        n: np.roll(w, stated["ple_dim"], 0)
        if n == "per_layer_model_proj.weight" else w
        for n, w in tensors.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_other_ways_to_pool_and_a_mask_of_one_direction_would_show(
    name: str,
) -> None:
    """What no configuration can say is computed by a causal model's parts."""
    golden = embedding_models.read(name)
    behind = ("dense_2", "dense_3", "embedding_projection")
    causal = {
        **fields(golden), "bidirectional": False, "dense_dim": 0,
        "embedding_dim": 0,
    }
    tensors = {
        n: w for n, w in golden.core_tensors().items()
        if not n.startswith(behind)
    }
    gemma = gemmakv.Gemma.from_tensors(gemmakv.ModelConfig(**causal), tensors)
    dense = [
        w for n, w in golden.core_tensors().items() if n.startswith(behind)]
    for pooling in ("mean", "last"):
        found = gemma.embed(golden.texts(), pooling=pooling)
        for weights in dense:
            found = found @ weights.T
        found /= np.linalg.norm(found, axis=1, keepdims=True)
        assert difference(golden.reference(), found) > FACTOR * TOLERANCE
    # Of one position, there is nothing to look at and one state to pool.
    for index, length in enumerate(golden.lengths):
        if length != 1:
            continue
        vector = found[index] / math.sqrt(float(found[index] @ found[index]))
        assert difference(golden.reference()[index], vector) <= TOLERANCE
