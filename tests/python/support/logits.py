"""Logits of random tokens, and how far two of them are apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import gemmakv

LENGTH = 150  # more than four windows of 32

Logits = npt.NDArray[np.float32]


def some_tokens(vocab: int) -> list[int]:
    ids = np.random.default_rng(7).integers(4, vocab, LENGTH)
    return [2, *map(int, ids)]


def our_logits(
    gemma: gemmakv.Gemma, ids: Sequence[int], kv_dtype: str = "f32"
) -> Logits:
    cache = gemmakv.create_kv_cache(
        gemma.config, capacity_tokens=len(ids), kv_dtype=kv_dtype)
    return gemma.logits(cache, ids, all_positions=True)


def mean_kl(reference: Logits, other: Logits) -> float:
    def log_softmax(x: Logits) -> npt.NDArray[np.float64]:
        y = x.astype(np.float64) - x.max(-1, keepdims=True)
        result: npt.NDArray[np.float64] = (
            y - np.log(np.exp(y).sum(-1, keepdims=True)))
        return result

    p, q = log_softmax(reference), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(-1).mean())
