"""What speculation brings: replies with it and without, in turn."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import numpy as np

from gemmakv.cache._kv_cache import create_kv_cache
from gemmakv.chat._gemma import Gemma

TOKENS = 48  # of a reply, at most

_CODE = """\
def total(prices, rate):
    result = 0
    for price in prices:
        result = result + price * (1 + rate)
    return result
"""
_REPEATS = (
    f"The file before the change:\n\n{_CODE}\nThe same file, in which `rate` "
    f"is called `tax`:\n\n{_CODE.replace('rate', 'tax')}\nThe same file once "
    "more, in which `result` is called `sum`:\n\n"
)
_NEW = "Once upon a time, in a land of glass mountains, a young fox"
# Name, prompt, temperature.
TEXTS = (
    ("edit of code", _REPEATS, 0.0),
    ("new text, sampled", _NEW, 1.0),
)


@dataclasses.dataclass(frozen=True)
class Speculation:
    """A text that was generated with guesses and without, medians over rounds.

    `ratio` is the median of the rounds' own: the time without by that with.
    `drafted` and `accepted` are tokens of all rounds.
    """

    name: str
    speculate: str  # where the guesses came from
    tokens_per_s: float
    without_tokens_per_s: float
    ratio: float
    drafted: int
    accepted: int


class Comparison:
    """One text, and one way to guess, round by round."""

    def __init__(
        self, model: Gemma, text: tuple[str, str, float], speculate: str
    ) -> None:
        self._model = model
        self._name, self._prompt, self._temperature = text
        self._speculate = speculate
        self._seconds: list[dict[str, float]] = []  # of a token, by the way
        self._drafted = self._accepted = 0

    def measure(self, number: int) -> None:
        """Round 0 warms up, and does not count."""
        tokens: dict[str, list[int]] = {}
        seconds: dict[str, float] = {}
        ways = ("off", self._speculate)
        for way in ways if number % 2 == 0 else ways[::-1]:
            cache, prompt = self._begin()
            # Not by what the rounds before have said.
            options: Any = {"prefix_cache": "off", "speculate": way}
            begin = time.perf_counter()
            said = self._model.generate(
                cache,
                prompt,
                max_tokens=min(TOKENS, cache.capacity_tokens - len(cache) - 1),
                temperature=self._temperature,
                seed=number,
                ignore_eos=True,
                **options,
            )
            seconds[way] = (time.perf_counter() - begin) / len(said.token_ids)
            tokens[way] = said.token_ids
            if number > 0:
                self._drafted += said.usage.drafted
                self._accepted += said.usage.accepted
        if tokens["off"] != tokens[self._speculate]:
            raise AssertionError(f"bench: {self._name}: the tokens differ")
        if number > 0:
            self._seconds.append(seconds)

    def result(self) -> Speculation:
        off = [seconds["off"] for seconds in self._seconds]
        on = [seconds[self._speculate] for seconds in self._seconds]
        return Speculation(
            name=self._name,
            speculate=self._speculate,
            tokens_per_s=1 / statistics.median(on),
            without_tokens_per_s=1 / statistics.median(off),
            ratio=statistics.median(a / b for a, b in zip(off, on)),
            drafted=self._drafted,
            accepted=self._accepted,
        )

    def _begin(self) -> tuple[Any, Any]:
        """A conversation that has read all but the last token."""
        config = self._model.config
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            ids = [7 + i % 23 for i in range(100)]
        else:
            ids = tokenizer.encode(self._prompt)
        if config.bos_id >= 0:
            ids = [config.bos_id, *ids]
        ids = ids[: max(2, config.context_length - TOKENS - 1)]
        cache = create_kv_cache(
            config, min(config.context_length, len(ids) + TOKENS + 1)
        )
        self._model.logits(cache, np.array(ids[:-1], np.int32))
        return cache, np.array(ids[-1:], np.int32)
