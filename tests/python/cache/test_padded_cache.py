"""Padded caches: one conformance suite over the kinds, then each kind's own.

The oracle is NumPy in float64 over the whole history of every row.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import gemmakv
from gemmakv import (
    CyclicCache,
    GemmaKVError,
    LayerCache,
    attention,
    compute_left_pads,
)
from support.folders import ROOT

Cache = LayerCache | CyclicCache
KV_HEADS, HEAD_DIM = 2, 6

MAKERS: dict[str, Callable[..., Cache]] = {
    "linear": LayerCache,
    "cyclic": CyclicCache,
    "window": lambda *a, **k: CyclicCache(*a, **k, window=max(1, a[1] // 2)),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Cache]:
    """make(batch, capacity, kv_heads, head_dim, dtype=) of each kind."""
    return MAKERS[request.param]


def numbers(
    rng: np.random.Generator, batch: int, seq: int, heads: int = KV_HEADS
) -> np.ndarray:
    return rng.normal(size=(batch, seq, heads, HEAD_DIM)).astype(np.float32)


def bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, to nearest even."""
    bits = x.astype(np.float32).view(np.uint32)
    bits = bits + 0x7FFF + ((bits >> 16) & 1)
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)


class Oracle:
    """Everything that was ever given, row by row."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        rows = range(cache.batch)
        self.keys: list[list[np.ndarray]] = [[] for _ in rows]
        self.values: list[list[np.ndarray]] = [[] for _ in rows]
        # For each column: the position in the row, or -1 for a pad.
        self.columns: list[list[int]] = [[] for _ in rows]

    def add(
        self, k: np.ndarray, v: np.ndarray, ids: np.ndarray | None = None
    ) -> None:
        for r, column in itertools.product(
            range(self.cache.batch), range(k.shape[1])
        ):
            if ids is not None and ids[r, column] == 0:
                self.columns[r].append(-1)
                continue
            self.columns[r].append(len(self.keys[r]))
            self.keys[r].append(k[r, column])
            self.values[r].append(v[r, column])

    def held(self, row: int) -> list[int]:
        total = len(self.keys[row])
        return list(range(max(0, total - self.cache.capacity), total))

    def sees(self, query: int, position: int) -> bool:
        window = getattr(self.cache, "window", math.inf)
        return 0 <= position <= query and position > query - window

    def attention(
        self, q: np.ndarray, scale: float, soft_cap: float | None
    ) -> np.ndarray:
        batch, q_len, heads, _ = q.shape
        out = np.zeros(q.shape, np.float64)
        group = heads // self.cache.kv_heads
        for r in range(batch):
            # Of all positions, by head of keys and values.
            all_keys = np.float64(self.keys[r]).swapaxes(0, 1)
            all_values = np.float64(self.values[r]).swapaxes(0, 1)
            for i, at in enumerate(self.columns[r][-q_len:]):
                seen = [p for p in range(at + 1) if self.sees(at, p)]
                if not seen:
                    continue
                keys, values = all_keys[:, seen], all_values[:, seen]
                queries = np.float64(q[r, i]).reshape(len(keys), group, -1)
                scores = scale * queries @ keys.swapaxes(1, 2)
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                weights /= weights.sum(-1, keepdims=True)
                out[r, i] = (weights @ values).reshape(heads, -1)
        return out

    def check(self) -> None:
        """Content, lengths and every mask of the cache."""
        cache = self.cache
        lengths = [len(self.held(r)) for r in range(cache.batch)]
        assert cache.length.tolist() == lengths
        assert cache.positions.tolist() == [len(k) for k in self.keys]
        slots = max(lengths)
        shape = (cache.batch, slots, cache.kv_heads, cache.head_dim)
        stored = bf16 if cache.dtype == "bf16" else np.asarray
        for found, given in (
            (cache.keys, self.keys),
            (cache.values, self.values),
        ):
            assert found.shape == shape and found.dtype == np.float32
            for r in range(cache.batch):
                expected = np.zeros(shape[1:], np.float32)
                for slot, p in enumerate(self.held(r)):
                    expected[slot] = stored(given[r][p])
                assert np.array_equal(found[r], expected)
        for q_len in range(1, len(self.columns[0]) + 1):
            mask = cache.compute_causal_mask(q_len)
            assert mask.shape == (cache.batch, q_len, slots)
            assert mask.dtype == np.bool_
            for r in range(cache.batch):
                held = self.held(r)
                for i, at in enumerate(self.columns[r][-q_len:]):
                    expected_row = np.zeros(slots, bool)
                    for slot, p in enumerate(held):
                        expected_row[slot] = self.sees(at, p)
                    assert np.array_equal(mask[r, i], expected_row)


# ---- the acceptance checklist -------------------------------------------


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 7, 16, 17])
def test_checklist_01_wrapping_append_equals_single_appends(
    capacity: int,
) -> None:
    rng = np.random.default_rng(capacity)
    for position in range(2 * capacity + 1):
        for n in {1, 2, capacity, capacity + 1, 3 * capacity + 1}:
            k = numbers(rng, 1, position + n)
            v = numbers(rng, 1, position + n)
            once = CyclicCache(1, capacity, KV_HEADS, HEAD_DIM)
            once.update(k[:, :position], v[:, :position])
            once.update(k[:, position:], v[:, position:])
            singly = CyclicCache(1, capacity, KV_HEADS, HEAD_DIM)
            for i in range(position + n):
                singly.update(k[:, i : i + 1], v[:, i : i + 1])
            assert np.array_equal(once.keys, k[:, -capacity:])
            assert np.array_equal(once.keys, singly.keys)
            assert np.array_equal(once.values, singly.values)
            assert once.length.tolist() == singly.length.tolist()
            for q_len in (1, position + n):
                assert np.array_equal(
                    once.compute_causal_mask(q_len),
                    singly.compute_causal_mask(q_len),
                )


@pytest.mark.parametrize("pads", [0, 1, 9])
def test_checklist_02_prefill_longer_than_the_window(pads: int) -> None:
    rng = np.random.default_rng(2)
    cache = CyclicCache(1, 4, KV_HEADS, HEAD_DIM)
    k, v = numbers(rng, 1, 20), numbers(rng, 1, 20)
    ids = np.array([[0] * pads + [1] * (20 - pads)])
    cache.prefill(k, v, ids)
    assert np.array_equal(cache.keys, k[:, -4:])
    assert np.array_equal(cache.values, v[:, -4:])
    assert cache.length.tolist() == [4]
    assert cache.compute_causal_mask(1).sum() == 4
    oracle = Oracle(cache)
    oracle.add(k, v, ids)
    oracle.check()
    q = numbers(rng, 1, 1)
    found = attention(q, cache)
    expected = oracle.attention(q, HEAD_DIM**-0.5, None)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_checklist_03_prefill_starts_a_row_once(
    make: Callable[..., Cache],
) -> None:
    rng = np.random.default_rng(3)
    cache = make(2, 16, KV_HEADS, HEAD_DIM)
    oracle = Oracle(cache)

    def prefill(ids: list[list[int]]) -> None:
        array = np.array(ids)
        k, v = numbers(rng, *array.shape), numbers(rng, *array.shape)
        cache.prefill(k, v, array)
        oracle.add(k, v, array)
        oracle.check()

    prefill([[0, 0, 1, 1], [0, 0, 0, 0]])
    assert cache.length.tolist() == [2, 0]
    # Row 1 starts only now; row 0 goes on, also behind pads.
    prefill([[1, 1, 1], [0, 2, 2]])
    assert cache.length.tolist() == [5, 2]
    prefill([[0, 0, 1], [1, 1, 1]])
    assert cache.length.tolist() == [6, 5]
    k, v = numbers(rng, 2, 1), numbers(rng, 2, 1)
    cache.update(k, v)
    oracle.add(k, v)
    oracle.check()
    assert cache.positions.tolist() == [7, 6]


@pytest.mark.parametrize(
    "ids, expected",
    [
        ([[0, 0, 1, 1]], [2]),
        ([[1, 0, 0, 1]], [0]),
        ([[0, 3, 0, 0]], [1]),
        ([[0, 0, 0, 0]], [4]),
        ([[1, 1], [0, 1], [0, 0]], [0, 1, 2]),
        (np.zeros((1, 0), np.int32), [0]),
        (np.zeros((0, 3), np.int64), []),
        (np.array([[False, True]]), [1]),
        (np.array([[0, 7]], np.uint8), [1]),
        ([[0, -1]], [1]),
    ],
)
def test_checklist_04_left_pads_count_leading_zeros(
    ids: object, expected: list[int]
) -> None:
    found = compute_left_pads(ids)  # type: ignore[arg-type]
    assert found.dtype == np.int32
    assert found.tolist() == expected


def test_checklist_05_masks_follow_logical_positions(
    make: Callable[..., Cache],
) -> None:
    """Capacity 4, one query at position 4: four valid slots; and any other."""
    cache = CyclicCache(1, 4, KV_HEADS, HEAD_DIM)
    rng = np.random.default_rng(5)
    for _ in range(5):
        cache.update(numbers(rng, 1, 1), numbers(rng, 1, 1))
    assert cache.compute_causal_mask(1).tolist() == [[[True] * 4]]

    cache = make(3, 40, KV_HEADS, HEAD_DIM)  # type: ignore[assignment]
    small = MAKERS["window"](3, 5, KV_HEADS, HEAD_DIM)
    for padded in (cache, small):
        oracle = Oracle(padded)
        for seq in (3, 1, 1, 6, 2, 9):
            pads = rng.integers(0, seq + 1, 3)
            ids = (np.arange(seq) >= pads[:, None]).astype(np.int32)
            k, v = numbers(rng, 3, seq), numbers(rng, 3, seq)
            padded.prefill(k, v, ids)
            oracle.add(k, v, ids)
            oracle.check()


@pytest.mark.parametrize("n", [1, 2, 40])
def test_checklist_06_linear_overflow_raises_and_changes_nothing(
    n: int,
) -> None:
    rng = np.random.default_rng(6)
    cache = LayerCache(2, 4, KV_HEADS, HEAD_DIM)
    k = numbers(rng, 2, 4)
    cache.prefill(k, -k, [[1] * 4, [0] * 3 + [1]])  # row 0 is full, row 1 not
    keys, values = cache.keys, cache.values
    more = numbers(rng, 2, n)
    with pytest.raises(gemmakv.CacheFullError, match="row 0 .*capacity"):
        cache.update(more, more)
    with pytest.raises(gemmakv.CacheFullError, match="row 0"):
        cache.prefill(more, more, np.ones((2, n), int))
    assert np.array_equal(cache.keys, keys)
    assert np.array_equal(cache.values, values)
    assert cache.length.tolist() == [4, 1]
    assert cache.compute_causal_mask(4).shape == (2, 4, 4)
    with pytest.raises(ValueError, match="q_len"):
        cache.compute_causal_mask(5)


def test_checklist_07_lengths_are_per_row(make: Callable[..., Cache]) -> None:
    rng = np.random.default_rng(7)
    cache = make(4, 6, KV_HEADS, HEAD_DIM)
    assert cache.length.tolist() == [0] * 4
    k = numbers(rng, 4, 5)
    ids = np.arange(5) >= np.array([[0], [2], [4], [5]])
    cache.prefill(k, k, ids)
    assert cache.length.tolist() == [5, 3, 1, 0]
    assert cache.length.dtype == np.int64
    cache.update(k[:, :1], k[:, :1])
    assert cache.length.tolist() == [6, 4, 2, 1]
    assert cache.keys.shape[1] == 6
    assert np.array_equal(cache.keys[3, 0], k[3, 0])
    assert not cache.keys[3, 1:].any()


USER_CODE = """
import numpy as np
import gemmakv

