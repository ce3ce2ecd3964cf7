"""Ways of computing the same tokens that must give the same bits."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from gemmakv.cache._kv_cache import KVCache, KvDtype, create_kv_cache
from gemmakv.chat._gemma import Gemma
from gemmakv.generation._options import Options

POSITIONS = 16  # at the end, whose logits are hashed
SAMPLED = 8  # before them: the model's own greedy choices
MIN_TOKENS = 96

_CALLERS = 4  # conversations in a batch and threads at once
_SEED = 20240221

Tokens = npt.NDArray[np.int32]


@dataclasses.dataclass
class Case:
    """Tokens, and a model to compute them with.

    prompt: random tokens. sampled: what the model says greedily after them.
    probe: further random ones, at whose positions the logits are hashed.
    junk: random ones of other conversations.
    """

    gemma: Gemma
    kv_dtype: KvDtype
    prompt: Tokens
    sampled: Tokens
    probe: Tokens
    junk: Tokens

    @classmethod
    def make(cls, gemma: Gemma, count: int, kv_dtype: KvDtype) -> Case:
        """`count` tokens in all, the same for each model of a vocabulary."""
        draw = np.random.RandomState(_SEED)
        window = gemma.config.sliding_window
        # What pushes all of the conversation out of the window, if it fits.
        rest = gemma.config.context_length - count
        junk_count = min(max(64, window + POSITIONS), max(rest, 0))
        ids = draw.randint(
            0, gemma.config.vocab_size, count + junk_count
        ).astype(np.int32)
        case = cls(
            gemma,
            kv_dtype,
            prompt=ids[: count - POSITIONS - SAMPLED],
            sampled=ids[:0],
            probe=ids[count - POSITIONS : count],
            junk=ids[count:],
        )
        said = case.say(case.new_cache(), case.prompt)
        case.sampled = np.array(said, np.int32)
        return case

    def load(self, load: Callable[[], Gemma]) -> None:
        """Goes on with another model object; the one before is freed first."""
        del self.gemma
        self.gemma = load()

    @property
    def body(self) -> Tokens:
        """The tokens before the probe."""
        return np.concatenate([self.prompt, self.sampled])

    @property
    def kept(self) -> int:
        """The number of tokens that a rewind within the body keeps."""
        return len(self.prompt) // 4

    def new_cache(self) -> KVCache:
        return create_kv_cache(self.gemma.config, kv_dtype=self.kv_dtype)

    def options(self) -> Options:
        """Greedy, never ending early, a token a step."""
        bias = {token: float("-inf") for token in self.gemma.config.eos_ids}
        return {
            "max_tokens": SAMPLED,
            "logit_bias": bias,
            "speculate": "off",
        }

    def say(self, cache: KVCache, prompt: Tokens) -> list[int]:
        """The greedy choices after a prompt; they stay in the cache."""
        return self.gemma.generate(cache, prompt, **self.options()).token_ids

    def feed(self, cache: KVCache, tokens: Tokens, chunk: int = 0) -> None:
        """Appends tokens, `chunk` at a time (0: all at once)."""
        step = chunk or max(1, len(tokens))
        for begin in range(0, len(tokens), step):
            self.gemma.logits(cache, tokens[begin : begin + step])

    def digest(self, cache: KVCache, one_by_one: bool = False) -> str:
        """SHA256 of the logits at the probe, appended now.

        The hash is of float32 [POSITIONS, vocab_size], little endian.
        """
        if one_by_one:
            rows = np.stack(
                [self.gemma.logits(cache, [token]) for token in self.probe]
            )
        else:
            rows = self.gemma.logits(cache, self.probe, all_positions=True)
        return hashlib.sha256(rows.astype("<f4").tobytes()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of computing a case's tokens; gives the digests it ends with."""

    name: str
    run: Callable[[Case], list[str]]


