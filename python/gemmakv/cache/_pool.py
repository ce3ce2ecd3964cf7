"""A byte budget that many conversations share."""

from __future__ import annotations

from gemmakv import _core
from gemmakv._support.arguments import integer
from gemmakv.errors import unexpected


class BlockPool:
    """A budget of bytes for the keys and values of all caches that use it.

        pool = gemmakv.BlockPool(bytes=2 << 30)
        cache = gemma.new_cache(pool=pool)

    Memory is taken block by block as conversations grow, and given back as
    they are truncated, reset or dropped; forks share it. What would exceed
    the budget raises CacheFullError and leaves every conversation as it was.
    Caches made without a pool are limited by memory alone. Thread-safe.

    Args:
      bytes: the budget; None: no limit, the pool only counts.

    Raises ValueError if `bytes` is not a positive integer.
    """

    __slots__ = ("_core", "__weakref__")

    def __init__(self, bytes: int | None = None) -> None:
        budget = 0
        if bytes is not None:
            budget = integer("bytes", bytes, 1)
        self._core = _core.BlockPool(budget)

    def __repr__(self) -> str:
        limit = "no limit" if self.bytes is None else f"{self.bytes}"
        return f"<BlockPool: {self.used_bytes} of {limit} bytes in use>"

    @property
    def bytes(self) -> int | None:
        """The budget; None if there is no limit."""
        return self._core.bytes or None

    @property
    def used_bytes(self) -> int:
        """Bytes of all blocks in use, each counted once."""
        return self._core.used_bytes

    @property
    def blocks_in_use(self) -> int:
        """Blocks that some conversation or checkpoint refers to."""
        return self._core.blocks_in_use


def core_pool(pool: BlockPool | None) -> _core.BlockPool | None:
    """The core's object. Raises ValueError for anything but a pool."""
    if pool is None:
        return None
    if not isinstance(pool, BlockPool):
        raise unexpected("pool", "a gemmakv.BlockPool", pool)
    return pool._core