def run(cache: gemmakv.CacheProtocol) -> None:
    k = np.zeros((1, 2, 1, 32), np.float32)
    cache.prefill(k, k, np.ones((1, 2), np.int32))
    cache.update(k, [[[[0.0] * 32]]])
    mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = (
        cache.compute_causal_mask(2))
    print(cache.keys, cache.values, cache.length, cache.capacity, mask)
    cache.reset()

linear: gemmakv.CacheProtocol = gemmakv.LayerCache(1, 4, 1, 32)
cyclic: gemmakv.CacheProtocol = gemmakv.CyclicCache(1, 4, 1, 32, dtype="bf16")
run(gemmakv.LayerCache(1, 4, 1, 32))
run(gemmakv.CyclicCache(1, 4, 1, 32, window=3))
"""
MISUSE = """
import gemmakv
wrong: gemmakv.CacheProtocol = gemmakv.create_kv_cache("gemma3-270m")
"""


@pytest.mark.slow
def test_checklist_08_the_protocol_matches(
    make: Callable[..., Cache], tmp_path: Path
) -> None:
    cache = make(1, 4, KV_HEADS, HEAD_DIM)
    assert isinstance(cache, gemmakv.CacheProtocol)
    assert not isinstance(object(), gemmakv.CacheProtocol)
    if not isinstance(cache, LayerCache):
        return  # the type checker is asked once
    pytest.importorskip("mypy", reason="needs mypy")
    (tmp_path / "right.py").write_text(USER_CODE)
    (tmp_path / "wrong.py").write_text(MISUSE)
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", "",
         "--cache-dir", str(ROOT / "build" / "mypy"),
         "right.py", "wrong.py"],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    errors = [line for line in result.stdout.splitlines() if "error:" in line]
    assert len(errors) == 1, result.stdout
    assert errors[0].startswith("wrong.py:3: error: ")
    assert "CacheProtocol" in errors[0]


# ---- the rest of the conformance suite ----------------------------------


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_any_use_against_the_oracle(
    make: Callable[..., Cache], dtype: str
) -> None:
    rng = np.random.default_rng(11)
    for _ in range(20):
        batch = int(rng.integers(1, 4))
        capacity = int(rng.integers(1, 40))
        cache = make(batch, capacity, KV_HEADS, HEAD_DIM, dtype=dtype)
        oracle = Oracle(cache)
        for _ in range(int(rng.integers(1, 6))):
            seq = int(rng.integers(1, 20))
            pads = rng.integers(0, seq + 1, batch)
            ids = (np.arange(seq) >= pads[:, None]).astype(np.int64)
            k, v = numbers(rng, batch, seq), numbers(rng, batch, seq)
            try:
                cache.prefill(k, v, ids)
            except gemmakv.CacheFullError:
                assert isinstance(cache, LayerCache)
                tokens = [len(oracle.keys[r]) for r in range(batch)]
                assert (tokens + ids.sum(1) > capacity).any()
                continue
            oracle.add(k, v, ids)
        if oracle.columns[0]:
            oracle.check()


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("group", [1, 3, 17])
def test_attention_against_the_oracle(
    make: Callable[..., Cache], group: int, soft_cap: float | None
) -> None:
    rng = np.random.default_rng(group)
    cache = make(2, 400, KV_HEADS, HEAD_DIM)
    oracle = Oracle(cache)
    for seq, scale in ((7, None), (150, 0.9), (1, 0.5), (64, None)):
        ids = np.ones((2, seq), int)
        ids[1, : seq // 3] = 0
        k, v = numbers(rng, 2, seq), numbers(rng, 2, seq)
        cache.prefill(k, v, ids)
        oracle.add(k, v, ids)
        q = numbers(rng, 2, seq, KV_HEADS * group)
        found = attention(q, cache, scale, soft_cap)
        assert found.dtype == np.float32 and found.shape == q.shape
        expected = oracle.attention(
            q, HEAD_DIM**-0.5 if scale is None else scale, soft_cap
        )
        np.testing.assert_allclose(found, expected, atol=3e-6)
        assert not found[1, : seq // 3].any()


def test_attention_is_that_of_mask_keys_and_values(
    make: Callable[..., Cache],
) -> None:
    """What a NumPy model would write out gives the same."""
    rng = np.random.default_rng(12)
    cache = make(2, 16, KV_HEADS, HEAD_DIM, dtype="bf16")
    k, v = numbers(rng, 2, 8), numbers(rng, 2, 8)
    cache.prefill(k, v, [[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
    q = numbers(rng, 2, 5)
    mask = cache.compute_causal_mask(5)
    scores = np.einsum("bqhd,bshd->bhqs", q, cache.keys) * HEAD_DIM**-0.5
    scores = np.where(mask[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bhqs,bshd->bqhd", weights, cache.values)
    np.testing.assert_allclose(attention(q, cache), expected, atol=2e-6)


def test_chunks_give_the_same_bits(make: Callable[..., Cache]) -> None:
    """A window of half the capacity allows steps of any size below that."""
    rng = np.random.default_rng(13)
    k, v, q = (numbers(rng, 1, 60) for _ in range(3))
    results = []
    for step in (1, 3, 20):
        cache = make(1, 64, KV_HEADS, HEAD_DIM)
        parts = []
        for at in range(0, 60, step):
            part = slice(at, at + step)
            cache.update(k[:, part], v[:, part])
            parts.append(attention(q[:, part], cache))
        results.append(np.concatenate(parts, axis=1))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_a_dropped_window_is_refused() -> None:
    rng = np.random.default_rng(14)
    cache = CyclicCache(1, 6, KV_HEADS, HEAD_DIM, window=4)
    k = numbers(rng, 1, 20)
    cache.update(k, k)
    assert attention(k[:, :3], cache).shape == (1, 3, KV_HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match="not held any more.* 3 or less"):
        attention(k[:, :4], cache)


def test_reset_starts_anew(make: Callable[..., Cache]) -> None:
    rng = np.random.default_rng(15)
    cache = make(1, 8, KV_HEADS, HEAD_DIM)
    k = numbers(rng, 1, 3)
    cache.prefill(k, k, [[0, 1, 1]])
    assert cache.nbytes > 0
    cache.reset()
    assert cache.nbytes == 0 and cache.length.tolist() == [0]
    assert cache.positions.tolist() == [0]
    assert cache.keys.shape == (1, 0, KV_HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match="q_len: expected columns to be"):
        cache.compute_causal_mask(1)
    cache.update(k, k)
    assert np.array_equal(cache.keys, k)


def test_results_are_copies(make: Callable[..., Cache]) -> None:
    cache = make(1, 8, KV_HEADS, HEAD_DIM)
    k = numbers(np.random.default_rng(16), 1, 3)
    given = k.copy()
    cache.update(given, given)
    given[:] = 7
    keys = cache.keys
    keys[:] = 9
    assert np.array_equal(cache.keys, k)


def test_other_number_types_and_layouts(make: Callable[..., Cache]) -> None:
    rng = np.random.default_rng(17)
    k = numbers(rng, 2, 3)
    expected = make(2, 8, KV_HEADS, HEAD_DIM)
    expected.update(k.astype(np.float16), k)
    cache = make(np.int64(2), 8, KV_HEADS, HEAD_DIM)
    strided = np.asfortranarray(k.astype(np.float16).astype(np.float64))
    cache.update(strided, np.repeat(k, 2, axis=1)[:, ::2])
    assert np.array_equal(cache.keys, expected.keys)
    assert np.array_equal(cache.values, expected.values)
    cache.update(np.ones((2, 1, KV_HEADS, HEAD_DIM), int).tolist(), k[:, :1])
    assert (cache.keys[:, 3] == 1).all()


def test_nothing_given_is_nothing_done(make: Callable[..., Cache]) -> None:
    cache = make(1, 8, KV_HEADS, HEAD_DIM)
    k = np.zeros((1, 0, KV_HEADS, HEAD_DIM), np.float32)
    cache.update(k, k)
    cache.prefill(k, k, np.zeros((1, 0), int))
    assert cache.length.tolist() == [0]


def test_memory_follows_the_content(make: Callable[..., Cache]) -> None:
    cache = make(1, 1 << 20, KV_HEADS, HEAD_DIM)
    assert cache.nbytes == 0
    k = numbers(np.random.default_rng(18), 1, 100)
    cache.update(k, k)
    assert 0 < cache.nbytes < 1 << 20


BAD_CALLS: list[tuple[str, Callable[[Cache, np.ndarray], object]]] = [
    ("k: expected .*found shape", lambda c, k: c.update(k[0], k)),
    ("k: expected .*found shape", lambda c, k: c.update(k[:1], k[:1])),
    ("v: expected .*found shape", lambda c, k: c.update(k, k[:, :1])),
    ("k: expected .*found shape", lambda c, k: c.update(k[..., :5], k)),
    ("k: expected real", lambda c, k: c.update(k.astype(complex), k)),
    ("k: expected real", lambda c, k: c.update("text", k)),
    ("v: expected real", lambda c, k: c.update(k, None)),
    ("k: expected an array", lambda c, k: c.update([[1.0], [1.0, 2.0]], k)),
    ("segment_ids.*shape", lambda c, k: c.prefill(k, k, [[1, 1]])),
    ("segment_ids.*batch", lambda c, k: c.prefill(k, k, [1, 1, 1])),
    ("segment_ids.*integers", lambda c, k: c.prefill(k, k, k[:, :, 0, 0])),
    ("row 1.*pad", lambda c, k: c.prefill(k, k, [[0, 1, 1], [1, 0, 1]])),
    ("row 0.*pad", lambda c, k: c.prefill(k, k, [[1, 1, 0], [1, 1, 1]])),
    ("q_len.*at least 1", lambda c, k: c.compute_causal_mask(0)),
    ("q_len.*at least 1", lambda c, k: c.compute_causal_mask(-3)),
    ("q_len.*integer", lambda c, k: c.compute_causal_mask(1.0)),
    ("q_len: expected .*found 4", lambda c, k: c.compute_causal_mask(4)),
    (
        "q_len: expected .*found 4",
        lambda c, k: attention(k.repeat(2, 1)[:, :4], c),
    ),
    ("q: expected .*found shape", lambda c, k: attention(k[0], c)),
    ("q: expected .*found shape", lambda c, k: attention(k[..., :3], c)),
    ("3 heads", lambda c, k: attention(k.repeat(3, 2)[:, :, :3], c)),
    ("scale", lambda c, k: attention(k, c, scale=math.nan)),
    ("scale", lambda c, k: attention(k, c, scale="1")),
    ("soft_cap", lambda c, k: attention(k, c, soft_cap=0.0)),
    ("soft_cap", lambda c, k: attention(k, c, soft_cap=math.inf)),
    ("found 1e-300", lambda c, k: attention(k, c, soft_cap=1e-300)),
]


@pytest.mark.parametrize("message, call", BAD_CALLS)
def test_bad_calls_change_nothing(
    make: Callable[..., Cache],
    message: str,
    call: Callable[[Cache, np.ndarray], object],
) -> None:
    cache = make(2, 8, KV_HEADS, HEAD_DIM)
    k = numbers(np.random.default_rng(19), 2, 3)
    cache.update(k, k)
    with pytest.raises(ValueError, match=message):
        call(cache, k)
    assert np.array_equal(cache.keys, k)
    assert cache.length.tolist() == [3, 3]


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("batch", (0, 4, 1, 32)),
        ("capacity", (1, 0, 1, 32)),
        ("capacity", (1, 2.5, 1, 32)),
        ("capacity", (1, 1 << 40, 1, 32)),
        ("capacity", (1, 1 << 70, 1, 32)),
        ("kv_heads", (1, 4, -1, 32)),
        ("head_dim", (1, 4, 1, 0)),
        ("head_dim", (1, 4, 1, 513)),
        ("dtype", (1, 4, 1, 32, "int8")),
        ("dtype", (1, 4, 1, 32, None)),
    ],
)
def test_bad_sizes(
    make: Callable[..., Cache], name: str, arguments: tuple
) -> None:
    if make is MAKERS["window"] and name == "capacity":
        make = CyclicCache
    with pytest.raises(ValueError, match=name):
        make(*arguments)


@pytest.mark.parametrize("window", [0, -1, 5, 1.5])
def test_bad_windows(window: object) -> None:
    with pytest.raises(ValueError, match="window"):
        CyclicCache(1, 4, 1, 32, window=window)  # type: ignore[arg-type]


def test_attention_wants_a_padded_cache() -> None:
    q = np.zeros((1, 1, 1, 32), np.float32)
    with pytest.raises(ValueError, match="LayerCache or CyclicCache"):
        attention(q, gemmakv.create_kv_cache("gemma3-270m"))  # type: ignore


def test_many_threads(make: Callable[..., Cache]) -> None:
    """Readers see whole appends."""
    cache = make(1, 4000, 1, 32)
    stop = threading.Event()
    bad: list[str] = []

    def read() -> None:
        while not stop.is_set():
            keys = cache.keys[0, :, 0, 0]
            if len(keys) % 5 or not np.array_equal(
                keys, np.repeat(np.arange(len(keys) // 5), 5)
            ):
                bad.append(repr(keys))
            if len(keys):
                attention(np.ones((1, 1, 2, 32)), cache)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for i in range(200):
        k = np.full((1, 5, 1, 32), i, np.float32)
        cache.update(k, k)
    stop.set()
    for reader in readers:
        reader.join()
    assert not bad
    assert cache.length.tolist() == [1000]


def test_repr(make: Callable[..., Cache]) -> None:
    cache = make(1, 4, 1, 32)
    assert "Cache batch=1, capacity=4" in repr(cache)


def test_is_neither_copied_nor_pickled(make: Callable[..., Cache]) -> None:
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(GemmaKVError, match="cannot be copied or pickled"):
            way(make(1, 4, 1, 2))
