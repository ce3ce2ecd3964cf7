"""Exact distances between two models' logits of the same tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 log-probabilities of [n, vocab] logits."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def position_metrics(reference: np.ndarray, other: np.ndarray,
                     targets: np.ndarray) -> np.ndarray:
    """[n, 4] float64: KL(reference || other), both NLLs, 1 if argmax agrees.

    `targets` are the tokens that follow; -1 where there is none (NLL is NaN).
    """
    p, q = log_softmax(reference), log_softmax(other)
    kl = np.einsum("nv,nv->n", np.exp(p), p - q)
    rows = np.arange(len(targets))
    known = targets >= 0
    nll_p = np.where(known, -p[rows, np.maximum(targets, 0)], np.nan)
    nll_q = np.where(known, -q[rows, np.maximum(targets, 0)], np.nan)
    same = (reference.argmax(-1) == other.argmax(-1)).astype(np.float64)
    return np.stack([kl, nll_p, nll_q, same], axis=1)


def compare_stream(reference: np.ndarray, ids: np.ndarray,
                   chunks: Iterable[tuple[int, np.ndarray]]) -> np.ndarray:
    """position_metrics of a stream of (first position, logits [n, vocab])."""
    targets = np.append(ids[1:], -1)
    out = np.full((len(ids), 4), np.nan)
    for begin, logits in chunks:
        for start in range(0, len(logits), 64):  # 64 rows: 128 MB in float64
            part = logits[start:start + 64]
            rows = slice(begin + start, begin + start + len(part))
            out[rows] = position_metrics(reference[rows], part, targets[rows])
    if np.isnan(out[:, 0]).any():
        raise ValueError("some position has no logits, or NaN ones")
    return out


def summarize(metrics: np.ndarray) -> dict[str, float]:
    """The figures that quality is judged by, over the given positions."""
    kl, nll_p, nll_q, same = metrics.T
    return {
        "positions": len(kl),
        "mean_kl": float(kl.mean()),
        "max_kl": float(kl.max()),
        "nll": float(np.nanmean(nll_q)),
        "nll_reference": float(np.nanmean(nll_p)),
        "nll_difference": float(np.nanmean(nll_q - nll_p)),
        "top1_agreement": float(same.mean()),
    }
