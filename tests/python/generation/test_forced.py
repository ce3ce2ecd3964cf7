"""Text that a grammar forces comes several tokens a step, and is the same."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmakv
from gemmakv import Gemma, Grammar
from gemmakv.generation import _constraints
from gemmakv.generation._requests import requests_of
from support import tiny_gguf
from support.extras import needs
from support.schemas import SCHEMAS

pytestmark = needs("llguidance")

PIECES = tiny_gguf.vocabulary()[0]
# A random model closes brackets and strings too seldom to come to an end.
CLOSING: Any = {PIECES.index(c): 6.0 for c in '"}],'}
# Nothing that lookup could guess: no two letters of it stand there twice.
TEXT = "qzwxecrvtbynumiklop"
CONST = Grammar.json_schema({"const": TEXT})


def new(gemma: Gemma) -> gemmakv.KVCache:
    return gemmakv.create_kv_cache(gemma.config)


def outcome(said: gemmakv.Generation) -> tuple[Any, ...]:
    logprobs = said.logprobs.tolist() if said.logprobs is not None else None
    return said.token_ids, said.text, said.finish_reason, logprobs


def test_several_come_of_a_step(tiny: Gemma) -> None:
    expected = tiny.generate(new(tiny), "Go: ", grammar=CONST, speculate="off")
    assert expected.text == f'"{TEXT}"'
    assert expected.finish_reason == "stop"
    assert expected.usage.drafted == 0
    # Whether guesses pay is measured: seldom they do not seem to.
    for _ in range(20):
        said = tiny.generate(new(tiny), "Go: ", grammar=CONST)
        assert outcome(said) == outcome(expected)
        assert said.usage.accepted <= said.usage.drafted
        if said.usage.accepted > len(expected.token_ids) / 2:
            break
    else:
        pytest.fail("in 20 runs less than half of the text was guessed")


def options_of(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_tokens": rng.choice([1, 5, 40, 150]),
        "seed": rng.randrange(1000),
        "temperature": rng.choice([0.0, 0.7, 1.5]),
        "logprobs": rng.random() < 0.5,
    }
    if rng.random() < 0.8:
        name = rng.choice(list(SCHEMAS))
        options["grammar"] = Grammar.json_schema(SCHEMAS[name])
    if rng.random() < 0.6:
        options["logit_bias"] = CLOSING
    if rng.random() < 0.2:
        options["stop"] = rng.choice(['":', "a", "}"])
    if rng.random() < 0.2:
        options["repetition_penalty"] = 1.2
    if rng.random() < 0.2:
        options["top_k"] = 5
    if rng.random() < 0.1:
        options["logits_processor"] = processor
    return options


def processor(token_ids: Any, logits: Any) -> None:
    logits[len(token_ids) % len(logits)] += 2


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_are_the_same(tiny: Gemma, seed: int) -> None:
    """With schemas and without, of several conversations at the same time."""
    rng = random.Random(seed)
    accepted = 0
    for _ in range(10):
        rows = [options_of(rng) for _ in range(rng.choice([1, 1, 2, 7]))]
        sizes = [rng.choice([0, 0, 30, 60]) for _ in rows]
        conversations: dict[str, list[gemmakv.KVCache]] = {}
        found: dict[str, list[gemmakv.Generation]] = {}
        for how in ("off", "lookup"):
            conversations[how] = [
                gemmakv.create_kv_cache(tiny.config, capacity_tokens=size)
                if size else new(tiny)
                for size in sizes
            ]  # fmt: skip
            found[how] = [
                stream.result()
                for stream in [
                    tiny.stream(cache, "Go: ", speculate=how, **row)
                    for cache, row in zip(conversations[how], rows)
                ]
            ]
        for plain, said, a, b in zip(
            found["off"], found["lookup"], *conversations.values()
        ):
            assert outcome(said) == outcome(plain)
            assert a.tokens.tolist() == b.tokens.tolist()
            assert plain.usage.drafted == 0
            accepted += said.usage.accepted
    assert accepted > 0


def test_cancelled_forked_and_rewound_in_the_middle(tiny: Gemma) -> None:
    expected = tiny.generate(new(tiny), "Go: ", grammar=CONST, speculate="off")
    for count in range(1, len(expected.token_ids), 3):
        cache = new(tiny)
        with tiny.stream(cache, "Go: ", grammar=CONST) as stream:
            ids = [next(stream).token_id for _ in range(count)]
        assert ids == expected.token_ids[:count]
        assert stream.result().finish_reason == "cancelled"
        assert cache.tokens.tolist()[-count:] == ids
        fork = cache.fork()
        fork.truncate(len(fork) - count)
        again = tiny.generate(fork, "", grammar=CONST)
        assert again.token_ids == expected.token_ids
        assert cache.tokens.tolist()[-count:] == ids


def test_samples_are_forced_each_by_itself(tiny: Gemma) -> None:
    options: Any = {
        "grammar": Grammar.regex("(abcdefgh|ijklmnop|qrstuvwx){3}"),
        "temperature": 1.5, "seed": 5, "n": 4,
    }  # fmt: skip
    plain = tiny.generate(new(tiny), "Go: ", speculate="off", **options)
    assert len({one.text for one in plain}) > 1
    for _ in range(5):
        said = tiny.generate(new(tiny), "Go: ", **options)
        assert [outcome(one) for one in said] == [outcome(one) for one in plain]


def mask_of(matcher: Any, new: list[int]) -> tuple[list[int], bool]:
    """Tokens that it allows behind `new`, and whether the text may end."""
    mask = np.zeros(tiny_gguf.VOCAB // 32 + 1, np.uint32)
    may_end = matcher.compute_mask(new, mask.ctypes.data, mask.nbytes)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist(), may_end


class Plain:
    """A matcher that keeps nothing and asks llguidance for each mask."""

    def __init__(self, matcher: Any) -> None:
        self._core = matcher._core.deep_copy()
        self._ends = set(matcher._ends)

    def mask(self, new: list[int]) -> tuple[list[int], bool]:
        assert self._core.consume_tokens(new)
        if self._core.is_stopped():
            return [], True
        mask = np.zeros(tiny_gguf.VOCAB // 32 + 1, np.uint32)
        self._core.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = set(np.flatnonzero(bits).tolist()) - self._ends
        return sorted(allowed), self._core.is_accepting()


@pytest.mark.parametrize("name", SCHEMAS)
def test_forced_tokens_are_those_that_masks_leave(
    tiny: Gemma, name: str
) -> None:
    """Masks are llguidance's, and asking for what is forced leaves no trace in
    them, nor does what was taken back.
    """
    compiled = requests_of(tiny).compiler.compile(
        "grammar", Grammar.json_schema(SCHEMAS[name])
    )
    rng = random.Random(3)
    for _ in range(3):
        plain = Plain(compiled)
        unasked, asked = compiled.clone(), compiled.clone()
        last: list[int] = []
        for _ in range(60):
            forced = asked.forced_tokens(last, rng.choice([1, 4, 15]))
            expected = plain.mask(last)
            assert mask_of(unasked, last) == expected
            assert mask_of(asked, []) == expected
            if not expected[0]:
                break
            for token in forced:
                assert mask_of(asked, []) == ([token], False)
                asked.forced_tokens([token], 15)
            if rng.random() < 0.3:
                asked = asked.clone()
            asked.rollback(len(forced))
            last = [rng.choice(expected[0])]
            assert not forced or last == forced[:1]


class Counted:
    """A matcher of llguidance whose calls are counted."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._core, name)


