"""Padded batches of keys and values, for models built with NumPy.

A cache holds one layer's keys and values for a batch of rows. Arrays are
batch first; the columns of a call may begin with pads, which are not stored,
so that every row has a length of its own:

    cache = gemmakv.LayerCache(batch=2, capacity=64, kv_heads=1, head_dim=32)
    cache.prefill(k, v, segment_ids)           # [2, 5, 1, 32], [2, 5]
    out = gemmakv.attention(q, cache)          # of the same five columns
    cache.update(k1, v1)                       # one more for every row
    out = gemmakv.attention(q1, cache)
"""

from __future__ import annotations

import math
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from gemmakv import _core
from gemmakv._support.arguments import choice, integer, number
from gemmakv.errors import GemmaKVError, brief, unexpected

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@runtime_checkable
class CacheProtocol(Protocol):
    """What the padded caches have in common."""

    @property
    def keys(self) -> FloatArray:
        """Copy of the keys, float32 [batch, slots, kv_heads, head_dim]."""

    @property
    def values(self) -> FloatArray:
        """Copy of the values, float32 [batch, slots, kv_heads, head_dim]."""

    @property
    def length(self) -> IntArray:
        """Tokens held by each row, int64 [batch]."""

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold."""

    def prefill(
        self,
        k: npt.ArrayLike,
        v: npt.ArrayLike,
        segment_ids: npt.ArrayLike,
    ) -> None:
        """Appends columns, of which a row's first may be pads."""

    def update(self, k: npt.ArrayLike, v: npt.ArrayLike) -> None:
        """Appends columns that are tokens in every row."""

    def compute_causal_mask(self, q_len: int) -> npt.NDArray[np.bool_]:
        """Which slots the newest columns attend to."""

    def reset(self) -> None:
        """Forgets everything."""


