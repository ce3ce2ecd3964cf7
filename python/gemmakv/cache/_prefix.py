"""What was computed once, for any conversation that begins alike."""

from __future__ import annotations

import dataclasses
from typing import Any

from gemmakv import _core
from gemmakv._support.sizes import memory_limit, parse_bytes
from gemmakv.errors import brief

__all__ = ["PrefixCache", "PrefixStats", "core_prefix_cache", "salt_bytes"]

_MOST = 1 << 30
_SHARE = 16


@dataclasses.dataclass(frozen=True)
class PrefixStats:
    """What a prefix cache did so far, and what it holds.

    Attributes:
      requests: calls that asked it; a batch has one for each row.
      prompt_tokens: tokens of these that could have come from it.
      cached: of those, the tokens that did, by tier: {"ram": n}.
      misses: requests that got less than all, by reason: "divergent" (the
        first token that is not known), "evicted", "no resume point" (all is
        known, but no position near enough to go on from), "cheaper to
        compute".
      bytes: bytes of keys, values and states that it refers to, by tier.
      entries: pages and resume points that it has, by tier.
      writes: entries that were new.
      evictions: entries that went.
    """

    requests: int
    prompt_tokens: int
    cached: dict[str, int]
    misses: dict[str, int]
    bytes: dict[str, int]
    entries: dict[str, int]
    writes: int
    evictions: int

    def as_dict(self) -> dict[str, Any]:
        """The attributes by their names."""
        return dataclasses.asdict(self)


class PrefixCache:
    """Keys and values of what conversations began with, kept for others.

        prefix = gemmakv.PrefixCache(ram="2GiB")
        gemma = gemmakv.Gemma.load("gemma-3-270m", prefix_cache=prefix)

    Conversations of one model that begin with the same tokens share what is
    computed for these, also those that run at the same time; the results
    have the same bits. Several models may use one: each finds its own only.
    `Gemma.load` makes one by itself. Thread-safe.

    Args:
      ram: bytes of keys, values and states that it may refer to, an int or
        text as "512MiB" or "2GB"; 0: nothing is kept; None: 1 GiB, at most a
        16th of the memory that this process may use. They are blocks of the
        conversations' own pools, which get them back before they are full.
      salt: a tenant, str or bytes: what another salt computed is never found,
        nor waited for. `Gemma.with_salt` gives one model to many.

    Raises ValueError for a size or a salt that is none.
    """

    __slots__ = ("_core", "_salt", "__weakref__")

    def __init__(
        self,
        ram: int | str | None = None,
        *,
        salt: str | bytes | None = None,
    ) -> None:
        if ram is None:
            budget = min(_MOST, memory_limit() // _SHARE)
        else:
            budget = parse_bytes("ram", ram)
        self._salt = salt_bytes(salt)
        self._core = _core.PrefixCache(budget)

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"<PrefixCache: {stats.bytes['ram']} of {self.ram} bytes of RAM, "
            f"{sum(stats.cached.values())} tokens given>"
        )

    @property
    def ram(self) -> int:
        """The budget of the RAM tier in bytes."""
        return self._core.ram_bytes

    def stats(self) -> PrefixStats:
        """Over all models and tenants that use it."""
        found = self._core.stats()
        return PrefixStats(
            requests=found["requests"],
            prompt_tokens=found["prompt_tokens"],
            cached={"ram": found["ram_tokens"]},
            misses=found["misses"],
            bytes={"ram": found["ram_bytes"]},
            entries={
                "ram": found["ram_pages"] + found["ram_resume_points"],
            },
            writes=found["published"],
            evictions=found["evictions"],
        )

    def clear(self) -> None:
        """Forgets everything, of all models and tenants."""
        self._core.clear()


def salt_bytes(salt: object) -> bytes:
    """Of a salt; none for None. Raises ValueError."""
    if salt is None:
        return b""
    if isinstance(salt, str):
        return salt.encode("utf-8", "surrogatepass")
    if isinstance(salt, bytes):
        return salt
    raise ValueError(f"salt: expected a str or bytes, found {brief(salt)}")


def core_prefix_cache(prefix_cache: object) -> PrefixCache | None:
    """True: one of its own; False or None: none. Raises ValueError."""
    if prefix_cache is True:
        return PrefixCache()
    if prefix_cache is False or prefix_cache is None:
        return None
    if isinstance(prefix_cache, PrefixCache):
        return prefix_cache
    raise ValueError(
        "prefix_cache: expected a gemmakv.PrefixCache, True or False, found "
        + brief(prefix_cache)
    )
