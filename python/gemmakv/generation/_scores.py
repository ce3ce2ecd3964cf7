"""How likely texts are to follow, among each other, and how likely each token
of a text was to follow those before it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gemmakv._support.arguments import items
from gemmakv.cache._kv_cache import KVCache
from gemmakv.errors import unexpected
from gemmakv.generation._prompts import Prompt, TokenArray
from gemmakv.generation._result import TopLogprobs

# float32 [vocab_size], or [len(ids), vocab_size] at all positions.
Logits = Callable[[KVCache, TokenArray, bool], npt.NDArray[np.float32]]

_MOST = 1024
_PIECE_BYTES = 64 << 20  # of logits that are held at once


@dataclasses.dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, each given those before it.

    The first token has none: nothing is before it.

    Attributes:
      token_ids: int32 [n], the prompt.
      logprobs: float32 [n - 1], of the others, natural logarithms.
      ranks: int32 [n - 1], how likely each is among all tokens; 1 for the
        likeliest.
      top: the likeliest tokens of each place, [n - 1, k].
    """

    token_ids: TokenArray
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    top: TopLogprobs


def choice_ids(
    choices: Sequence[Prompt], encode: Callable[[str, Prompt], TokenArray]
) -> list[TokenArray]:
    """Encodes each by its name. Raises ArgumentError naming the choice."""
    choices = items("choices", choices, "a list of texts")
    if not 1 <= len(choices) <= _MOST:
        raise unexpected("choices", f"1 to {_MOST}", len(choices))
    found: list[TokenArray] = []
    places: dict[bytes, int] = {}
    for index, choice in enumerate(choices):
        name = f"choices[{index}]"
        ids = encode(name, choice)
        other = places.setdefault(ids.tobytes(), index)
        if other != index:
            raise unexpected(
                name, f"other tokens than those of choices[{other}]", choice
            )
        found.append(ids)
    return found


def probabilities(
    logits: Logits,
    cache: KVCache,
    prompt: TokenArray,
    choices: Sequence[TokenArray],
) -> npt.NDArray[np.float32]:
    """Computes float32 [n], of sum 1. Appends the prompt to `cache`."""
    first = log_softmax(logits(cache, prompt, False))
    sums = np.empty(len(choices))
    for index, ids in enumerate(choices):
        sums[index] = first[ids[0]]
        if len(ids) > 1:
            rows = logits(cache.fork(), ids[:-1], True)
            for row, following in zip(rows, ids[1:]):
                sums[index] += log_softmax(row)[following]
    found = np.exp(sums - sums.max())
    return np.asarray(found / found.sum(), np.float32)


def prompt_logprobs(
    logits: Logits, cache: KVCache, ids: TokenArray, top: int, vocab_size: int
) -> PromptLogprobs:
    """Computes log-probabilities of a prompt, and the `top` likeliest tokens
    of each place. Appends all but the last token of the prompt to `cache`,
    which is empty.
    """
    count = max(len(ids) - 1, 0)
    found = PromptLogprobs(
        ids,
        np.empty(count, np.float32),
        np.empty(count, np.int32),
        TopLogprobs(
            np.empty((count, top), np.int32), np.empty((count, top), np.float32)
        ),
    )
    piece = max(1, _PIECE_BYTES // (4 * vocab_size))
    for begin in range(0, count, piece):
        end = min(begin + piece, count)
        rows = logits(cache, ids[begin:end], True)
        for i, row in enumerate(rows, begin):
            _note(found, i, row, int(ids[i + 1]), top)
    return found


def _note(
    found: PromptLogprobs,
    i: int,
    row: npt.NDArray[np.float32],
    token: int,
    top: int,
) -> None:
    """Takes in the logits of place `i`, where `token` stands."""
    best = row.max()
    total = np.exp(row - best).sum(dtype=np.float64)
    log_sum = float(best) + math.log(total)
    found.logprobs[i] = float(row[token]) - log_sum
    found.ranks[i] = 1 + np.count_nonzero(row > row[token])
    if not top:
        return
    least = best if top == 1 else np.partition(row, -top)[-top]
    ids = np.flatnonzero(row >= least)
    ids = ids[np.lexsort((ids, -row[ids]))[:top]]
    found.top.token_ids[i] = ids
    found.top.logprobs[i] = row[ids].astype(np.float64) - log_sum


def log_softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Computes logarithms of probabilities, along the last axis."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide
