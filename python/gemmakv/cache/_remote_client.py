"""What a remote store must offer, and what its clients share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

# Values are never larger (kRemoteChunkBytes).
CHUNK_BYTES = 4 << 20


@runtime_checkable
class RemoteStore(Protocol):
    """A store of bytes by keys, for the remote tier of a prefix cache.

        class InADict:
            def __init__(self):
                self.values = {}
            def get_many(self, keys):
                return [self.values.get(key) for key in keys]
            def put_many(self, items):
                self.values.update((key, bytes(data)) for key, data in items)
            def has_many(self, keys):
                return [key in self.values for key in keys]

    Methods are called on threads of the cache's own, several at once, never on
    one that computes. What they raise, and results of another length or type,
    count as failures; what is not there or not what was written is computed.
    Bound the time that they take: a call that is late is abandoned, and at most
    eight run at a time.

    It may have two more methods: `delete_many(keys)`, and
    `delete_some(prefix) -> bool`, which deletes some of the keys that begin so
    and returns False once none is left. Without the first, what is removed
    stays in the store; without the second, `clear` says that it cannot.

    A prefix cache keeps its store, closed or not, where Python's garbage
    collector cannot see it. So a store that refers to that cache, or to a model
    with it, should do it by `weakref.ref`: else both stay until it lets go.
    """

    def get_many(
        self, keys: list[str]
    ) -> Sequence[bytes | bytearray | memoryview | None]:
        """A list parallel to `keys`: bytes, or None where there are none."""

    def put_many(self, items: list[tuple[str, memoryview]]) -> None:
        """Stores each value, of at most 4 MiB, replacing what is there. Views
        are read-only and stay valid as long as they are referred to.
        """

    def has_many(self, keys: list[str]) -> list[bool]:
        """A list parallel to `keys`, of at most some hundreds."""
