"""What was computed once, for any conversation that begins alike."""

from __future__ import annotations

import dataclasses
import os
import warnings
import weakref
from typing import Any, Self

from gemmakv import _core
from gemmakv._support.arguments import choice, number, path_text
from gemmakv._support.sizes import parse_bytes
from gemmakv.cache._remote_client import RemoteStore
from gemmakv.errors import unexpected

_MOST = 1 << 30
_SHARE = 16
# Seconds for a tier that does not answer, at the interpreter's end.
_CLOSE_S = 10.0
_MOST_S = 1e6


@dataclasses.dataclass(frozen=True)
class PrefixStats:
    """What a prefix cache did so far, and what it holds.

    Attributes:
      requests: calls that asked it; a batch has one for each row.
      prompt_tokens: tokens of these that could have come from it.
      cached: of those, the tokens that did, by the tier that had them:
        {"ram": n, "disk": m}.
      misses: requests that got less than all, by reason: "divergent" (the
        first token that is not known), "evicted", "no resume point" (all is
        known, but no position near enough to go on from), "cheaper to
        compute".
      bytes: bytes of keys, values and states that it has, by tier.
      pinned_bytes: of those in RAM, that stay until they are unpinned.
      entries: pages and resume points that it has, by tier.
      writes: entries that were new, by tier.
      evictions: entries that went, by tier.
      queued: objects that are still to be written to the tiers below RAM.
      dropped: objects that were not, because memory was needed for requests
        or a tier was too slow.
      failed_writes: objects that a tier could not take, by tier.
      damaged: objects that were not what they should be, by tier; each is a
        miss.
      timeouts: requests that went on without a tier that did not answer, by
        tier.
      latency_s: seconds that a tier takes to answer, lately, by tier.
      bytes_per_s: bytes a second that a tier gives, lately, by tier.
    """

    requests: int
    prompt_tokens: int
    cached: dict[str, int]
    misses: dict[str, int]
    bytes: dict[str, int]
    pinned_bytes: int
    entries: dict[str, int]
    writes: dict[str, int]
    evictions: dict[str, int]
    queued: int
    dropped: int
    failed_writes: dict[str, int]
    damaged: dict[str, int]
    timeouts: dict[str, int]
    latency_s: dict[str, float]
    bytes_per_s: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """The attributes by their names."""
        return dataclasses.asdict(self)