def ways_of(case: Case) -> list[Way]:
    """Gives all ways that need one model object; the first is the reference."""
    window = case.gemma.config.sliding_window
    distance = len(case.junk) or len(case.body) - case.kept
    rewind = f"rewind of {distance:,}"
    if 0 < window <= distance:
        rewind += f", past the window of {window:,}"
    else:
        rewind += " tokens"
    return [
        Way("one chunk", partial(_chunks, size=0)),
        Way("chunks of 64", partial(_chunks, size=64)),
        Way("chunks of 7", partial(_chunks, size=7)),
        Way("chunks of 1, 2, 3, ...", _growing),
        Way("the last 32 token by token", _one_by_one),
        Way("sampled instead of given", _sampled),
        Way("sampled with guesses", _guessed),
        Way(f"batch of {_CALLERS}", _batch),
        Way("fork", _fork),
        Way("snapshot and restore", _restore),
        Way(rewind, _rewind),
        Way("rewind to a checkpoint", _checkpoint),
        Way(f"{_CALLERS} callers at once", _callers),
    ]


def _chunks(case: Case, size: int) -> list[str]:
    cache = case.new_cache()
    case.feed(cache, case.body, size)
    return [case.digest(cache)]


def _growing(case: Case) -> list[str]:
    cache = case.new_cache()
    rest, size = case.body, 1
    while len(rest):
        case.feed(cache, rest[:size])
        rest, size = rest[size:], size + 1
    return [case.digest(cache)]


def _one_by_one(case: Case) -> list[str]:
    cache = case.new_cache()
    split = len(case.body) - 16
    case.feed(cache, case.body[:split])
    case.feed(cache, case.body[split:], 1)
    return [case.digest(cache, one_by_one=True)]


def _sampled(case: Case) -> list[str]:
    cache = case.new_cache()
    case.say(cache, case.prompt)
    return [case.digest(cache)]


def _guessed(case: Case) -> list[str]:
    """Sampled again, by conversations that may guess from one another."""
    caches = [case.new_cache() for _ in range(2)]
    for cache in caches:
        options: Options = {**case.options(), "speculate": "lookup"}
        case.gemma.generate(cache, case.prompt, **options)
    return [case.digest(cache) for cache in caches]


def _batch(case: Case) -> list[str]:
    """Reads and samples beside others of other lengths, in the same steps."""
    caches = [case.new_cache() for _ in range(_CALLERS)]
    prompts = [case.prompt]
    for i in range(1, _CALLERS):
        prompts.append(case.prompt[::-1][: 1 + len(case.prompt) // (3 * i)])
    case.gemma.generate_batch(caches, prompts, **case.options())
    return [case.digest(caches[0])]


def _fork(case: Case) -> list[str]:
    """The fork and its parent, each after the other has gone on."""
    half = len(case.body) // 2
    parent = case.new_cache()
    case.feed(parent, case.body[:half])
    fork, other = parent.fork(), parent.fork()
    case.feed(other, case.junk[: half or 1])
    case.feed(fork, case.body[half:])
    case.feed(parent, case.body[half:], 64)
    return [case.digest(fork), case.digest(parent)]


def _restore(case: Case) -> list[str]:
    half = len(case.body) // 2
    cache = case.new_cache()
    case.feed(cache, case.body[:half])
    restored = KVCache.from_bytes(cache.to_bytes(), case.gemma)
    case.feed(restored, case.body[half:])
    return [case.digest(restored)]


def _rewind(case: Case) -> list[str]:
    """Other tokens push the conversation out of the window and are undone.

    If the context has no room for any, most of the tokens themselves.
    """
    cache = case.new_cache()
    case.feed(cache, case.body)
    if len(case.junk):
        case.feed(cache, case.junk)
        cache.truncate(len(case.body))
    else:
        cache.truncate(case.kept)
        case.feed(cache, case.body[case.kept :])
    return [case.digest(cache)]


def _checkpoint(case: Case) -> list[str]:
    """Back to a mark half way, from which nothing is computed again."""
    half = len(case.body) // 2
    cache = case.new_cache()
    case.feed(cache, case.body[:half])
    cache.checkpoint()
    case.feed(cache, case.body[half:][::-1])
    cache.truncate(half)
    case.feed(cache, case.body[half:])
    return [case.digest(cache)]


def _callers(case: Case) -> list[str]:
    from concurrent.futures import ThreadPoolExecutor  # few need it

    sizes = (33, 50, 64, 99)
    with ThreadPoolExecutor(_CALLERS) as pool:
        calls = [pool.submit(_chunks, case, size) for size in sizes]
        return [digest for call in calls for digest in call.result()]
