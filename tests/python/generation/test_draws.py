"""Tokens follow from logits, seed and position as docs/guide.md says, "How a
token is drawn": by an oracle that shares no code with the core.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import numpy.typing as npt

import gemmakv
from support import tiny_models

TOKENS = 6


def uniform_at(seed: int, position: int) -> float:
    """Philox-4x32 with 10 rounds."""
    mask = 0xFFFFFFFF
    counter = [position & mask, position >> 32, 0, 0]
    key = [seed & mask, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (b >> 32) ^ counter[1] ^ key[0],
            b & mask,
            (a >> 32) ^ counter[3] ^ key[1],
            a & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return float(((counter[0] << 32 | counter[1]) >> 11) / 2**53)


def drawn(
    logits: npt.NDArray[np.float32],
    uniform: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> int:
    order = np.lexsort((np.arange(len(logits)), -logits))
    if temperature == 0:
        return int(order[0])
    inverse = np.float32(1) / np.float32(temperature)
    shifted = (logits[order] - logits[order[0]]) * inverse
    weights = np.exp(shifted).astype(np.float64)
    if top_k == 0 and top_p == 1 and min_p == 0:
        by_id = np.empty_like(weights)
        by_id[order] = weights
        order, weights = np.arange(len(logits)), by_id
    if top_k:
        weights = weights[:top_k]
    if top_p < 1:
        sums = np.cumsum(weights)
        enough = sums >= float(np.float32(top_p)) * sums[-1]
        weights = weights[: int(np.argmax(enough)) + 1]
    if min_p > 0:
        weights = weights[weights >= np.float32(min_p)]
    sums = np.cumsum(weights)
    return int(order[int(np.argmax(sums > uniform * sums[-1]))])


def test_tokens_are_drawn_as_the_guide_says(tmp_path: Path) -> None:
    rng = random.Random(4)
    for type_name in ("F32", "Q8_0"):
        path = tiny_models.write_tiny_gguf(tmp_path / type_name, type_name)
        gemma = gemmakv.Gemma.load(path, threads=2)
        vocab = gemma.config.vocab_size
        options: dict[str, list[float]] = {
            "temperature": [], "top_k": [], "top_p": [], "min_p": []
        }
        seeds = []
        for _ in range(40):
            options["temperature"].append(rng.choice([0.0, 0.3, 1.0, 1.5]))
            options["top_k"].append(rng.choice([0, 1, 5, 64, vocab]))
            options["top_p"].append(rng.choice([1.0, 1.0, 0.95, 0.5]))
            options["min_p"].append(rng.choice([0.0, 0.0, 0.02]))
            seeds.append(rng.getrandbits(63))
        prompts = [
            [rng.randrange(vocab) for _ in range(1 + i % 7)]
            for i in range(len(seeds))
        ]
        caches = [gemmakv.create_kv_cache(gemma.config) for _ in seeds]
        gemma.generate_batch(
            caches, prompts, max_tokens=TOKENS, ignore_eos=True, seed=seeds,
            **options,
        )
        for i, cache in enumerate(caches):
            tokens = list(cache.tokens)
            rows = gemma.logits(
                gemmakv.create_kv_cache(gemma.config),
                tokens[:-1],
                all_positions=True,
            )
            for position in range(len(tokens) - TOKENS, len(tokens)):
                asked = {name: values[i] for name, values in options.items()}
                expected = drawn(
                    rows[position - 1],
                    uniform_at(seeds[i], position),
                    asked["temperature"],
                    int(asked["top_k"]),
                    asked["top_p"],
                    asked["min_p"],
                )
                assert tokens[position] == expected, (asked, position)
