"""Gemma 4's drafters guess, and nothing else changes."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv import Gemma, KVCache
from gemmakv.generation._requests import requests_of
from support import drafter_models, golden_configs, guesses, tiny_gguf
from support.golden_models import core_tensors

SAME: Any = {"ignore_eos": True, "logit_bias": {30: 1000.0}}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"ignore_eos": True},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"temperature": 0.3, "seed": 4, "repetition_penalty": 1.2},
    {"frequency_penalty": 0.4, "presence_penalty": 0.2, "min_tokens": 9},
    {**SAME, "max_tokens": 120},
    {**SAME, "max_tokens": 120, "stop_token_ids": [30], "min_tokens": 40},
]


def loaded(
    name: str, folder: Path, intermediate_size: int | None = None
) -> Gemma:
    """A golden's target with its drafter. With a width of its feed-forward,
    steps of the target take longer, and no token is without a logit.
    """
    pair = drafter_models.read(name)
    target, small = pair.target, pair.drafter
    if intermediate_size:
        wide = {**target.config, "intermediate_size": intermediate_size}
        target = dataclasses.replace(target, config=wide)
        count = small.config.get("num_centroids")
        all_of_them = {**small.config, "centroid_intermediate_top_k": count}
        small = dataclasses.replace(small, config=all_of_them)
    drafter = Gemma.load(
        drafter_models.write(folder, small), packed_cache=False)
    return Gemma.from_tensors(
        golden_configs.model_config(target.config), core_tensors(target),
        draft=drafter)


@pytest.fixture(scope="module", params=drafter_models.names())
def gemma(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Gemma:
    folder = tmp_path_factory.mktemp("drafter") / request.param
    return loaded(request.param, folder)


def prompt_of(seed: int, length: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [2, *rng.integers(3, 150, length - 1).tolist()]


def new(gemma: Gemma, **options: Any) -> KVCache:
    return gemmakv.create_kv_cache(
        gemma.config, capacity_tokens=4096, **options)


@pytest.mark.parametrize("options", OPTIONS)
def test_nothing_else_changes(gemma: Gemma, options: dict[str, Any]) -> None:
    options = {"max_tokens": 60, "top_logprobs": 3, **options}
    plain, guessed = new(gemma), new(gemma)
    for turn in range(3):  # the conversation goes on
        prompt = prompt_of(turn, 30)
        expected = gemma.generate(plain, prompt, speculate="off", **options)
        found = gemma.generate(guessed, prompt, **options)
        guesses.check_same(found, guessed, expected, plain)
        plain.truncate(len(plain) // 2)
        guessed.truncate(len(guessed) // 2)


@pytest.mark.parametrize("name", drafter_models.names())
def test_it_guesses_where_that_pays(name: str, tmp_path: Path) -> None:
    """Whatever it says, the bias makes it right."""
    gemma = loaded(name, tmp_path / "drafter", 4096)
    before = requests_of(gemma).engine.draft_rows
    until = time.monotonic() + 60  # a busy machine may hide it for a while
    while time.monotonic() < until:
        said = gemma.generate(
            new(gemma), prompt_of(1, 20), max_tokens=150, **SAME)
        assert said.token_ids == [30] * 150
        assert said.usage.drafted >= said.usage.accepted
        if said.usage.accepted:
            break
    else:
        pytest.fail("no guess was made")
    assert requests_of(gemma).engine.draft_rows > before
    off = gemma.generate(
        new(gemma), prompt_of(1, 20), max_tokens=30, speculate="off", **SAME)
    assert off.usage.drafted == 0


def test_random_requests(gemma: Gemma) -> None:
    """Turns, forks, rewinds, restored conversations, stops: with and without
    guesses the same tokens and conversations.
    """
    rng = random.Random(7)
    pairs = [(new(gemma), new(gemma))]
    for step in range(40):
        plain, guessed = pairs[rng.randrange(len(pairs))]
        action = rng.randrange(5)
        if action == 0 and len(plain):
            pairs.append((plain.fork(), guessed.fork()))
        elif action == 1 and len(plain) > 1:
            length = rng.randrange(1, len(plain))
            plain.truncate(length)
            guessed.truncate(length)
        elif action == 2 and len(plain):
            pairs.append((
                gemmakv.KVCache.from_bytes(plain.to_bytes()),
                gemmakv.KVCache.from_bytes(guessed.to_bytes()),
            ))
        options: dict[str, Any] = {
            "max_tokens": rng.choice([1, 2, 17, 40]),
            "temperature": rng.choice([0.0, 0.7, 1.3]),
            "seed": step,
            "ignore_eos": rng.random() < 0.5,
            "stop_token_ids": rng.choice([[], [5, 6, 7, 8, 9]]),
            "logprobs": True,
        }
        if rng.random() < 0.4:
            options["logit_bias"] = {30: 100.0, 31: 99.5}
        prompt = prompt_of(step, rng.choice([1, 2, 5, 30]))
        expected = gemma.generate(plain, prompt, speculate="off", **options)
        found = gemma.generate(guessed, prompt, **options)
        guesses.check_same(found, guessed, expected, plain)
        if len(plain) > 3500:
            plain.truncate(10)
            guessed.truncate(10)
    for plain, guessed in pairs:
        assert plain.tokens.tolist() == guessed.tokens.tolist()


def test_many_at_once(gemma: Gemma) -> None:
    def say(seed: int, speculate: str) -> list[int]:
        cache = new(gemma)
        found = []
        for turn in range(3):
            bias = {"logit_bias": {30: 60.0}} if seed % 2 else {}
            found += gemma.generate(
                cache, prompt_of(seed + turn, 9 + seed), speculate=speculate,
                temperature=0.7, seed=seed, max_tokens=40, **bias,
            ).token_ids  # fmt: skip
        return found

    guesses.check_many_at_once(say, "draft")


def test_a_stream_that_is_left_keeps_what_was_delivered(gemma: Gemma) -> None:
    prompt = prompt_of(3, 25)
    whole = gemma.generate(
        new(gemma), prompt, max_tokens=80, speculate="off", **SAME)
    cache = new(gemma)
    with gemma.stream(cache, prompt, max_tokens=80, **SAME) as stream:
        read = [next(stream).token_id for _ in range(7)]
    assert read == whole.token_ids[:7]
    kept = cache.tokens.tolist()
    assert kept == [*prompt, *whole.token_ids][: len(kept)]
    # It goes on as one that was never left.
    plain = new(gemma)
    plain_said = gemma.generate(
        plain, [*kept, 9], max_tokens=20, speculate="off", ignore_eos=True)
    said = gemma.generate(cache, [9], max_tokens=20, ignore_eos=True)
    assert said.token_ids == plain_said.token_ids


def test_a_pool_that_is_full_changes_nothing(tmp_path: Path) -> None:
    gemma = loaded("clusters", tmp_path / "drafter", 4096)
    probe = new(gemma)
    gemma.generate(probe, prompt_of(0, 40), max_tokens=60, **SAME)
    pool = gemmakv.BlockPool(int(probe.nbytes * 2.2))
    caches = [new(gemma, pool=pool) for _ in range(3)]
    prompts = [prompt_of(seed, 40) for seed in range(3)]
    rows = gemma.generate_batch(caches, prompts, max_tokens=20, **SAME)
    for row in rows:
        assert row.token_ids == [30] * 20


# ---- What is refused.


def test_a_drafter_alone_generates_nothing(tmp_path: Path) -> None:
    pair = drafter_models.read("clusters")
    drafter = Gemma.load(
        drafter_models.write(tmp_path / "drafter", pair.drafter))
    expected = "gemma4-assistant .*hidden_size 80.*draft="
    with pytest.raises(ValueError, match=expected):
        gemmakv.create_kv_cache(drafter.config)
    target = golden_configs.model_config(pair.target.config)
    cache = gemmakv.create_kv_cache(target)
    with pytest.raises(ValueError, match=expected):
        drafter.generate(cache, [2, 3])
    with pytest.raises(ValueError, match=expected):
        drafter.embed([[2, 3]], pooling="mean")
    gemma = Gemma.from_tensors(target, core_tensors(pair.target))
    with pytest.raises(ValueError, match=expected):
        Gemma.from_tensors(
            drafter.config, pair.drafter.core_tensors(), draft=gemma)
    assert drafter.config.kv_bytes_per_token() == (0, 0)


def test_one_for_another_model_is_refused(tmp_path: Path) -> None:
    clusters = drafter_models.read("clusters")
    stated = golden_configs.model_config(clusters.target.config).arguments()
    del stated["name"]
    drafter = Gemma.load(
        drafter_models.write(tmp_path / "drafter", clusters.drafter))
    for fields, expected in [
        ({"hidden_size": 96},
         "hidden_size 80.*96"),
        ({"vocab_size": 272}, "vocab_size 256.*272"),
        ({"sliding_window": 24},
         "sliding_window 16.*24"),
        ({"rope_base_full": 5e5}, "full .*rope_base "),
        ({"head_dim": 64, "rope_dim": 64, "still_pairs": 0},
         "full .*head_dim 128.*64"),
        ({"kv_heads": 2}, "sliding .*kv_heads 1.*2"),
        ({"layer_kinds": ["full"] * 7, "shares_kv": None, "head_dim": 128,
          "sliding_window": 0, "rope_base_sliding": 1e4, "rope_dim": 128,
          "still_pairs": 48},
         "sliding .*none"),
    ]:
        config = gemmakv.ModelConfig(**{**stated, **fields})
        with pytest.raises(gemmakv.MismatchError, match=expected):
            Gemma.from_tensors(config, _zeros(config), draft=drafter)
    gemma3 = tiny_gguf.CONFIG.arguments()
    other = gemmakv.ModelConfig(**{**gemma3, "vocab_size": 256,
                                   "eos_ids": [1]})
    with pytest.raises(
        gemmakv.MismatchError,
        match="Gemma 4.*gemma3",
    ):
        Gemma.from_tensors(other, _zeros(other), draft=drafter)


def _zeros(config: gemmakv.ModelConfig) -> Any:
    """Weights of any shape that a model asks for."""
    return tiny_gguf.tensors(0, config)
