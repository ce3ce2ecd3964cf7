"""Every guarantee of the cache, for every family, bit for bit.

What a conversation gives is compared with a fresh cache that is given the same
tokens in one call: `expected`. That earlier tokens change what is compared is
tested first.
"""

from __future__ import annotations

import functools
import threading
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

import gemmakv
from gemmakv import Gemma, KVCache, create_kv_cache
from support import family_models
from support.family_models import FAMILIES, LENGTHS, VOCAB, WINDOW

DTYPES = ("f32", "bf16", "int8")
LONGEST = LENGTHS[-1]
CAPACITY = 2 * LONGEST
PROBE = (7, 300, 41)
SAMPLING = {"temperature": 1.0, "seed": 5, "logprobs": True}
NO_END = {1: -np.inf, family_models.tiny_gguf.EOT: -np.inf}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(family: str) -> Gemma:
    return family_models.model(family)


def some_tokens(count: int, user: int = 0) -> list[int]:
    rng = np.random.default_rng(user)
    return [2, *(int(t) for t in rng.integers(4, VOCAB, count - 1))]


def new(model: Gemma, dtype: str = "bf16", **options: object) -> KVCache:
    options = {"capacity_tokens": CAPACITY, "block_tokens": 16, **options}
    return create_kv_cache(model.config, kv_dtype=dtype, **options)


@functools.cache
def _rows(family: str, tokens: tuple[int, ...], dtype: str) -> np.ndarray:
    fresh = create_kv_cache(family_models.config(family), kv_dtype=dtype)
    return family_models.model(family).logits(fresh, tokens, True)


def expected(
    model: Gemma, tokens: list[int], dtype: str = "bf16"
) -> np.ndarray:
    """Logits at every position."""
    return _rows(model.config.architecture, tuple(tokens), dtype)


def check_goes_on(
    model: Gemma, cache: KVCache, tokens: list[int], dtype: str = "bf16"
) -> None:
    """The cache holds `tokens`, and what follows is as it must be."""
    assert cache.tokens.tolist() == tokens
    found = model.logits(cache, PROBE, all_positions=True)
    rows = expected(model, [*tokens, *PROBE], dtype)
    assert np.array_equal(found, rows[-len(PROBE) :])


def test_earlier_tokens_change_the_logits(model: Gemma) -> None:
    """Else nothing below could fail."""
    tokens = some_tokens(LONGEST)
    rows = expected(model, tokens)
    others = expected(model, [9, *tokens[1:]])
    for length in LENGTHS:
        assert not np.array_equal(rows[length - 1], others[length - 1])
    kinds = set(model.config.layer_kinds)
    assert kinds == {
        "gemma": {"full"},
        "gemma2": {"sliding", "full"},
        "gemma3": {"sliding", "full"},
        "gemma4": {"sliding", "full"},
        "gemma3n": {"sliding", "full"},
        "recurrentgemma": {"recurrent", "sliding"},
    }[model.config.architecture]


# ---- However the tokens are given ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [1, 7, WINDOW, 64])
def test_chunks_and_restores(model: Gemma, dtype: str, step: int) -> None:
    tokens = some_tokens(LONGEST)
    rows = expected(model, tokens, dtype)
    cache = new(model, dtype)
    for at in range(0, LONGEST, step):
        part = tokens[at : at + step]
        found = model.logits(cache, part, all_positions=True)
        assert np.array_equal(found, rows[at : at + len(part)])
        cache = KVCache.from_bytes(cache.to_bytes())
    whole = new(model, dtype)
    model.logits(whole, tokens)
    for one, other in zip(cache.layers, whole.layers):
        assert np.array_equal(one.state, other.state)
        for name in ("keys", "values"):
            a, b = getattr(one, name), getattr(other, name)
            count = min(len(a), len(b))
            assert count >= WINDOW or one.kind == "recurrent"
            assert np.array_equal(a[len(a) - count :], b[len(b) - count :])


