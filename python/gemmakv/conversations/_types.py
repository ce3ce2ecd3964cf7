"""What the store of conversations takes and gives. Needs no database."""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import Any

import numpy as np

from gemmakv.generation._prompts import TokenArray

# Device and inode of a database's file.
FileId = tuple[int, int]
# `items` and `messages` that have no reply, as JSON has them.
Pending = dict[str, list[dict[str, Any]]]

BUSY_S = 10.0  # for another process that writes
LEASE_S = 10.0  # a holder that was killed blocks no longer

# Who may name a turn.
ANYBODY = 0  # whoever may see what leads to it
KEPT = 1  # as long as it is kept as a response, too
NOBODY = 2  # its response was deleted or has expired


def bytes_of(tokens: TokenArray) -> bytes:
    """Gives token ids as they are stored: four bytes each, the lowest first."""
    return np.ascontiguousarray(tokens, "<i4").tobytes()


def new_id(prefix: str) -> str:
    """Makes an id that no other record has."""
    return f"{prefix}_{secrets.token_hex(12)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """Messages and the reply to them.

    Attributes:
      depth: the number of turns up to it, itself included.
      system: what the model was told before the first turn.
      tools: the tools that the model was told of.
      messages: what came.
      reply: the message that came of it.
      reason: "stop", "length", "deadline" or "cancelled".
      usage: numbers of tokens by name.
      params: what else its API wants to know of it later.
      basis: which model and template the tokens are for.
      whole: whether `tokens` are those of the whole conversation. Otherwise
        they follow those of the parent.
      tokens: token ids, as `basis` says up to where.
    """

    id: str
    tenant: str
    parent: str | None
    depth: int
    state: int = ANYBODY
    created: float = dataclasses.field(default_factory=time.time)
    system: str | None
    tools: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    reply: dict[str, Any]
    reason: str
    usage: dict[str, int]
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    basis: str
    whole: bool
    tokens: TokenArray


@dataclasses.dataclass(frozen=True)
class SessionInfo:
    """A conversation that goes on.

    Attributes:
      head: the last turn; None before the first.
      turns: the number of turns.
      created, updated: seconds since the epoch.
      model: the weights' fingerprint; None if an earlier version made it.
      settings: what a chat keeps of it besides.
      draft: what was said last, if it has no reply.
      parent: the session that it was forked from. May be gone.
      metadata: what its owner notes of it.
      pending: what was added after the last turn and has no reply so far: the
        next turn begins with it. `items` have it as its API does, `messages`
        as the model reads it.
    """

    id: str
    name: str | None
    system: str | None
    head: str | None
    turns: int
    created: float
    updated: float
    model: str | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    draft: str | None = None
    parent: str | None = None
    metadata: dict[str, str] | None = None
    pending: Pending | None = None


@dataclasses.dataclass(frozen=True)
class Branch:
    """A session, and the one that it branches off.

    Attributes:
      parent: of the sessions listed with it, the oldest of those that it has
        the most turns in common with, or, without any, the one that it was
        forked from; None if there is neither.
      turn: the last turn of both.
      turns: the number of turns of both.
    """

    session: SessionInfo
    parent: str | None = None
    turn: str | None = None
    turns: int = 0
