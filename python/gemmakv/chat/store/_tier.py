"""Stored sessions whose keys and values are in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable

from gemmakv.chat._gemma import Gemma
from gemmakv.chat._session import Session
from gemmakv.chat._session_file import KeptTokens, kept_tokens
from gemmakv.chat._transcript import common_exact
from gemmakv.chat.store._protocol import SessionStore
from gemmakv.errors import GemmaKVError


def keeps_keys(session: Session) -> bool:
    """Whether the prefix cache keeps the session's keys and values for later
    starts: it has a disk, and the session's options let it.
    """
    prefix = session.gemma.prefix_cache
    return (
        prefix is not None
        and "disk" in prefix.cache.tiers
        and session.options.get("prefix_cache", "on") in ("on", "write")
    )


def tokens_in(store: SessionStore, id: str) -> KeptTokens | None:
    """Of a stored session; None if its keys and values are not in the prefix
    cache, or nobody can tell.
    """
    try:
        file = store.open_session(id)
        if file is None:
            return None
        with file:
            return kept_tokens(file)
    except (OSError, GemmaKVError):
        return None


def forget(gemma: Gemma, gone: KeptTokens, others: Iterable[KeptTokens]) -> int:
    """Removes from the prefix cache's folders what only a session that is gone
    used. `others`: all that are left. Returns the objects that went.
    """
    prefix = gemma.prefix_cache
    if prefix is None:
        return 0
    shared = max(
        (
            common_exact(gone.ids, other.ids)
            for other in others
            if other.kv_dtype == gone.kv_dtype
        ),
        default=0,
    )
    return prefix._remove(gone.ids, shared, gone.kv_dtype)
