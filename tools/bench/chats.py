"""Many chats by turns: what benchmarks and the picture of the prefix cache run.

All chats begin with one system text. In a round each of them says something and
gets a reply of so many tokens; the whole conversation is given each time, as a
client without state does. Tokens are random; as if a reply had ended by itself,
the control token that ends a turn stands in the place of its last token.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import numpy as np

import gemmakv

# Above the control tokens of Gemma 3, below the end of its vocabulary.
_WORDS = (300, 200_000)


def words(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(*_WORDS, count).tolist()


def turn_end(config: gemmakv.ModelConfig) -> int:
    """The control token that ends a turn."""
    return config.eos_ids[-1]


@dataclasses.dataclass(frozen=True)
class Shape:
    """In tokens: `said` is what a user says behind a turn's end, with that."""

    chats: int = 64
    turns: int = 8
    system: int = 256
    said: int = 48
    reply: int = 16

    @property
    def length(self) -> int:
        """Positions of a chat in the end."""
        return self.system + self.turns * (self.said + self.reply - 1)

    @property
    def needed(self) -> int:
        """Positions of all chats, each once; what they have in common, too."""
        return self.system + self.chats * (self.length - self.system)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a request came to; `computed` counts positions of the reply too."""

    tokens: list[int]
    computed: int
    seconds: float
    cached: dict[str, int] = dataclasses.field(default_factory=dict)


Ask = Callable[[list[int], int], Answer]


class Chats:
    """The histories, as one engine has them."""

    def __init__(self, shape: Shape, config: gemmakv.ModelConfig) -> None:
        self.shape = shape
        self._end = turn_end(config)
        self._rng = np.random.default_rng(1)
        system = [config.bos_id, *words(self._rng, shape.system - 1)]
        self._histories = [list(system) for _ in range(shape.chats)]

    def round(self, ask: Ask) -> Iterator[Answer]:
        """A turn of each chat, one after the other."""
        for history in self._histories:
            history += [self._end, *words(self._rng, self.shape.said - 1)]
            answer = ask(history, self.shape.reply)
            if len(answer.tokens) != self.shape.reply:
                raise RuntimeError(
                    f"expected a reply of {self.shape.reply} tokens, found "
                    f"{len(answer.tokens)}"
                )
            history += answer.tokens[:-1]
            yield answer


class Ours:
    """Asks gemmakv, as if no request knew of another."""

    def __init__(self, gemma: gemmakv.Gemma) -> None:
        self.gemma = gemma

    def __call__(self, prompt: list[int], reply: int) -> Answer:
        begin = time.perf_counter()
        cache = gemmakv.create_kv_cache(self.gemma.config)
        result = self.gemma.generate(
            cache, prompt, max_tokens=reply, ignore_eos=True
        )
        used = result.usage
        return Answer(
            list(result.token_ids),
            used.prompt_tokens - used.cached_tokens + reply - 1,
            time.perf_counter() - begin,
            used.cached,
        )


def chat_bytes(gemma: gemmakv.Gemma, shape: Shape) -> int:
    """Keys and values that one chat holds in the end."""
    cache = gemmakv.create_kv_cache(gemma.config)
    ids = words(np.random.default_rng(0), shape.length)
    gemma.generate(cache, ids, max_tokens=1, prefix_cache="off")
    return cache.nbytes
