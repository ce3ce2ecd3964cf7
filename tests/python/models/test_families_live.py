"""Random models of every family against transformers, live.

transformers itself writes the directories: sharded, in float32 and bfloat16,
text models and multimodal ones. Needs torch. tools/random_models.py runs as
many as one likes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gemmakv
from support.golden_checks import (
    MEAN_KL_TOLERANCE,
    TOLERANCE,
    difference,
    load,
    logits_of,
    mean_kl,
)

torch = pytest.importorskip("torch", reason="the reference needs torch")
transformers = pytest.importorskip(
    "transformers", reason="the reference is transformers")
random_models = pytest.importorskip("support.random_models")

FAMILIES = [
    "gemma", "gemma2", "gemma3", "multimodal", "recurrentgemma", "gemma4",
    "vaultgemma", "experts", "gemma3n",
]  # fmt: skip
# More than three windows of the widest that a model may have; the last takes
# several steps of the scheduler.
LENGTHS = {3: 80, 4: 81, 7: 300}
SEEDS = sorted(LENGTHS)
NEW_TOKENS = 48


def test_the_reference_is_there() -> None:
    assert transformers.GemmaForCausalLM
    assert random_models.FAMILIES == FAMILIES


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_gives_its_logits(
    family: str, seed: int, tmp_path: Path
) -> None:
    model = random_models.random_model(family, seed)
    tokens = random_models.prompt_of(model, seed, LENGTHS[seed])
    expected = random_models.reference_logits(model, tokens)
    path = random_models.save(model, tmp_path / "f32")
    assert (path / "model.safetensors.index.json").exists()
    found = logits_of(load(path, family == "multimodal"), tokens)
    assert difference(expected, found) <= TOLERANCE

    path = random_models.save(model.to(torch.bfloat16), tmp_path / "bf16")
    found = logits_of(load(path, family == "multimodal"), tokens)
    assert mean_kl(expected, found) <= MEAN_KL_TOLERANCE


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_replies_are_the_reference_s(
    family: str, seed: int, tmp_path: Path
) -> None:
    model = random_models.random_model(family, seed)
    tokens = random_models.prompt_of(model, seed, LENGTHS[seed])
    gemma = load(random_models.save(model, tmp_path), family == "multimodal")
    cache = gemmakv.create_kv_cache(
        gemma.config,
        capacity_tokens=len(tokens) + NEW_TOKENS,
        kv_dtype="f32",
    )
    reply = gemma.generate(cache, tokens, max_tokens=NEW_TOKENS).token_ids
    # One pass over the prompt and the reply: each token must be the argmax
    # of what precedes it, which no cache of the reference's has part in.
    logits = random_models.reference_logits(model, [*tokens, *reply])
    logits = logits[len(tokens) - 1 : -1]
    chosen = logits[range(len(reply)), reply]
    behind = logits.max(-1) - chosen  # above 0 only where two are alike
    assert behind.max() <= TOLERANCE * (logits.max() - logits.min())
    assert len(reply) == NEW_TOKENS or reply[-1] == 0
    assert len(set(reply)) > 1, "a reply that shows nothing"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", random_models.EMBEDDING_FAMILIES)
def test_vectors_of_what_transformers_writes(
    family: str, seed: int, tmp_path: Path
) -> None:
    model = random_models.random_embedding_model(family, seed)
    texts = [
        random_models.prompt_of(model, seed + i, length)
        for i, length in enumerate((LENGTHS[seed], 1, 24))
    ]
    expected = np.stack(
        [random_models.reference_vector(model, text) for text in texts])
    random_models.save(model, tmp_path)
    if family == "embedding":
        with pytest.warns(gemmakv.PartialModelWarning, match="2_Dense"):
            gemma = gemmakv.Gemma.load(tmp_path)
    else:
        gemma = load(tmp_path, False)
    assert difference(expected, gemma.embed(texts)) <= 5e-5
