"""Random sequences of operations on conversations, against a trivial model.

The trivial model of a conversation is its list of tokens: whatever was done to
a cache, it must go on bit for bit as a fresh cache that is given these tokens.
Windows are tiny, so that rewinding replays all the time.

GEMMAKV_MACHINE_EXAMPLES=N runs N sequences, random ones, instead of the same
few.
"""

from __future__ import annotations

import dataclasses
import functools
import os

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

import gemmakv
from gemmakv import Gemma, KVCache, create_kv_cache
from support import family_models, tiny_gguf

CAPACITY = 180
WINDOWS = (1, 2, 5, 16)
EXAMPLES = os.environ.get("GEMMAKV_MACHINE_EXAMPLES")

_rows: dict[tuple[Gemma, str, tuple[int, ...]], np.ndarray] = {}


@functools.cache
def model(family: str, window: int) -> Gemma:
    """A family's tiny model with another window, if it has windows."""
    config = family_models.config(family)
    if config.sliding_window:
        config = family_models.config(family, sliding_window=window)
    return Gemma.from_tensors(config, tiny_gguf.tensors(config=config))


@dataclasses.dataclass
class Conversation:
    cache: KVCache
    tokens: list[int]


def some_tokens(count: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(t) for t in rng.integers(2, tiny_gguf.VOCAB, count)]


TOKEN_LISTS = st.builds(some_tokens, st.integers(1, 60), st.integers(0, 9))
FRACTIONS = st.floats(0, 1)


