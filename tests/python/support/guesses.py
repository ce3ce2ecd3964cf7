"""What tests of speculation have in common: guesses change the time alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from gemmakv import Generation, KVCache

# One token over and over: whoever guesses is right.
SAME: dict[str, Any] = {"ignore_eos": True, "logit_bias": {30: 1000.0}}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"ignore_eos": True},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"temperature": 0.3, "seed": 4, "repetition_penalty": 1.2},
    {"frequency_penalty": 0.4, "presence_penalty": 0.2, "min_tokens": 9},
    {"stop": ["a", "th"], "ignore_eos": True},
    {**SAME, "max_tokens": 120},
    {**SAME, "max_tokens": 120, "stop_token_ids": [30], "min_tokens": 40},
]


def check_same(
    found: Generation,
    guessed: KVCache,
    expected: Generation,
    plain: KVCache,
) -> None:
    """A reply with guesses against one without, and the conversations."""
    assert found.token_ids == expected.token_ids
    assert found.text == expected.text
    assert found.finish_reason == expected.finish_reason
    assert found.logprobs is not None and expected.logprobs is not None
    assert found.logprobs.tolist() == expected.logprobs.tolist()
    assert guessed.tokens.tolist() == plain.tokens.tolist()
    assert (expected.usage.drafted, expected.usage.accepted) == (0, 0)


def check_many_at_once(
    say: Callable[[int, str], list[int]], speculate: str
) -> None:
    """What `say(seed, speculate)` gives in six threads at the same time,
    against what it gives alone and without guesses.
    """
    expected = [say(seed, "off") for seed in range(6)]
    found: dict[int, list[int]] = {}
    threads = [
        threading.Thread(
            target=lambda seed=seed: found.update({seed: say(seed, speculate)})
        )
        for seed in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[seed] for seed in range(6)] == expected
