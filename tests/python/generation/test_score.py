"""`score`: probabilities of choices among each other."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

import gemmakv
from gemmakv import Gemma, create_kv_cache
from gemmakv.generation._scores import choice_ids
from support import family_models
from support.family_models import FAMILIES

PROMPT = [2, 300, 301, 302]


def log_probability(model: Gemma, prompt: list[int], ids: list[int]) -> float:
    """Of the tokens behind the prompt, from one run of all logits."""
    cache = create_kv_cache(model.config)
    rows = model.logits(cache, prompt + ids, True)[len(prompt) - 1 : -1]
    found = 0.0
    for row, id in zip(rows.tolist(), ids):
        most = max(row)
        total = math.fsum(math.exp(value - most) for value in row)
        found += row[id] - most - math.log(total)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_against_logits_of_the_whole(family: str) -> None:
    model = family_models.model(family)
    choices = [[300], [301, 302, 303], [310, 311], [302]]
    logs = np.array([log_probability(model, PROMPT, c) for c in choices])
    expected = np.exp(logs - logs.max())
    expected /= expected.sum()
    found = model.score(PROMPT, choices)
    assert found.dtype == np.float32 and found.shape == (4,)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found.sum() == pytest.approx(1, abs=1e-6)
    # In any order, and each time the same bits.
    turned = model.score(np.array(PROMPT), choices[::-1])
    assert np.array_equal(turned[::-1], found)
    assert model.score(PROMPT, choices[:1]).tolist() == [1]


def test_what_it_is_for(gemma: Gemma) -> None:
    found = gemma.score(
        "The capital of Italy is", [" Paris", " Rome", " Berlin, not Rome"]
    )
    assert found.argmax() == 1 and found[1] > 0.8


def test_a_prompt_that_spells_bos_has_one(tiny: Gemma) -> None:
    expected = tiny.score("Hi", [" a", " b"])
    found = tiny.score("<bos>Hi", [" a", " b"], parse_special=True)
    assert np.array_equal(found, expected)
    # A choice that is the token itself is one.
    assert tiny.score("Hi", ["<bos>", " b"], parse_special=True).shape == (2,)


def test_behind_a_conversation(tiny: Gemma) -> None:
    cache = create_kv_cache(tiny.config)
    tiny.generate(cache, PROMPT, max_tokens=4)
    before, length = cache.to_bytes(), len(cache)
    choices = [[300, 301], [302]]
    found = tiny.score([305, 306], choices, cache=cache)
    assert cache.to_bytes() == before and len(cache) == length
    whole = tiny.score([*cache.tokens.tolist(), 305, 306], choices)
    np.testing.assert_allclose(found, whole, rtol=1e-6)
    # A text gets its BOS only where nothing is before it.
    text = tiny.score("ab", ["c", "d"], cache=cache)
    ids = tiny.score(tiny.tokenizer.encode("ab"), ["c", "d"], cache=cache)
    assert np.array_equal(text, ids)
    start = tiny.score("ab", ["c", "d"])
    ids = tiny.score([2, *tiny.tokenizer.encode("ab")], ["c", "d"])
    assert np.array_equal(start, ids)


def test_each_choice_costs_the_same() -> None:
    def calls_of(count: int) -> int:
        choices = [[3] * 8 + [i] for i in range(count)]
        calls = 0

        def count_call(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += "call" in event

        sys.setprofile(count_call)
        try:
            choice_ids(choices, lambda _, ids: np.array(ids, np.int32))
        finally:
            sys.setprofile(None)
        return calls

    assert calls_of(800) < 5 * calls_of(200)


def test_bad_input(tiny: Gemma) -> None:
    small = create_kv_cache(tiny.config, capacity_tokens=16)
    for arguments, words in (
        (([2], "Yes"), "choices: expected a list of texts, found"),
        (([2], 5), "choices: expected a list of texts, found"),
        (([2], []), "choices: expected 1 to 1024, found 0"),
        (([2], [[300]] * 1025), "choices: expected 1 to 1024, found 1025"),
        (([2], ["a", ""]), r"choices\[1\]: expected a token or more"),
        (([2], ["a", "b", "a"]), r"choices\[2\]: .*choices\[0\], found 'a'"),
        (([2], [[300], [-1]]), r"choices\[1\]: expected a sequence of token"),
        (([2], [[300], None]), r"choices\[1\]: expected a text or a sequence"),
        (([], ["a"]), "prompt: expected a text or a sequence of token ids"),
        ((None, ["a"]), "prompt: expected a text or a sequence of token ids"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            tiny.score(*arguments)
    with pytest.raises((ValueError, TypeError), match="cache: expected"):
        tiny.score([2], ["a"], cache="cache")  # type: ignore[arg-type]
    cache = create_kv_cache(tiny.config)
    tiny.prefill(cache, PROMPT)
    with pytest.raises(ValueError, match="prompt: expected a token"):
        tiny.score("", ["a"], cache=cache)
    with pytest.raises(gemmakv.CacheFullError):
        tiny.score([2] * 17, ["a"], cache=small)
    assert len(small) == 0
    with pytest.raises(gemmakv.CacheFullError):
        tiny.score([2] * 15, [[300] * 4, [301]], cache=small)
    assert len(small) == 0
