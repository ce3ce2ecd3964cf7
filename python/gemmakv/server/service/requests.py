"""Requests to a model: by whom, for what, after which turn. Knows no HTTP."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gemmakv.chat._continuation import moved
from gemmakv.chat._gemma import Gemma
from gemmakv.chat._messages import Template, messages_of
from gemmakv.chat._templates import turn_rules
from gemmakv.chat._turns import merge
from gemmakv.conversations import ANYBODY
from gemmakv.generation._option_kinds import Integer, Texts, TokenIds
from gemmakv.generation._options import GenerationOptions
from gemmakv.generation._prefix import PinnedPrefix
from gemmakv.generation._prompts import TokenArray
from gemmakv.server.service.errors import invalid, unexpected, unsupported

# The value of each with which it changes nothing.
_PENALTIES = {
    "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
}  # fmt: skip
# Options by the names that other servers have for them.
ALIASES = {
    "repeat_penalty": "repetition_penalty", "rep_pen": "repetition_penalty",
    "n_predict": "max_tokens", "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}  # fmt: skip
_REPLIES = ("assistant", "model")
_UNSALTED = b"gemmakv: the part of those without a key"

Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Tenant:
    """An API key, or everybody where there are no keys.

    Attributes:
      label: its name in metrics and logs, which does not tell the key.
      gemma: the model with the tenant's part of the prefix cache.
      salt: the salt of that part; b"" if it is everybody's.
    """

    label: str
    gemma: Gemma
    salt: bytes = b""

    def narrow(self, salt: str | None) -> Tenant:
        """Gives the same tenant with another part of the cache, for `salt`: no
        salt leads to the part of another tenant. None is the tenant's own
        part. Raises ValueError for an empty salt.
        """
        if salt is None:
            return self
        if not salt:
            raise ValueError("cache_salt: expected a text, found an empty one")
        mac = hmac.digest(self.salt or _UNSALTED, salt.encode(), hashlib.sha256)
        return Tenant(self.label, self.gemma.with_salt(mac), mac)


@dataclasses.dataclass(frozen=True)
class Pin:
    """A prefix that a tenant keeps in RAM, and since when, in seconds since
    the epoch.
    """

    held: PinnedPrefix
    created: float


@dataclasses.dataclass(frozen=True)
class Past:
    """The turn that a request follows, and what is kept of its own turn.

    Attributes:
      session: the conversation that goes on with it; or
      parent: the turn that it comes after; or neither.
      replaces: the session's last turn, if the new one takes its place.
      id: of the new turn.
      created: when it began, in seconds since the epoch.
      system: what the model is told before the first turn; None: what the
        session says.
      keep: who may name the new turn, a state of a `Turn`; None: it is not
        kept.
      params: what is kept with it.
    """

    id: str
    session: str | None = None
    parent: str | None = None
    replaces: str | None = None
    created: float = dataclasses.field(default_factory=time.time)
    system: str | None = None
    keep: int | None = ANYBODY
    params: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """A request to continue messages or prompts.

    Attributes:
      tenant: who sent it.
      messages: a conversation, whose reply begins with what a last message
        of the assistant says; or None, and
      prompts: texts, which get a BOS in front if `add_bos`, or token ids,
        each continued by itself.
      said, begun: the messages before the beginning of a reply that they end
        with, and this beginning; known once the request is checked.
      past: what the messages follow, where the server keeps that.
      ids: the messages' token ids, where they are known.
      options: generation options by their names in `GenerationOptions`.
        Without `max_tokens`, up to `default_max_tokens`, or the end of the
        context if that is None.
      prompt_logprobs: how many of the likeliest tokens of each place of the
        prompts are told, beside the log-probabilities of the prompts' own
        tokens; None: neither is.
      tools, tool_choice, parallel_tool_calls, think: as for `Gemma.chat`.
      truncate: whether the oldest turns of a conversation that has no room in
        the context are left out.
      dropped: how many messages that were, where `ids` are known.
      n: continuations of each prompt; continuation i of prompt p has the
        index p * n + i and the seed seed + i.
      streamed: whether tokens are wanted as they come. Otherwise those of a
        continuation come when it has ended, which costs less.
      progress: whether a streamed request with one continuation of each prompt
        is told how much of it is computed.
      arrived: time.monotonic() when the request came; its deadline counts
        from there.
      not_enforced: gets the paths of what tools ask for that the reply is not
        held to, before there is any reply.
    """

    tenant: Tenant
    messages: Messages | None = None
    said: Messages = ()
    begun: str = ""
    prompts: Sequence[str | Sequence[int]] = ()
    add_bos: bool = True
    past: Past | None = None
    ids: TokenArray | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prompt_logprobs: int | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    think: bool | None = None
    truncate: bool = False
    dropped: int = 0
    n: int = 1
    default_max_tokens: int | None = None
    streamed: bool = True
    progress: bool = False
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    not_enforced: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class EmbedRequest:
    """A request for the vectors of texts, or of token ids.

    Attributes:
      tenant: who sent it.
      dim, prompt: as for `Gemma.embed`.
      truncate: whether texts that are too long lose what is too much, which
        is an error otherwise.
      arrived: time.monotonic() when the request came.
    """

    tenant: Tenant
    texts: Sequence[str | Sequence[int]]
    dim: int | None = None
    prompt: str | None = None
    truncate: bool = False
    arrived: float = dataclasses.field(default_factory=time.monotonic)


def seconds_left(until: float | None) -> float | None:
    """Gives the seconds until a time of time.monotonic(), at least 0."""
    return None if until is None else max(0.0, until - time.monotonic())


def take_options(
    options: Mapping[str, Any], context: int
) -> dict[str, Any]:
    """Makes the library's generation options of a request's.

    Requests may also have what other servers of local models take:
    floats that are whole for integers, -1 for no limit of `max_tokens` and for
    no `top_k`, 0 as a `top_p` that only the likeliest token has, and empty
    stop strings, which stop nothing. `context` is the most tokens that there
    can be.
    """
    found = {name: _taken(name, value) for name, value in options.items()}
    if _is_integer(found.get("max_tokens"), -1):
        found["max_tokens"] = context
    if _is_integer(found.get("top_k"), -1):
        found["top_k"] = 0
    top_p = found.get("top_p")
    if isinstance(top_p, int | float) and top_p is not False and top_p == 0:
        found |= {"top_p": 1.0, "top_k": 1}
    if "stop" in found and found["stop"] in ("", []):
        del found["stop"]
    return found


def taken_schema() -> dict[str, Any]:
    """Gives the JSON schema of the options that `take_options` takes."""
    found = GenerationOptions.json_schema()
    properties = found["properties"]
    for name in ("max_tokens", "top_k"):
        properties[name]["minimum"] = -1
    del properties["top_p"]["exclusiveMinimum"]
    properties["top_p"]["minimum"] = 0
    text = {"type": "string"}
    some = {"type": "array", "items": text}
    properties["stop"]["anyOf"] = [text, some, {"type": "null"}]
    return found


def _taken(name: str, value: Any) -> Any:
    option = GenerationOptions.table.get(name)
    if option is None:
        return value
    if isinstance(option.kind, Integer):
        return whole(value)
    if isinstance(option.kind, TokenIds) and isinstance(value, list):
        return [whole(one) for one in value]
    if isinstance(option.kind, Texts) and isinstance(value, list | tuple):
        return [one for one in value if one != ""]
    return value


def read_aliases(
    fields: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Adds options that a request has by names of other servers, `ALIASES`,
    and returns these names by ours. Raises RequestError for one that the
    request has by both names, with other values.
    """
    found = dict(options)
    names: dict[str, str] = {}
    for theirs, ours in ALIASES.items():
        value = fields.get(theirs)
        if value is None:
            continue
        if found.setdefault(ours, value) != value:
            raise invalid(
                theirs, f"expected it or {names.get(ours, ours)}, found both"
            )
        if ours not in options:
            names.setdefault(ours, theirs)
    return found, names


