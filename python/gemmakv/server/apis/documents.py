"""Sessions as JSON documents, which are exported and imported."""

from __future__ import annotations

import hashlib
import json
import re
import time
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, model_validator

from gemmakv.chat._continuation import continuation
from gemmakv.chat._messages import Message, messages_of
from gemmakv.chat._tools import tool_use
from gemmakv.conversations import SessionInfo, Turn, new_id
from gemmakv.errors import ArgumentError, GemmaKVError, brief, one_line
from gemmakv.server.apis.fields import Body, Whole
from gemmakv.server.service.errors import RequestError, invalid
from gemmakv.server.service.history import History

_FORMAT = "gemmakv session"
_VERSION = 1
_REASONS = ("stop", "length", "deadline", "cancelled")
_PLACE = re.compile(r"\bmessages\[(\d+)\]")
_USAGE = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "reasoning_tokens",
    "cache_write_tokens",
)
_LATEST = 1e11  # seconds; beyond are other units
Name = Annotated[str, Field(max_length=200)]
# Of characters that end lines or turn the direction of what surrounds them.
_NOT_IN_NAMES = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    "\ufeff\ufff9-\ufffb]"
)


class TurnPart(Body):
    messages: list[dict[str, Any]]
    reply: dict[str, Any]
    finish_reason: str
    basis: str = ""
    whole: bool = True
    tokens: list[Whole] = []
    system: str | None = None
    tools: list[dict[str, Any]] = []
    usage: dict[str, Whole] = {}
    created_at: float | None = None
    digest: Annotated[
        str | None,
        Field(
            description="Of what the turn says and reads, and of the turn "
            "before it. Where it is not what the turn has, or is missing, the "
            "tokens from there on are left out, and the model reads the texts."
        ),
    ] = None


class Rendered(BaseModel):
    """The places of turns whose tokens were left out, by the reason. The next
    turn has the model read their texts.
    """

    edited: Annotated[
        list[int],
        Field(description="Their digest is that of something else."),
    ] = []
    no_digest: list[int] = []
    after_these: Annotated[
        list[int], Field(description="They come after one of those.")
    ] = []
    other_model: Annotated[
        list[int], Field(description="Or another chat template.")
    ] = []


class Document(Body):
    """A session with its turns. The fields are those of `SessionInfo`."""

    format: str
    version: Whole
    turns: list[TurnPart]
    name: Name | None = None
    system: str | None = None
    created_at: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_version(cls, document: Any) -> Any:
        """Refuses what is no document, or a newer one, before its fields."""
        if isinstance(document, dict):
            kind, version = document.get("format"), document.get("version")
            if kind != _FORMAT:
                raise ArgumentError("format", repr(_FORMAT), kind)
            if version != _VERSION:
                raise ArgumentError("version", str(_VERSION), version)
        return document


def checked_name(name: str | None) -> str | None:
    """Gives a session's name, or None for an empty one. Raises RequestError
    for a name that shows nothing, or changes the text around it.
    """
    if not name:
        return None
    bad = _NOT_IN_NAMES.search(name)
    if bad is not None:
        raise invalid(
            "name",
            "expected no control characters nor marks of direction, found "
            f"U+{ord(bad[0]):04X} at {bad.start()}",
        )
    if not any(letter.isprintable() and letter != " " for letter in name):
        raise invalid("name", f"expected a name, found {name!r}")
    return name


def written(session: SessionInfo, turns: list[Turn]) -> Document:
    """Makes the document of a session with its turns and their tokens."""
    parts: list[TurnPart] = []
    for turn in turns:
        part = _written(turn)
        part.digest = _digest(part, parts[-1].digest if parts else None)
        parts.append(part)
    return Document(
        format=_FORMAT,
        version=_VERSION,
        name=session.name,
        system=session.system,
        created_at=session.created,
        turns=parts,
    )


def _written(turn: Turn) -> TurnPart:
    return TurnPart(
        messages=turn.messages,
        reply=turn.reply,
        finish_reason=turn.reason,
        system=turn.system,
        tools=turn.tools,
        usage=turn.usage,
        created_at=turn.created,
        basis=turn.basis,
        whole=turn.whole,
        tokens=turn.tokens.tolist(),
    )


