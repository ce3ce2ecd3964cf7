"""Conversations that outlive a process: sessions and their turns.

They are in a database, which chats and servers share. This room knows no HTTP
and no terminal. Keys and values are elsewhere, in the prefix cache.

`gemmakv.conversations._store` has the store itself; it needs sqlalchemy, which
nothing here does.
"""

from gemmakv.conversations._errors import (
    NewerStore,
    NoResponse,
    NoSession,
    NoTurn,
    SessionBusy,
    StoreBusy,
    StoreClosed,
    StoreError,
    StoreFailed,
    StoreFull,
)
from gemmakv.conversations._types import (
    ANYBODY,
    BUSY_S,
    KEPT,
    LEASE_S,
    Pending,
    SessionInfo,
    Turn,
    new_id,
)

__all__ = [
    "ANYBODY",
    "BUSY_S",
    "KEPT",
    "LEASE_S",
    "NewerStore",
    "NoResponse",
    "NoSession",
    "NoTurn",
    "Pending",
    "SessionBusy",
    "SessionInfo",
    "StoreBusy",
    "StoreClosed",
    "StoreError",
    "StoreFailed",
    "StoreFull",
    "Turn",
    "new_id",
]