def limit_penalties(
    options: Mapping[str, Any], last: Any, name: str, default: int
) -> dict[str, Any]:
    """Makes the library's options of those of an API whose penalties look at
    the `last` tokens alone; the field is called `name`. Here penalties look at
    all tokens, for -1, the API's `default` and None; 0 turns them off. Raises
    RequestError for another number together with a penalty.
    """
    last = whole(last)
    active = {
        name: value
        for name, value in options.items()
        if name in _PENALTIES and value != _PENALTIES[name]
    }
    if type(last) is not int or last < -1:
        if last is None:
            return dict(options)
        raise unexpected(name, "an integer of at least -1", last)
    if last == 0:
        return {k: v for k, v in options.items() if k not in _PENALTIES}
    if active and last not in (-1, default):
        raise unsupported(name, "a penalty of so many tokens alone")
    return dict(options)


def whole(value: Any) -> Any:
    """Makes an integer of a whole float; other values stay as they are."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _is_integer(value: object, wanted: int) -> bool:
    return type(value) is int and value == wanted


def split_reply(
    messages: Messages, template: Template
) -> tuple[Messages, str]:
    """Splits a conversation into its messages and the beginning of a reply
    that it ends with; "" if there is none. Several replies at the end begin it
    together, if the template makes one of them. Raises ValueError.
    """
    start = len(messages)
    while start and messages[start - 1].get("role") in _REPLIES:
        start -= 1
        if turn_rules(template).replies:
            break
    if start == len(messages):
        return messages, ""
    try:
        last = messages_of(messages[start:])
    except ValueError as error:
        raise moved(error, start) from None
    for place, one in enumerate(last, start):
        if one.tool_calls:
            raise ValueError(
                f"messages[{place}].tool_calls: expected their results in the "
                "messages after it, found none"
            )
        if one.reasoning:
            raise ValueError(
                f"messages[{place}].reasoning: expected none where the last "
                "message begins the reply, found some"
            )
    if not start:
        raise ValueError(
            "messages: expected a message before the beginning of a reply, "
            "found none"
        )
    begun = merge(last, "assistant")
    return messages[:start], "".join(begun.parts).lstrip()
