"""What is asked of a model, by whom, and what it follows. Knows no HTTP."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gemmakv.chat._continuation import moved
from gemmakv.chat._gemma import Gemma
from gemmakv.chat._messages import messages_of
from gemmakv.generation._prefix import PinnedPrefix
from gemmakv.generation._prompts import TokenArray
from gemmakv.server._store import ANYBODY

_REPLIES = ("assistant", "model")
_UNSALTED = b"gemmakv: the part of those without a key"

Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Tenant:
    """Whose request it is.

    Attributes:
      label: what metrics and logs call it; says nothing about its key.
      gemma: the model with the tenant's part of the prefix cache.
      salt: of that part; b"" if it is everybody's.
    """

    label: str
    gemma: Gemma
    salt: bytes = b""

    def narrowed(self, salt: str | None) -> Tenant:
        """The same tenant with a part of the cache of its own for `salt`,
        within what is the tenant's: no salt leads to the part of another.
        """
        if not salt:
            return self
        mac = hmac.digest(self.salt or _UNSALTED, salt.encode(), hashlib.sha256)
        return Tenant(self.label, self.gemma.with_salt(mac), mac)


@dataclasses.dataclass(frozen=True)
class Pin:
    """What a tenant keeps in the RAM of the prefix cache, and since when, in
    seconds since the epoch.
    """

    held: PinnedPrefix
    created: float


@dataclasses.dataclass(frozen=True)
class Past:
    """What the messages of a request follow, and what is kept of its turn.

    Attributes:
      session: the conversation that goes on with it; or
      parent: the turn that it comes after; or neither.
      id: of the new turn.
      created: when it began, in seconds since the epoch.
      system: what the model is told before the first turn; None: what the
        session says.
      keep: who may name the new turn, a state of `_store`; None: it is not
        kept.
      params: what is kept with it.
    """

    id: str
    session: str | None = None
    parent: str | None = None
    created: float = dataclasses.field(default_factory=time.time)
    system: str | None = None
    keep: int | None = ANYBODY
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """What is to be continued, and how.

    Attributes:
      tenant: whose it is.
      messages: a conversation, whose reply begins with what a last message
        of the assistant says; or None, and
      prompts: texts, which get a BOS in front, or token ids, each continued
        by itself.
      past: what the messages follow, where the server keeps that.
      ids: the messages' token ids, where they are known.
      options: generation options by their names in `GenerationOptions`.
        Without `max_tokens`, up to `default_max_tokens`, or the end of the
        context if that is None.
      tools, tool_choice, parallel_tool_calls, think: as for `Gemma.chat`.
      truncate: whether the oldest turns of a conversation that has no room in
        the context are left out.
      dropped: how many messages that were, where `ids` are known.
      n: continuations of each prompt; continuation i of prompt p has the
        index p * n + i and the seed seed + i.
      streamed: whether tokens are wanted as they come. Otherwise those of a
        continuation come when it has ended, which costs less.
      arrived: time.monotonic() when the request came; its deadline counts
        from there.
      not_enforced: gets the paths of what tools ask for that the reply is not
        held to, before there is any reply.
    """

    tenant: Tenant
    messages: Messages | None = None
    prompts: Sequence[str | Sequence[int]] = ()
    past: Past | None = None
    ids: TokenArray | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    think: bool | None = None
    truncate: bool = False
    dropped: int = 0
    n: int = 1
    default_max_tokens: int | None = None
    streamed: bool = True
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    not_enforced: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class EmbedRequest:
    """Texts, or token ids, that vectors are to be made of.

    Attributes:
      tenant: whose it is.
      dim, prompt: as for `Gemma.embed`.
      truncate: whether texts that are too long lose what is too much, which
        is an error otherwise.
      names: what the API calls what errors begin with.
      arrived: time.monotonic() when the request came.
    """

    tenant: Tenant
    texts: Sequence[str | Sequence[int]]
    dim: int | None = None
    prompt: str | None = None
    truncate: bool = False
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    arrived: float = dataclasses.field(default_factory=time.monotonic)


def parted(messages: Messages) -> tuple[Messages, str]:
    """A conversation without the beginning of a reply that it ends with, and
    that; "" if it has none. Raises ValueError.
    """
    if not messages or messages[-1].get("role") not in _REPLIES:
        return messages, ""
    place = len(messages) - 1
    try:
        [last] = messages_of(messages[-1:])
    except ValueError as error:
        raise moved(error, place) from None
    if last.tool_calls:
        raise ValueError(
            f"messages[{place}].tool_calls: expected their results in the "
            "messages after it, found none"
        )
    if last.reasoning:
        raise ValueError(
            f"messages[{place}].reasoning: expected none where the last "
            "message begins the reply, found some"
        )
    if not place:
        raise ValueError(
            "messages: expected a message before the beginning of a reply, "
            "found none"
        )
    return messages[:-1], "".join(last.parts).lstrip()