def _digest(part: TurnPart, before: str | None) -> str:
    """Gives the digest of what a turn shows and of what the model reads of
    it. It finds edits, not forgeries: anybody can make a digest.
    """
    said = {
        name: getattr(part, name)
        for name in (
            "messages", "reply", "finish_reason", "basis", "whole", "tokens",
            "system", "tools",
        )
    }  # fmt: skip
    text = json.dumps([before, said], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _rendered(document: Document, basis: str) -> Rendered:
    """Finds the turns whose tokens the model is not to read."""
    found, whole = Rendered(), True
    before: str | None = None
    for i, part in enumerate(document.turns):
        if part.tokens and part.digest is None:
            found.no_digest.append(i)
            whole = False
        elif part.digest is not None and part.digest != _digest(part, before):
            found.edited.append(i)
            whole = False
        elif part.tokens and not whole:
            found.after_these.append(i)
        elif part.tokens and part.basis != basis:
            found.other_model.append(i)
        before = part.digest
    return found


def read(
    document: Document, tenant: str, history: History
) -> tuple[list[Turn], Rendered]:
    """Reads the turns of a document, with new ids, each the parent of the
    next one; and says which of them have lost their tokens.

    Tokens for another model or template, and those of turns that were edited,
    are left out: the next turn then renders the messages. Raises RequestError
    or ValueError that names what is bad.
    """
    service = history.service
    most = service.settings.limits.messages
    count = sum(len(part.messages) + 1 for part in document.turns)
    if count > most:
        raise invalid(
            "turns", f"expected at most {most} messages, found {count}"
        )
    rendered = _rendered(document, history.basis)
    texts = {
        i
        for _, field in rendered
        for i in field
    }
    found: list[Turn] = []
    for i, part in enumerate(document.turns):
        where = f"turns[{i}]"
        parent = found[-1] if found else None
        if part.finish_reason not in _REASONS:
            raise invalid(
                f"{where}.finish_reason",
                f"expected one of {', '.join(_REASONS)}, found "
                + brief(part.finish_reason),
            )
        goes_on = (
            i > 0
            and part.basis == document.turns[i - 1].basis
            and bool(document.turns[i - 1].tokens)
        )
        if not part.whole and not goes_on:
            raise invalid(
                f"{where}.whole", "expected true: no tokens stand before it"
            )
        _check_tokens(part, f"{where}.tokens", history)
        known = bool(part.tokens) and i not in texts
        found.append(
            Turn(
                id=new_id("resp"),
                tenant=tenant,
                parent=None if parent is None else parent.id,
                depth=i + 1,
                created=_created(part, where),
                system=part.system or None,
                tools=_tools(part, where),
                messages=[
                    _kept(one)
                    for one in messages_of(part.messages, f"{where}.messages")
                ],
                reply=_reply(part, where),
                reason=part.finish_reason,
                usage=_usage(part, where),
                basis=part.basis if known else "",
                whole=part.whole or not known,
                tokens=np.array(part.tokens if known else [], np.int32),
            )
        )
    return found, rendered


def _check_tokens(part: TurnPart, where: str, history: History) -> None:
    if not part.tokens or part.basis != history.basis:
        return
    config = history.service.gemma.config
    for token in (min(part.tokens), max(part.tokens)):
        if not 0 <= token < config.vocab_size:
            raise invalid(
                where,
                f"expected token ids in [0, {config.vocab_size}), found "
                + brief(token),
            )
    if part.whole and config.bos_id >= 0 and part.tokens[0] != config.bos_id:
        raise invalid(
            where, f"expected {config.bos_id} first, found {part.tokens[0]}"
        )


def _reply(part: TurnPart, where: str) -> dict[str, Any]:
    try:
        [reply] = messages_of([part.reply], "reply")
    except ValueError as error:
        words = str(error).replace("reply[0]", f"{where}.reply")
        raise RequestError(400, words, param=f"{where}.reply") from None
    if reply.role != "assistant":
        raise invalid(
            f"{where}.reply.role", f"expected 'assistant', found {reply.role!r}"
        )
    return _kept(reply)


def _kept(message: Message) -> dict[str, Any]:
    """Gives the fields of a message as turns have them: one that only calls
    tools has no content.
    """
    found = message.to_dict()
    return {"content": None, **found} if "tool_calls" in found else found


def check_goes_on(
    turns: list[Turn], system: str | None, history: History
) -> None:
    """Raises RequestError, with the place, if the template cannot go on after
    these turns.
    """
    if not turns:
        return
    service, last = history.service, turns[-1]
    calls = last.reply.get("tool_calls") or []
    coming: list[dict[str, Any]] = [
        {
            "role": "tool",
            "content": "A",
            "name": call["function"]["name"],
            "tool_call_id": call.get("id"),
        }
        for call in calls
    ]
    coming = coming or [{"role": "user", "content": "A"}]
    if last.basis == history.basis and last.system == (system or None):
        more = continuation(
            service.prompts.template,
            service.tokenizer,
            messages_of([last.reply])[0],
            messages_of(coming),
            last.tools or None,
        )
        if more is not None:
            return
    said: list[dict[str, Any]] = []
    places: list[str] = []
    if system:
        said.append({"role": "system", "content": system})
        places.append("system")
    for i, turn in enumerate(turns):
        said += [*turn.messages, turn.reply]
        places += [
            f"turns[{i}].messages[{k}]" for k in range(len(turn.messages))
        ]
        places.append(f"turns[{i}].reply")
    places += ["what comes next"] * len(coming)
    try:
        service.gemma.apply_chat_template(
            [*said, *coming],
            tools=last.tools or None,
            template=service.prompts.template,
        )
    except (ValueError, GemmaKVError) as error:
        words = _PLACE.sub(
            lambda at: places[min(int(at[1]), len(places) - 1)],
            one_line(error),
        )
        raise invalid(
            "turns",
            f"the chat template cannot go on from this conversation: {words}",
            code="turns_not_continuable",
        ) from None


def _tools(part: TurnPart, where: str) -> list[dict[str, Any]]:
    try:
        use = tool_use(part.tools)
    except ValueError as error:
        raise RequestError(
            400, f"{where}.{error}", param=f"{where}.tools"
        ) from None
    return [] if use is None else use.tools


def _usage(part: TurnPart, where: str) -> dict[str, int]:
    found = {name: part.usage.get(name, 0) for name in _USAGE}
    for name, count in found.items():
        if not 0 <= count < 1 << 53:
            raise invalid(
                f"{where}.usage.{name}",
                f"expected a number of tokens, found {brief(count)}",
            )
    return found


def _created(part: TurnPart, where: str) -> float:
    if part.created_at is None:
        return time.time()
    if not 0 <= part.created_at < _LATEST:
        raise invalid(
            f"{where}.created_at",
            f"expected seconds since 1970, found {part.created_at:g}",
        )
    return part.created_at