class _PaddedCache:
    """What both kinds share; they differ in what happens at the capacity."""

    __slots__ = ("_core", "_shape", "_dtype", "__weakref__")

    def __init__(
        self,
        batch: int,
        capacity: int,
        window: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
    ) -> None:
        choice("dtype", dtype, ("f32", "bf16"))
        sizes = {
            "batch": batch,
            "capacity": capacity,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
        }
        sizes = {name: integer(name, value, 1) for name, value in sizes.items()}
        self._core = _core.PaddedCache(**sizes, window=window, dtype=dtype)
        self._shape = sizes
        self._dtype = dtype

    def __repr__(self) -> str:
        sizes = ", ".join(f"{k}={v}" for k, v in self._shape.items())
        return (
            f"<{type(self).__name__} {sizes}, {self._dtype}, "
            f"length={self.length.tolist()}>"
        )

    def __reduce__(self) -> NoReturn:
        # Copies through this too: one that shared its content would be none.
        raise GemmaKVError(
            f"a {type(self).__name__} cannot be copied or pickled"
        )

    @property
    def batch(self) -> int:
        return self._shape["batch"]

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold."""
        return self._shape["capacity"]

    @property
    def kv_heads(self) -> int:
        return self._shape["kv_heads"]

    @property
    def head_dim(self) -> int:
        return self._shape["head_dim"]

    @property
    def dtype(self) -> str:
        """How keys and values are stored: "f32" or "bf16"."""
        return self._dtype

    @property
    def nbytes(self) -> int:
        """Bytes of storage; it grows with the content, up to the capacity."""
        return self._core.nbytes

    @property
    def length(self) -> IntArray:
        """Tokens held by each row, int64 [batch]. Pads do not count."""
        return self._core.lengths

    @property
    def positions(self) -> IntArray:
        """Logical position of each row's next token, int64 [batch].

        That is the number of tokens given so far, pads not counted: what
        rotary embeddings are computed from.
        """
        return self._core.positions

    @property
    def keys(self) -> FloatArray:
        """Copy of the keys, float32 [batch, slots, kv_heads, head_dim].

        A row's tokens lie in slots 0 to length - 1, the oldest first; there
        are as many slots as the longest row has tokens, and those that a
        shorter row does not fill are zeros.
        """
        return self._core.copy(False)

    @property
    def values(self) -> FloatArray:
        """Copy of the values, in the same order as `keys`."""
        return self._core.copy(True)

    def prefill(
        self,
        k: npt.ArrayLike,
        v: npt.ArrayLike,
        segment_ids: npt.ArrayLike,
    ) -> None:
        """Appends columns, of which a row's first may be pads.

        Args:
          k, v: [batch, seq, kv_heads, head_dim], taken as float32.
          segment_ids: integers [batch, seq]; 0 is a pad, anything else a
            token. Pads stand before the tokens of a row and are not stored.

        A row starts at its first token. A later call appends to what is
        there; its pads do not count.

        Raises ValueError for shapes that do not fit or a pad after a token,
        and what `update` raises; nothing has changed then.
        """
        keys, values = _floats("k", k), _floats("v", v)
        ids = _segment_ids(segment_ids)
        expected = (self.batch, *keys.shape[1:2])
        if ids.shape != expected:
            raise ValueError(
                f"segment_ids: expected shape {list(expected)} as k has, "
                f"found {list(ids.shape)}"
            )
        pads = compute_left_pads(ids)
        holes = (ids == 0).sum(axis=1) != pads
        if holes.any():
            row = int(holes.argmax())
            raise ValueError(
                f"segment_ids: row {row} has a pad after a token, expected "
                "pads on the left only"
            )
        self._core.append(keys, values, pads.tolist())

    def update(self, k: npt.ArrayLike, v: npt.ArrayLike) -> None:
        """Appends columns that are tokens in every row.

        Args:
          k, v: [batch, seq, kv_heads, head_dim], taken as float32.

        Raises ValueError for shapes that do not fit, CacheFullError if there
        is no memory or a LayerCache would exceed its capacity; nothing has
        changed then.
        """
        self._core.append(_floats("k", k), _floats("v", v), [])

    def compute_causal_mask(self, q_len: int) -> npt.NDArray[np.bool_]:
        """Which slots the newest `q_len` columns attend to.

        Call it after the `prefill` or `update` that brought the columns.
        Returns bool [batch, q_len, slots], slots as in `keys`: True where a
        query attends. It sees itself and the tokens before it (in a
        CyclicCache, those of its window) that are held; a pad sees
        nothing. Raises ValueError unless q_len is 1 to the number of columns
        given.
        """
        count = integer("q_len", q_len, 1)
        return self._core.causal_mask(count).view(np.bool_)

    def reset(self) -> None:
        """Forgets everything; rows start again at 0."""
        self._core.reset()


class LayerCache(_PaddedCache):
    """Keys and values of one layer with full attention, for a padded batch.

    Keeps every token. A row that would exceed the capacity raises
    CacheFullError and leaves the cache as it was. Memory grows with the
    content. Safe to use from several threads.

    Args:
      batch: rows.
      capacity: tokens that a row can hold.
      kv_heads: heads of keys and values.
      head_dim: numbers in a head, at most 512.
      dtype: how they are stored, "f32" or "bf16" (rounded to nearest even).

    Raises ValueError naming the argument that is out of range.
    """

    __slots__ = ()

    def __init__(
        self,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: str = "f32",
    ) -> None:
        super().__init__(batch, capacity, 0, kv_heads, head_dim, dtype)


class CyclicCache(_PaddedCache):
    """Keys and values of one sliding-window layer, for a padded batch.

    Keeps the last `capacity` tokens of each row. A token sees itself and the
    window - 1 tokens before it. Any number of columns may be given at once.

    With window == capacity, the queries of a step of several tokens would
    need tokens that the same step has displaced: steps of up to
    capacity - window + 1 tokens always have theirs, and `attention` raises
    ValueError where a query has not.

    Args:
      batch: rows.
      capacity: tokens that a row keeps.
      kv_heads: heads of keys and values.
      head_dim: numbers in a head, at most 512.
      dtype: how they are stored, "f32" or "bf16" (rounded to nearest even).
      window: tokens that a token sees, itself included; default: capacity.

    Raises ValueError naming the argument that is out of range.
    """

    __slots__ = ("_window",)

    def __init__(
        self,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: str = "f32",
        *,
        window: int | None = None,
    ) -> None:
        limit = integer("capacity", capacity, 1)
        if window is None:
            window = limit
        self._window = integer("window", window, 1)
        super().__init__(
            batch, limit, self._window, kv_heads, head_dim, dtype
        )

    @property
    def window(self) -> int:
        """Tokens that a token sees, itself included."""
        return self._window


def attention(
    q: npt.ArrayLike,
    cache: LayerCache | CyclicCache,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> FloatArray:
    """Attention of the newest columns over a padded cache.

    softmax(mask(cap(scale * q . keys))) . values, with the mask of
    `cache.compute_causal_mask(q_len)`, in float32. Call it after the
    `prefill` or `update` that brought the columns.

    Args:
      q: [batch, q_len, heads, head_dim], taken as float32; heads is a
        multiple of kv_heads, and head h reads kv head
        h // (heads // kv_heads).
      scale: of the scores; default: 1 / sqrt(head_dim).
      soft_cap: scores become soft_cap * tanh(score / soft_cap); default:
        they stay as they are.

    Returns float32 [batch, q_len, heads, head_dim], zeros for pads. Raises
    ValueError for shapes that do not fit, or if a CyclicCache has dropped
    tokens that lie in the window of a query.
    """
    if not isinstance(cache, _PaddedCache):
        raise unexpected("cache", "a LayerCache or CyclicCache", cache)
    if scale is None:
        factor = 1.0 / math.sqrt(cache.head_dim)
    else:
        factor = number("scale", scale, -1e30, 1e30)
    cap = 0.0
    if soft_cap is not None:
        cap = number("soft_cap", soft_cap, -1e30, 1e30)
        if np.float32(cap) <= 0:
            raise unexpected("soft_cap", "a float32 above 0 or None", cap)
    return cache._core.attend(_floats("q", q), factor, cap)


def compute_left_pads(segment_ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Number of pads at the beginning of each row.

    Args:
      segment_ids: integers [batch, seq]; 0 is a pad.

    Returns int32 [batch]. Zeros after the first token of a row do not count;
    a row of nothing but pads gives seq. Raises ValueError for other shapes
    and for numbers that are not integers.
    """
    tokens = _segment_ids(segment_ids) != 0
    if tokens.shape[1] == 0:
        return np.zeros(tokens.shape[0], np.int32)
    pads: npt.NDArray[np.int32] = tokens.argmax(axis=1).astype(np.int32)
    pads[~tokens.any(axis=1)] = tokens.shape[1]
    return pads


def _segment_ids(value: npt.ArrayLike) -> npt.NDArray[np.integer[Any]]:
    ids = _array("segment_ids", value)
    if ids.dtype.kind not in "iub":
        raise ValueError(
            f"segment_ids: expected integers, found dtype {ids.dtype}"
        )
    if ids.ndim != 2:
        raise ValueError(
            f"segment_ids: expected [batch, seq], found shape "
            f"{list(ids.shape)}"
        )
    return ids


def _floats(name: str, value: npt.ArrayLike) -> FloatArray:
    array = _array(name, value)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise ValueError(
            f"{name}: expected real numbers, found dtype {array.dtype}"
        )
    return np.ascontiguousarray(array, np.float32)


def _array(name: str, value: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: expected an array, found {brief(value)} ({error})"
        ) from None