class PrefixCache:
    """Keys and values of what conversations began with, kept for others.

        prefix = gemmakv.PrefixCache(ram="2GiB", disk="~/.cache/chats")
        gemma = gemmakv.Gemma.load("gemma-3-270m", prefix_cache=prefix)

    Conversations of one model that begin with the same tokens share what is
    computed for these, also those that run at the same time; the results
    have the same bits. Several models may use one: each finds its own only.
    `Gemma.load` makes one by itself. Thread-safe.

    Below RAM there may be tiers that outlive the process: what is new is
    written through to all of them in the background, and what RAM lacks is
    looked for in them, the nearest first. A tier that fails or is slow is a
    miss, never an error of a request. A context manager, which closes it. In
    a child of `os.fork` it has what was in RAM, and no tiers.

    Args:
      ram: bytes of keys, values and states that it may refer to, an int or
        text as "512MiB" or "2GB"; 0: nothing is kept; None: 1 GiB, at most a
        16th of the memory that this process may use. They are blocks of the
        conversations' own pools, which get them back before they are full.
      shared: folder on a memory file system, which processes of this user
        share without copies; True: the default place.
      shared_bytes: bytes of files in it.
      disk: folder on a disk.
      disk_bytes: bytes of files in it.
      remote: "redis://host:6379/0", "valkey://...", "s3://bucket/prefix", or
        an object of the remote store's protocol.
      remote_secret: str or bytes: values in the remote store that are not
        signed with it are misses.
      salt: a tenant, str or bytes: what another salt computed is never found,
        nor waited for. Not empty; None: everybody's. `Gemma.with_salt` gives
        one model to many.

    Raises ValueError for a size, a folder or a salt that is none, or for a
    secret without a remote store.
    """

    __slots__ = ("_core", "_salt", "_tiers", "__weakref__")

    def __init__(
        self,
        ram: int | str | None = None,
        *,
        shared: str | os.PathLike[str] | bool | None = None,
        shared_bytes: int | str = "4GiB",
        disk: str | os.PathLike[str] | None = None,
        disk_bytes: int | str = "50GiB",
        remote: str | RemoteStore | None = None,
        remote_secret: str | bytes | None = None,
        salt: str | bytes | None = None,
    ) -> None:
        if ram is None:
            budget = min(_MOST, _core.memory_limit() // _SHARE)
        else:
            budget = parse_bytes("ram", ram)
        self._salt = salt_bytes(salt)
        tiers: list[_core.BlockStore] = []
        shared_budget = parse_bytes("shared_bytes", shared_bytes)
        disk_budget = parse_bytes("disk_bytes", disk_bytes)
        if shared is not None and shared is not False:
            tiers.append(_folder("shared", shared, shared_budget))
        if disk is not None:
            tiers.append(_folder("disk", disk, disk_budget))
        if remote is not None:
            from gemmakv.cache._remote import open_remote

            tiers.append(open_remote(remote, remote_secret))
        elif remote_secret is not None:
            raise ValueError(
                "remote_secret: expected none without remote, found one"
            )
        self._tiers = ("ram", *(tier.tier for tier in tiers))
        self._core = _core.PrefixCache(budget, tiers)
        if tiers:
            # What is queued is written, also where nobody closes it.
            weakref.finalize(self, _close, self._core, _CLOSE_S)

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"<PrefixCache: {stats.bytes['ram']} of {self.ram} bytes of RAM, "
            f"{sum(stats.cached.values())} tokens given>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def ram(self) -> int:
        """The budget of the RAM tier in bytes."""
        return self._core.ram_bytes

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of its tiers, the nearest first: "ram", then those of
        "shared", "disk" and "remote" that it was made with.
        """
        return self._tiers

    def stats(self) -> PrefixStats:
        """Over all models and tenants that use it."""
        found = self._core.stats()
        tiers = found["tiers"]

        def by_tier(name: str, **ram: int) -> dict[str, Any]:
            return ram | {tier: of[name] for tier, of in tiers.items()}

        return PrefixStats(
            requests=found["requests"],
            prompt_tokens=found["prompt_tokens"],
            cached=dict.fromkeys(self._tiers, 0) | found["tokens"],
            misses=found["misses"],
            bytes=by_tier("bytes", ram=found["ram_bytes"]),
            pinned_bytes=found["pinned_bytes"],
            entries=by_tier(
                "entries",
                ram=found["ram_pages"] + found["ram_resume_points"],
            ),
            writes=by_tier("writes", ram=found["published"]),
            evictions=by_tier("evictions", ram=found["evictions"]),
            queued=found["queued"],
            dropped=found["dropped"],
            failed_writes=by_tier("failed_writes"),
            damaged=by_tier("damaged"),
            timeouts=by_tier("timeouts"),
            latency_s=by_tier("latency_s"),
            bytes_per_s=by_tier("bytes_per_s"),
        )

    def flush(self, timeout: float = 60.0) -> bool:
        """Waits until what was computed so far is written to all tiers, or
        could not be; False if it was not within `timeout` seconds.

        Raises ValueError for a time-out that is none.
        """
        return self._core.flush(number("timeout", timeout, 0, _MOST_S))

    def clear(
        self, tier: str | None = None, *, timeout: float = 60.0
    ) -> None:
        """Forgets everything, of all models and tenants; what is pinned in
        RAM, too.

        `tier`: "ram", "shared", "disk" or "remote" alone. Raises ValueError
        for one that there is not, and for a time-out that is none. `close`
        changes nothing of this: what the tiers below RAM have goes then, too.

        Raises GemmaKVError that names the tiers that have still something: one
        that fails, whose client has no `delete_some`, or that does not answer
        within `timeout` seconds. The other tiers are cleared then.
        """
        if tier is not None:
            choice("tier", tier, self.tiers)
        self._core.clear(tier, number("timeout", timeout, 0, _MOST_S))

    def close(self, timeout: float = 10.0) -> int:
        """Writes what is still to be written, and leaves the tiers below RAM.
        Models that use it go on with RAM alone. The end of the interpreter
        closes it, too.

        Returns how many objects were not written within `timeout` seconds,
        because a tier did not answer; if there are any, it warns of them
        (RuntimeWarning). They are computed again when they are needed. Raises
        ValueError for a time-out that is none.
        """
        return _close(self._core, number("timeout", timeout, 0, _MOST_S))


def _close(core: _core.PrefixCache, timeout_s: float) -> int:
    dropped = core.close(timeout_s)
    if dropped:
        warnings.warn(
            f"prefix cache: {dropped} objects are not written: a tier did not "
            f"take them within {timeout_s:g} s",
            RuntimeWarning,
            stacklevel=3,
        )
    return dropped


def _folder(tier: str, place: object, budget: int) -> _core.BlockStore:
    """Makes a tier of files. Raises ArgumentError for what is no path."""
    if place is True and tier == "shared":
        from gemmakv.cache._folders import default_shared_folder

        place = default_shared_folder()
    path = path_text(tier, place, "a folder")
    if budget == 0:
        raise unexpected(f"{tier}_bytes", "at least 1", budget)
    return _core.FolderStore(
        os.path.expanduser(path),
        tier=tier,
        mapped=tier == "shared",
        budget_bytes=budget,
    )


def salt_bytes(salt: object) -> bytes:
    """Gives the bytes of a salt; none for None. Raises ArgumentError, also for
    an empty one, which would share with everybody.
    """
    if salt is None:
        return b""
    if isinstance(salt, str) and salt:
        return salt.encode("utf-8", "surrogatepass")
    if isinstance(salt, bytes) and salt:
        return salt
    expected = "a str or bytes that is not empty, or None"
    raise unexpected("salt", expected, salt)


def core_prefix_cache(prefix_cache: object) -> PrefixCache | None:
    """Gives a prefix cache: for True a new one, for False or None none. Raises
    ArgumentError.
    """
    if prefix_cache is True:
        return PrefixCache()
    if prefix_cache is False or prefix_cache is None:
        return None
    if isinstance(prefix_cache, PrefixCache):
        return prefix_cache
    expected = "a gemmakv.PrefixCache, True or False"
    raise unexpected("prefix_cache", expected, prefix_cache)