class CacheMachine(RuleBasedStateMachine):
    """All conversations of a run live on one model at the same time."""

    conversations = Bundle("conversations")

    @initialize(
        target=conversations,
        family=st.sampled_from(family_models.FAMILIES),
        window=st.sampled_from(WINDOWS),
        dtype=st.sampled_from(["f32", "bf16", "int8"]),
        block_tokens=st.sampled_from([16, 32]),
        checkpoint_bytes=st.sampled_from([None, 0, 100_000]),
        tokens=TOKEN_LISTS,
    )
    def begin(
        self,
        family: str,
        window: int,
        dtype: str,
        block_tokens: int,
        checkpoint_bytes: int | None,
        tokens: list[int],
    ) -> object:
        self.dtype = dtype
        self.block_tokens = block_tokens
        self.checkpoint_bytes = checkpoint_bytes
        self.pool = gemmakv.BlockPool()  # no limit: it counts
        self.gemma = model(family, window)
        self.live: list[Conversation] = []
        first, second = self.create(), self.create()
        self.append(first, tokens, False)
        return multiple(first, second)

    # ---- the trivial model ----

    def fresh(self) -> KVCache:
        return create_kv_cache(
            self.gemma.config, CAPACITY, self.dtype,
            block_tokens=self.block_tokens,
        )  # fmt: skip

    def expected_rows(self, tokens: list[int]) -> np.ndarray:
        """Logits of all positions, from a cache that knows nothing else."""
        key = (self.gemma, self.dtype, tuple(tokens))
        if key not in _rows:
            _rows[key] = self.gemma.logits(
                self.fresh(), tokens, all_positions=True
            )
        return _rows[key]

    def keep(self, cache: KVCache, tokens: list[int]) -> Conversation:
        conversation = Conversation(cache, list(tokens))
        self.live.append(conversation)
        return conversation

    def create(self) -> Conversation:
        cache = create_kv_cache(
            self.gemma.config, CAPACITY, self.dtype,
            block_tokens=self.block_tokens,
            checkpoint_bytes=self.checkpoint_bytes, pool=self.pool,
        )  # fmt: skip
        return self.keep(cache, [])

    # ---- operations ----

    @rule(target=conversations)
    def another(self) -> Conversation:
        return self.create()

    @rule(c=conversations, tokens=TOKEN_LISTS, all_positions=st.booleans())
    def logits(
        self, c: Conversation, tokens: list[int], all_positions: bool
    ) -> None:
        self.append(c, tokens, all_positions)

    def append(
        self, c: Conversation, tokens: list[int], all_positions: bool
    ) -> None:
        if len(c.tokens) + len(tokens) > CAPACITY:
            before = c.cache.tokens
            with pytest.raises(gemmakv.CacheFullError):
                self.gemma.logits(c.cache, tokens, all_positions)
            assert np.array_equal(c.cache.tokens, before)
            return
        found = self.gemma.logits(c.cache, tokens, all_positions)
        c.tokens += tokens
        rows = self.expected_rows(c.tokens)
        expected = rows[-len(tokens) :] if all_positions else rows[-1]
        assert np.array_equal(found, expected)

    @rule(
        c=conversations,
        prompt=st.one_of(st.just([]), TOKEN_LISTS),
        count=st.integers(1, 6),
        seed=st.integers(0, 3),
        temperature=st.sampled_from([0.0, 1.5]),
        read=st.integers(1, 8),
    )
    def generate(
        self,
        c: Conversation,
        prompt: list[int],
        count: int,
        seed: int,
        temperature: float,
        read: int,
    ) -> None:
        """Whole, or cancelled behind the token `read`."""
        whole = c.tokens + prompt
        if not whole or len(whole) + count > CAPACITY:
            return
        options = {
            "max_tokens": count, "seed": seed, "temperature": temperature
        }  # fmt: skip
        expected = self.gemma.generate(self.fresh(), whole, **options)
        given = prompt if prompt else ""
        if read >= count:
            found = self.gemma.generate(c.cache, given, **options)
            assert found.token_ids == expected.token_ids
            c.tokens = whole + found.token_ids
            return
        stream = self.gemma.stream(c.cache, given, **options)
        seen = []
        for piece in stream:
            if piece.token_id is not None:
                seen.append(piece.token_id)
            if len(seen) == read:
                stream.cancel()
                break
        assert stream.result().token_ids == seen
        assert seen == expected.token_ids[: len(seen)]
        c.tokens = whole + seen

    @rule(a=conversations, b=conversations, prompt=TOKEN_LISTS)
    def generate_batch(
        self, a: Conversation, b: Conversation, prompt: list[int]
    ) -> None:
        rows = [a] if a is b else [a, b]
        if any(len(c.tokens) + len(prompt) + 3 > CAPACITY for c in rows):
            return
        found = self.gemma.generate_batch(
            [c.cache for c in rows], [prompt] * len(rows), max_tokens=3
        )
        for c, generation in zip(rows, found):
            whole = c.tokens + prompt
            expected = self.gemma.generate(self.fresh(), whole, max_tokens=3)
            assert generation.token_ids == expected.token_ids
            c.tokens = whole + generation.token_ids

    @rule(target=conversations, c=conversations)
    def fork(self, c: Conversation) -> Conversation:
        return self.keep(c.cache.fork(), c.tokens)

    @rule(c=conversations, fraction=FRACTIONS)
    def truncate(self, c: Conversation, fraction: float) -> None:
        length = round(fraction * len(c.tokens))
        cost = c.cache.truncate(length)
        assert 0 <= cost.replay_tokens <= length
        del c.tokens[length:]

    @rule(c=conversations)
    def checkpoint(self, c: Conversation) -> None:
        if c.cache.checkpoint():
            assert c.cache.checkpoints[-1:] in ([], [len(c.tokens)])
            assert c.cache.truncate(len(c.tokens)).replay_tokens == 0

    @rule(c=conversations, which=st.integers(0, 9))
    def rewind_to_a_checkpoint(self, c: Conversation, which: int) -> None:
        lengths = c.cache.checkpoints
        if lengths:
            length = lengths[which % len(lengths)]
            assert c.cache.truncate(length).replay_tokens == 0
            del c.tokens[length:]

    @rule(target=conversations, c=conversations, checkpoints=st.booleans())
    def restore(self, c: Conversation, checkpoints: bool) -> Conversation:
        data = c.cache.to_bytes(checkpoints)
        restored = KVCache.from_bytes(data, self.gemma, pool=self.pool)
        expected = c.cache.checkpoints if checkpoints else []
        assert restored.checkpoints == expected
        return self.keep(restored, c.tokens)

    @rule(c=conversations)
    def restore_in_place(self, c: Conversation) -> None:
        c.cache = KVCache.from_bytes(c.cache.to_bytes(True), pool=self.pool)

    @rule(c=conversations, tokens=TOKEN_LISTS)
    def out_of_memory(self, c: Conversation, tokens: list[int]) -> None:
        """A budget that a restored copy fills, and that its use exceeds."""
        if len(c.tokens) + len(tokens) > CAPACITY:
            return
        data = c.cache.to_bytes()
        needed = len(data) // 4 + 1
        pool = gemmakv.BlockPool(bytes=needed)
        while True:
            try:
                copy = KVCache.from_bytes(data, pool=pool)
                break
            except gemmakv.CacheFullError:
                assert pool.blocks_in_use == 0
                needed *= 2
                pool = gemmakv.BlockPool(bytes=needed)
        try:
            found = self.gemma.logits(copy, tokens)
        except gemmakv.CacheFullError:
            assert copy.tokens.tolist() == c.tokens
            assert copy.to_bytes() == data
        else:
            expected = self.expected_rows([*c.tokens, *tokens])[-1]
            assert np.array_equal(found, expected)
        del copy
        assert pool.blocks_in_use == 0

    @rule(c=conversations)
    def damaged_snapshot(self, c: Conversation) -> None:
        data = bytearray(c.cache.to_bytes())
        data[len(data) // 2] ^= 0x10
        with pytest.raises(gemmakv.CorruptFile):
            KVCache.from_bytes(data)

    @rule(c=conversations)
    def reset(self, c: Conversation) -> None:
        c.cache.reset()
        c.tokens = []

    @rule(c=consumes(conversations))
    def drop(self, c: Conversation) -> None:
        c.cache.reset()
        self.live = [other for other in self.live if other is not c]

    @rule(target=conversations, c=conversations, fraction=FRACTIONS)
    def branches(self, c: Conversation, fraction: float) -> object:
        """Three ways on from the same place."""
        length = round(fraction * len(c.tokens))
        forks = [c.cache.fork() for _ in range(3)]
        for fork in forks:
            fork.truncate(length)
        return multiple(*(self.keep(f, c.tokens[:length]) for f in forks))

    # ---- what always holds ----

    @invariant()
    def transcripts_are_right(self) -> None:
        for c in getattr(self, "live", []):
            assert c.cache.tokens.tolist() == c.tokens
            assert len(c.cache) == len(c.tokens)

    @invariant()
    def layers_hold_what_they_may(self) -> None:
        for c in getattr(self, "live", [])[-2:]:
            for layer in c.cache.layers:
                begin, end = layer.held_range
                assert 0 <= begin <= end <= len(c.tokens)
                if layer.kind == "full":
                    assert begin == 0

    def teardown(self) -> None:
        """Every conversation goes on as a fresh one does."""
        for c in getattr(self, "live", [])[-12:]:
            if len(c.tokens) == CAPACITY:
                continue
            found = self.gemma.logits(c.cache, [7])
            expected = self.expected_rows([*c.tokens, 7])[-1]
            assert np.array_equal(found, expected)
        if hasattr(self, "pool"):
            for c in self.live:
                c.cache.reset()
            assert self.pool.blocks_in_use == 0
        _rows.clear()


def run() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        CacheMachine,
        settings=settings(
            max_examples=int(EXAMPLES or 100),
            stateful_step_count=25,
            deadline=None,
            derandomize=EXAMPLES is None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