def test_long_forced_text_is_cut_into_tokens_once(tiny: Gemma) -> None:
    """It was for each mask: a hostile schema took 50 ms of everyone's steps."""
    rng = random.Random(5)
    text = "".join(rng.choice("abcdefgh ") for _ in range(20_000))
    compiled = requests_of(tiny).compiler.compile(
        "grammar", Grammar.json_schema({"const": text})
    )
    core = Counted(compiled._core.deep_copy())
    matcher = _constraints.Matcher(core, compiled._ends)
    said: list[int] = []
    last: list[int] = []
    for _ in range(200):
        forced = matcher.forced_tokens(last, 15)
        allowed, may_end = mask_of(matcher, [])
        assert allowed == forced[:1] and not may_end
        last = allowed
        said += last
        for token in forced[:4]:
            mask_of(matcher, [token])
        matcher.rollback(len(forced[:4]))
    assert core.calls["compute_ff_tokens"] == 1
    assert core.calls["unsafe_compute_mask_ptr"] == 0
    assert tiny.tokenizer is not None
    assert ('"' + text).startswith(tiny.tokenizer.decode(said))


def test_an_error_of_what_is_forced_fails_its_request_alone(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemma = Gemma.load(tiny_path, prefix_cache=False)
    before = new(gemma)
    gemma.prefill(before, "Go: ")
    length = len(before)
    original = _constraints.Matcher.forced_tokens
    asked = []

    def raises(self: Any, token_ids: list[int], most: int) -> list[int]:
        asked.append(most)
        if len(asked) > 2:
            raise ValueError("grammar: mine")
        return original(self, token_ids, 0)

    monkeypatch.setattr(_constraints.Matcher, "forced_tokens", raises)
    free = gemma.stream(new(gemma), "Go: ", max_tokens=60, ignore_eos=True)
    with pytest.raises(ValueError, match="^grammar: mine$"):
        for _ in range(20):  # guesses are asked for where they seem to pay
            gemma.generate(before, "", grammar=CONST)
            before.truncate(length)
    assert len(before) == length
    assert len(free.result().token_ids) == 60
    monkeypatch.undo()
    said = gemma.generate(before, "", grammar=CONST)
    assert said.text == f'"{TEXT}"'
