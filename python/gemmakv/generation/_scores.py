"""How likely texts are to follow, among each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gemmakv._support.arguments import items
from gemmakv.cache._kv_cache import KVCache
from gemmakv.errors import unexpected
from gemmakv.generation._prompts import Prompt, TokenArray

# float32 [vocab_size], or [len(ids), vocab_size] at all positions.
Logits = Callable[[KVCache, TokenArray, bool], npt.NDArray[np.float32]]

_MOST = 1024


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


def log_softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Computes logarithms of probabilities, along the last axis."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide
