"""Gemma 4's drafters against logits that transformers computed in float32.

The pairs are those of tests/golden/drafters (drafter_models.py), whose targets
run past several windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv.generation._requests import requests_of
from support import drafter_models, golden_configs
from support.drafter_models import LENGTHS, Pair
from support.golden_checks import difference
from support.golden_models import Array, core_tensors

# Of the range of the reference's logits.
TOLERANCE = 5e-5
FACTOR = 20
NAMES = drafter_models.names()


def target_of(pair: Pair, **keywords: Any) -> gemmakv.Gemma:
    config = golden_configs.model_config(pair.target.config)
    return gemmakv.Gemma.from_tensors(
        config, core_tensors(pair.target), **keywords)


def logits_of(target: gemmakv.Gemma, pair: Pair) -> Array:
    """[lengths, guesses, vocab_size]"""
    engine = requests_of(target).engine
    return np.stack([
        engine.draft_logits(pair.tokens()[:length], pair.guesses)
        for length in LENGTHS
    ])


def compared(reference: Array, found: Array) -> float:
    """The largest difference, in shares of the reference's range; of tokens
    that have no logit in one alone, infinite.
    """
    has = np.isfinite(reference)
    if not np.array_equal(has, np.isfinite(found)):
        return float("inf")
    return difference(reference[has], found[has])


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest) -> Pair:
    return drafter_models.read(request.param)


@pytest.fixture(scope="module")
def folder(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("drafter")
    return drafter_models.write(made / pair.name, pair.drafter)


def test_guesses_have_the_reference_s_logits(
    pair: Pair, folder: Path
) -> None:
    drafter = gemmakv.Gemma.load(folder, packed_cache=False)
    found = logits_of(target_of(pair, draft=drafter), pair)
    assert compared(pair.reference(), found) <= TOLERANCE
    assert np.array_equal(
        found.argmax(-1), pair.reference().argmax(-1))


@pytest.mark.parametrize("guesses", [0, 1025, 2**56, 2**62, 2**64 - 1])
def test_numbers_of_guesses_that_are_none(
    guesses: int, pair: Pair, folder: Path
) -> None:
    """`guesses` rows of logits of so many tokens are more than a size can
    say: 2**56 * 256 is 0."""
    target = target_of(
        pair, draft=gemmakv.Gemma.load(folder, packed_cache=False))
    expected = f"guesses: expected 1..1024, found {guesses}"
    with pytest.raises(ValueError, match=expected):
        requests_of(target).engine.draft_logits(pair.tokens(), guesses)


def test_clusters_leave_tokens_out() -> None:
    pair = drafter_models.read("clusters")
    config = pair.drafter.config
    share = config["centroid_intermediate_top_k"] / config["num_centroids"]
    assert np.isfinite(pair.reference()).mean() == share
    assert np.isfinite(drafter_models.read("dense").reference()).all()


def test_tensors_packed_files_and_threads_give_the_same(
    pair: Pair, folder: Path, tmp_path: Path
) -> None:
    loaded = gemmakv.Gemma.load(folder, packed_cache=tmp_path, threads=1)
    assert loaded.packed_weights.state == "written"
    expected = logits_of(target_of(pair, draft=loaded, threads=1), pair)
    again = gemmakv.Gemma.load(folder, packed_cache=tmp_path)
    assert again.packed_weights.state == "reused"
    made = gemmakv.Gemma.from_tensors(
        again.config, pair.drafter.core_tensors())
    assert made.fingerprint == again.fingerprint
    for drafter in (again, made):
        found = logits_of(target_of(pair, draft=drafter, threads=3), pair)
        assert np.array_equal(found, expected)


@pytest.mark.slow
def test_each_part_of_a_drafter_counts(pair: Pair, folder: Path) -> None:
    stated = gemmakv.Gemma.load(folder, packed_cache=False).config.arguments()
    del stated["name"]
    unnoticed = {}
    for what, fields, tensors in _wrong_drafters(
        stated, pair.drafter.core_tensors()
    ):
        drafter = gemmakv.Gemma.from_tensors(
            gemmakv.ModelConfig(**{**stated, **fields}), tensors)
        found = logits_of(target_of(pair, draft=drafter), pair)
        moved = compared(pair.reference(), found)
        if not moved > FACTOR * TOLERANCE:
            unnoticed[what] = moved
    assert unnoticed == {}


def _wrong_drafters(
    config: dict[str, Any], tensors: dict[str, Array]
) -> Iterator[tuple[str, dict[str, Any], dict[str, Array]]]:
    """(what is wrong, fields that change, weights)."""
    yield "query scale", {"query_scale": 0.5}, tensors
    last = config["num_layers"] - 1
    for name in tensors:
        if name == f"blk.{last}.layer_output_scale.weight":
            continue  # what it multiplies is normed
        if name == "masked_embd_ordering":
            changed = np.ascontiguousarray(tensors[name][::-1])
        elif name.endswith("scale.weight"):
            changed = 1.1 * tensors[name]
        else:
            changed = tensors[name].copy()
            changed[..., 1::2] *= 0.5
        yield name, {}, {**tensors, name: changed}
    if config["num_centroids"]:
        yield "one cluster more", {
            "centroids_used": config["centroids_used"] + 1}, tensors