@pytest.mark.parametrize("threads", [1, 5])
def test_threads(family: str, threads: int) -> None:
    other = family_models.model(family, threads=threads)
    usual = family_models.model(family)
    assert other.threads == threads != usual.threads
    assert other.fingerprint == usual.fingerprint
    tokens = some_tokens(LONGEST)
    found = other.logits(new(other), tokens, all_positions=True)
    assert np.array_equal(found, expected(usual, tokens))


# ---- Fork, rewind, checkpoint, snapshot ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_fork(model: Gemma, dtype: str, length: int) -> None:
    tokens = some_tokens(length)
    cache = new(model, dtype)
    model.logits(cache, tokens)
    fork = cache.fork()
    assert cache.nbytes == 0 < cache.shared_nbytes == fork.shared_nbytes
    # Each goes on beyond what they share, in turns.
    ways = [(cache, some_tokens(40, 1)), (fork, some_tokens(40, 2))]
    for at in range(0, 40, 10):
        for branch, more in ways:
            model.logits(branch, more[at : at + 10])
    for branch, more in ways:
        check_goes_on(model, branch, tokens + more, dtype)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("share", [0, 0.2, 0.5, 0.99, 1])
def test_rewind_and_replay(model: Gemma, length: int, share: float) -> None:
    tokens = some_tokens(length)
    end = int(share * length)
    for dtype in DTYPES:
        cache = new(model, dtype)
        model.logits(cache, tokens[: length // 3 + 1])
        model.logits(cache, tokens[length // 3 + 1 :])
        fork = cache.fork()
        cost = cache.truncate(end).replay_tokens
        assert 0 <= cost <= end
        if share == 1 or set(model.config.layer_kinds) == {"full"}:
            assert cost == 0
        check_goes_on(model, cache, tokens[:end], dtype)
        check_goes_on(model, fork, tokens, dtype)
        # Again, now that there are other tokens behind the place.
        cache.truncate(end // 2)
        check_goes_on(model, cache, tokens[: end // 2], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_checkpoints_make_rewinding_free(model: Gemma, dtype: str) -> None:
    cache = new(model, dtype, checkpoint_bytes=1 << 20)
    begin, ends = 0, []
    for user, end in enumerate(LENGTHS):
        turn = some_tokens(end - begin - 3, user)
        # Leaves a pending token.
        model.generate(cache, turn, max_tokens=3, logit_bias=NO_END)
        assert cache.checkpoint()
        assert cache.checkpoint(), "twice is once"
        begin = end
        ends.append(len(cache))
    assert ends == list(LENGTHS)
    # Where every position stays, none is needed.
    marks = [] if model.config.layer_kinds[0] == "full" else ends
    assert cache.checkpoints == marks
    for fork in (cache.fork(), cache):
        for end in reversed(ends):
            tokens = fork.tokens.tolist()[:end]
            assert fork.truncate(end).replay_tokens == 0
            assert fork.checkpoints == [e for e in marks if e <= end]
            check_goes_on(model, fork.fork(), tokens, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_snapshot(
    model: Gemma, dtype: str, length: int, tmp_path: Path
) -> None:
    cache = new(model, dtype, checkpoint_bytes=1 << 20)
    tokens = some_tokens(length)
    model.logits(cache, tokens[: length // 2])
    assert cache.checkpoint()
    g = model.generate(cache, tokens[length // 2 :], max_tokens=2)
    tokens += g.token_ids  # the last one is pending
    data = cache.to_bytes()
    cache.save(tmp_path / "a.kv", checkpoints=True)
    restored = KVCache.from_bytes(data, model)
    assert restored.to_bytes() == data and restored.checkpoints == []
    assert restored.kv_dtype == dtype
    loaded = KVCache.load(tmp_path / "a.kv", model)
    assert loaded.to_bytes(checkpoints=True) == cache.to_bytes(True)
    assert loaded.checkpoints == cache.checkpoints
    back = loaded.fork()
    assert back.truncate(length // 2).replay_tokens == 0
    check_goes_on(model, back, tokens[: length // 2], dtype)
    for one in (cache, restored, loaded):
        check_goes_on(model, one, tokens, dtype)


def test_shared_prefix(model: Gemma) -> None:
    prefix = some_tokens(LONGEST)
    root = new(model)
    model.logits(root, prefix)
    users = [root.fork() for _ in range(5)]
    held = root.shared_nbytes
    assert root.nbytes == 0 and held > 0
    turns = [some_tokens(WINDOW + 9, user) for user in range(5)]
    for at in range(0, WINDOW + 9, 5):
        for user, turn in zip(users, turns):
            model.logits(user, turn[at : at + 5])
    users[0].close()
    users[1].reset()
    model.logits(users[1], prefix[:20])  # where others' blocks were
    for user, turn in zip(users[2:], turns[2:]):
        check_goes_on(model, user, prefix + turn)
    check_goes_on(model, users[1], prefix[:20])
    check_goes_on(model, root, prefix)


# ---- Many users ----


def lengths_of_users() -> list[tuple[int, list[int]]]:
    return [
        (length, some_tokens(length, user))
        for user, length in enumerate([*LENGTHS, *LENGTHS[::-1]])
    ]


def test_users_in_turns(model: Gemma) -> None:
    """Each is as if alone: no state of one reaches another."""
    users = lengths_of_users()
    caches = [new(model, DTYPES[i % 3]) for i in range(len(users))]
    done = [0] * len(users)
    rng = np.random.default_rng(3)
    while any(done[i] < length for i, (length, _) in enumerate(users)):
        i = int(rng.integers(len(users)))
        part = users[i][1][done[i] : done[i] + int(rng.integers(1, 40))]
        if not part:
            continue
        found = model.logits(caches[i], part)
        done[i] += len(part)
        rows = expected(model, users[i][1], DTYPES[i % 3])
        assert np.array_equal(found, rows[done[i] - 1])
    for i, (_, tokens) in enumerate(users):
        check_goes_on(model, caches[i], tokens, DTYPES[i % 3])


def said_alone(model: Gemma, tokens: list[int], user: int) -> object:
    options = {**SAMPLING, "seed": user}
    g = model.generate(
        new(model), tokens, max_tokens=12, logit_bias=NO_END, **options
    )
    return g.token_ids, g.logprobs.tolist()


def test_batch(model: Gemma) -> None:
    users = lengths_of_users()
    caches = [new(model) for _ in users]
    for cache, (length, tokens) in zip(caches, users):
        model.logits(cache, tokens[: length // 2])
    together = model.generate_batch(
        caches,
        [tokens[length // 2 :] for length, tokens in users],
        max_tokens=12,
        logit_bias=NO_END,
        **{**SAMPLING, "seed": list(range(len(users)))},
    )
    for i, (g, (_, tokens)) in enumerate(zip(together, users)):
        assert (g.token_ids, g.logprobs.tolist()) == said_alone(
            model, tokens, i
        )
        check_goes_on(model, caches[i], tokens + g.token_ids)


def test_callers_at_once(model: Gemma) -> None:
    users = lengths_of_users()
    alone = [said_alone(model, t, i) for i, (_, t) in enumerate(users)]
    found: list[object] = [None] * len(users)

    def work(i: int) -> None:
        found[i] = said_alone(model, users[i][1], i)

    threads = [
        threading.Thread(target=work, args=(i,)) for i in range(len(users))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == alone


@pytest.mark.parametrize("read", [1, 5])
@pytest.mark.parametrize("length", LENGTHS)
def test_cancelled_stream(model: Gemma, length: int, read: int) -> None:
    """Keeps what was returned, and a neighbour that goes on is untouched."""
    tokens, other = some_tokens(length), some_tokens(length, 1)
    cache, neighbour = new(model), new(model)
    stream = model.stream(cache, tokens, max_tokens=60, logit_bias=NO_END)
    beside = model.stream(
        neighbour, other, max_tokens=12, logit_bias=NO_END,
        **{**SAMPLING, "seed": 1},
    )  # fmt: skip
    seen = [next(stream).token_id for _ in range(read)]
    stream.cancel()
    assert stream.result().finish_reason == "cancelled"
    assert stream.result().token_ids == seen
    check_goes_on(model, cache, tokens + seen)
    said = [(p.token_id, p.logprob) for p in beside]
    assert tuple(map(list, zip(*said))) == said_alone(model, other, 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_capacity(model: Gemma, length: int) -> None:
    cache = new(model, capacity_tokens=length + 4)
    tokens = some_tokens(length)
    g = model.generate(cache, tokens, max_tokens=50, logit_bias=NO_END)
    assert g.finish_reason == "length" and len(g.token_ids) == 4
    assert len(cache) == cache.capacity_tokens
    before = cache.to_bytes()
    for call in (model.logits, model.generate):
        with pytest.raises(gemmakv.CacheFullError):
            call(cache, [5])
    assert cache.to_bytes() == before
    cache.truncate(length - 2)
    check_goes_on(model, cache, tokens[:-2])


# ---- What is left of a conversation ----


def test_blocks_and_states_start_anew(model: Gemma) -> None:
    """A second user in the memory of a first one; state zero at position 0."""
    pool = gemmakv.BlockPool()
    first = new(model, pool=pool)
    model.logits(first, some_tokens(LONGEST, 1))
    states = [layer.state for layer in first.layers]
    recurrent = model.config.layer_kinds.count("recurrent")
    assert sum(state.any() for state in states) == recurrent
    in_use = pool.blocks_in_use
    first.reset()
    assert pool.blocks_in_use == 0 < in_use
    second = new(model, pool=pool)
    for cache in (second, first):  # one new, one that was used before
        assert not any(layer.state.any() for layer in cache.layers)
        tokens = some_tokens(2 * WINDOW, 2)
        model.logits(cache, tokens)
        check_goes_on(model, cache, tokens)
        cache.truncate(0)
        check_goes_on(model, cache, [])
        cache.reset()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_those_of_the_configuration(
    model: Gemma, dtype: str
) -> None:
    cache = new(model, dtype)
    model.logits(cache, some_tokens(WINDOW))
    assert cache.nbytes == model.config.kv_bytes_at(WINDOW, dtype)
    model.logits(cache, some_tokens(LONGEST - WINDOW - 2))
    # Recurrent layers keep the state from before the last call too, and
    # windows from there on: what follows is a call of one token.
    for token in (5, 6):
        model.logits(cache, [token])
    total = model.config.kv_bytes_at(LONGEST, dtype)
    # A block more of the window, which lies anywhere in its blocks.
    _, sliding = model.config.kv_bytes_per_token(dtype)
    more = 16 * sliding + model.config.state_bytes
    assert total <= cache.nbytes <= total + more


@pytest.mark.parametrize("pair", list(permutations(FAMILIES, 2)), ids="-".join)
def test_families_do_not_mix(pair: tuple[str, str], tmp_path: Path) -> None:
    ours, other = map(family_models.model, pair)
    used, unused = new(ours), new(ours)
    ours.generate(used, some_tokens(2 * WINDOW), max_tokens=3)
    used.checkpoint()
    before = [c.to_bytes(checkpoints=True) for c in (used, unused)]
    calls = (
        lambda cache: other.logits(cache, [5]),
        lambda cache: other.generate(cache, [5]),
        lambda cache: other.generate(cache, [5], n=2),
        lambda cache: list(other.stream(cache, [5])),
        lambda cache: other.generate_batch([new(other), cache], [[5], [5]]),
    )
    for cache in (used, unused):
        for call in calls:
            with pytest.raises(gemmakv.MismatchError) as caught:
                call(cache)
            assert "\n" not in str(caught.value)
    assert [c.to_bytes(checkpoints=True) for c in (used, unused)] == before
    used.save(tmp_path / "a.kv")
    for restore in (
        lambda: KVCache.from_bytes(before[0], other),
        lambda: KVCache.load(tmp_path / "a.kv", other),
        lambda: other.logits(KVCache.load(tmp_path / "a.kv"), [5]),
        lambda: other.logits(KVCache.from_bytes(before[1]), [5]),
    ):
        with pytest.raises(gemmakv.MismatchError):
            restore()
    check_goes_on(ours, used, used.tokens.tolist())
