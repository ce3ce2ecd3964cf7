"""Log-probabilities of a prompt's own tokens."""

from __future__ import annotations

import numpy as np
import pytest

import gemmakv
from gemmakv.generation import _scores
from gemmakv.generation._requests import requests_of
from gemmakv.generation._scores import PromptLogprobs, log_softmax

IDS = np.array([2, 30, 31, 32, 40, 41, 30, 31, 50, 33, 34], np.int32)


def scored(gemma: gemmakv.Gemma, ids: np.ndarray, top: int) -> PromptLogprobs:
    cache = gemma.new_cache()
    found = requests_of(gemma).prompt_logprobs(cache, ids, top)(None)
    assert cache.tokens.tolist() == ids[:-1].tolist()
    return found


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("top", [0, 1, 5])
def test_each_token_after_those_before_it(
    tiny: gemmakv.Gemma, monkeypatch: pytest.MonkeyPatch, rows: int, top: int
) -> None:
    """In pieces of any length."""
    vocab_size = tiny.config.vocab_size
    monkeypatch.setattr(_scores, "_PIECE_BYTES", 4 * vocab_size * rows)
    found = scored(tiny, IDS, top)
    rows_of = tiny.logits(tiny.new_cache(), IDS, all_positions=True)
    expected = log_softmax(rows_of)[:-1]
    own = expected[np.arange(len(IDS) - 1), IDS[1:]]
    np.testing.assert_allclose(found.logprobs, own, rtol=0, atol=2e-6)
    order = np.argsort(-rows_of[:-1], axis=1, kind="stable")
    assert found.top.token_ids.tolist() == order[:, :top].tolist()
    best = np.take_along_axis(expected, order[:, :top], axis=1)
    np.testing.assert_allclose(found.top.logprobs, best, rtol=0, atol=2e-6)
    for i, token in enumerate(IDS[1:]):
        assert found.ranks[i] == order[i].tolist().index(token) + 1
        same = found.top.logprobs[i][found.top.token_ids[i] == token]
        assert all(same == found.logprobs[i])  # to the bit


def test_a_model_says_the_same_of_what_it_samples(tiny: gemmakv.Gemma) -> None:
    cache = tiny.new_cache()
    said = tiny.generate(cache, IDS, max_tokens=6, top_logprobs=3,
                         ignore_eos=True)  # fmt: skip
    ids = np.concatenate([IDS, np.array(said.token_ids, np.int32)])
    found = scored(tiny, ids, 3)
    assert said.logprobs is not None and said.top_logprobs is not None
    np.testing.assert_allclose(
        found.logprobs[-6:], said.logprobs, rtol=0, atol=2e-6
    )
    assert found.top.token_ids[-6:].tolist() == (
        said.top_logprobs.token_ids.tolist()
    )
    assert found.ranks[-6:].tolist() == [1] * 6  # greedy


def test_prompts_of_a_token_and_bad_counts(tiny: gemmakv.Gemma) -> None:
    found = scored(tiny, IDS[:1], 2)
    assert len(found.logprobs) == len(found.ranks) == 0
    assert found.top.token_ids.shape == (0, 2)
    for top in (-1, tiny.config.vocab_size + 1):
        with pytest.raises(ValueError, match="^prompt_logprobs: "):
            requests_of(tiny).prompt_logprobs(tiny.new_cache(), IDS, top)
