"""Our own API: conversations that outlive a request, /v1/sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from gemmakv.conversations import SessionInfo, Turn, new_id
from gemmakv.server.apis import documents
from gemmakv.server.apis.documents import Name, checked_name
from gemmakv.server.apis.http import Call
from gemmakv.server.service.chat import TOO_LONG, ChatService
from gemmakv.server.service.errors import RequestError, invalid
from gemmakv.server.service.history import FIRST, SPENT, History
from gemmakv.server.service.requests import Past

_LISTED = 1_000  # characters of a `system` in lists


class CreateBody(msgspec.Struct):
    name: Name | None = None
    system: str | None = None


class ForkBody(msgspec.Struct):
    turn: str | None = None
    name: Name | None = None


class RewindBody(msgspec.Struct):
    turn: str | None


class RenameBody(msgspec.Struct):
    name: Name | None


class ListQuery(msgspec.Struct, kw_only=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    after: str | None = None


class SessionObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["session"] = "session"
    name: str | None
    system: Annotated[
        str | None,
        msgspec.Meta(
            description=f"In lists, its first {_LISTED:,} characters at most."
        ),
    ]
    system_length: Annotated[
        int, msgspec.Meta(description="Characters of all of `system`.")
    ]
    head: str | None
    turn_count: int
    created_at: float
    updated_at: float


class ImportedSession(SessionObject, kw_only=True):
    rendered: documents.Rendered


class Spent(msgspec.Struct, kw_only=True):
    """What a turn took of the prefix cache, why that was not all, and time."""

    cached: Annotated[
        dict[str, int],
        msgspec.Meta(description="Tokens of the prompt, by tier."),
    ]
    miss_reason: str | None
    prefill_s: float
    decode_s: float
    first_token_s: Annotated[
        float | None,
        msgspec.Meta(
            description="Seconds from the request to the first token. Null of "
            "turns that are older."
        ),
    ] = None


class TurnObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["turn"] = "turn"
    parent: str | None
    created_at: float
    messages: list[dict[str, Any]]
    reply: dict[str, Any]
    tools: list[dict[str, Any]]
    finish_reason: str
    usage: dict[str, int]
    spent: Annotated[
        Spent | None,
        msgspec.Meta(
            description="Null of turns that were taken in, or are older."
        ),
    ]


class SessionWithTurns(SessionObject, kw_only=True):
    turns: list[TurnObject]


class SessionList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[SessionObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class SessionNode(SessionObject, kw_only=True):
    parent: Annotated[
        str | None,
        msgspec.Meta(
            description="The session that this one branches off: the oldest "
            "of those listed that it has the most turns in common with, or, "
            "without any, the one that it was forked from."
        ),
    ]
    parent_turn: Annotated[
        str | None, msgspec.Meta(description="The last turn of both.")
    ]
    parent_turn_count: Annotated[
        int, msgspec.Meta(description="Turns of both.")
    ]


class SessionTree(msgspec.Struct, kw_only=True):
    object: Literal["session.tree"] = "session.tree"
    data: list[SessionNode]
    last_id: str | None
    has_more: bool


class SessionDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: bool = True


async def create(call: Call) -> None:
    history = kept(call)
    body, _ = await call.json(CreateBody)
    await _check_system(call, body.system)
    found = await history.create(
        owner(call), checked_name(body.name), body.system or None
    )
    await call.answer(_session(found))


async def sessions(call: Call) -> None:
    history = kept(call)
    query = call.query_of(ListQuery)
    found, more = await history.on(
        history.store.sessions.newest, owner(call), query.limit, query.after
    )
    await call.answer(
        SessionList(
            data=[_session(one, _LISTED) for one in found],
            first_id=found[0].id if found else None,
            last_id=found[-1].id if found else None,
            has_more=more,
        )
    )


async def tree(call: Call) -> None:
    history = kept(call)
    query = call.query_of(ListQuery)
    found, more = await history.on(
        history.store.sessions.tree, owner(call), query.limit, query.after
    )
    await call.answer(
        SessionTree(
            data=[
                SessionNode(
                    **msgspec.structs.asdict(_session(one.session, _LISTED)),
                    parent=one.parent,
                    parent_turn=one.turn,
                    parent_turn_count=one.turns,
                )
                for one in found
            ],
            last_id=found[-1].session.id if found else None,
            has_more=more,
        )
    )


async def session(call: Call) -> None:
    history = kept(call)
    found, turns = await _with_turns(call, history)
    await call.answer(
        SessionWithTurns(
            **msgspec.structs.asdict(_session(found)),
            turns=[_turn(turn) for turn in turns],
        )
    )


async def rename(call: Call) -> None:
    history = kept(call)
    body, _ = await call.json(RenameBody)
    found = await history.on(
        history.store.sessions.rename,
        owner(call),
        _id(call),
        checked_name(body.name),
    )
    await call.answer(_session(found))


async def fork(call: Call) -> None:
    history = kept(call)
    body, _ = await call.json(ForkBody)
    found = await history.on(
        history.store.sessions.fork,
        owner(call),
        _id(call),
        body.turn,
        checked_name(body.name),
    )
    await call.answer(_session(found))


async def rewind(call: Call) -> None:
    history = kept(call)
    body, _ = await call.json(RewindBody)
    found = await history.on(
        history.store.sessions.rewind, owner(call), _id(call), body.turn
    )
    await call.answer(_session(found))


async def delete(call: Call) -> None:
    history = kept(call)
    await history.on(history.store.sessions.delete, owner(call), _id(call))
    await call.answer(SessionDeleted(id=_id(call)))


async def export(call: Call) -> None:
    history = kept(call)
    found, turns = await _with_turns(call, history, tokens=True)
    document = await history.in_pool(documents.written, found, turns)
    await call.answer(document)


async def take_in(call: Call) -> None:
    history = kept(call)
    body, _ = await call.json(documents.Document, documents.check_version)
    await _check_system(call, body.system)
    turns, rendered = await history.in_pool(
        documents.read, body, owner(call), history
    )
    await history.in_pool(documents.check_goes_on, turns, body.system, history)
    found = await history.create(
        owner(call), checked_name(body.name), body.system or None, turns
    )
    await call.answer(
        ImportedSession(
            **msgspec.structs.asdict(_session(found)), rendered=rendered
        )
    )


def kept(call: Call, param: str | None = None) -> History:
    """The conversations, which the field `param` asks for. Raises
    RequestError if none are kept.
    """
    found = history_of(call.chat)
    if found is None:
        raise RequestError(
            400,
            f"{param or 'sessions'}: this server keeps no conversations; it "
            "does when started with --sessions DIR",
            param=param,
            code="sessions_off",
        )
    return found


def history_of(service: ChatService) -> History | None:
    return service.keeper if isinstance(service.keeper, History) else None


def owner(call: Call) -> str:
    return kept(call).owner(call.owner)


def past_of(
    call: Call,
    session: str | None,
    system: str | None = None,
    replaces: str | None = None,
) -> Past | None:
    """Of a request with a `session`; None without. `system` is what the model
    is told instead of the session's.
    """
    if session is None:
        if replaces is not None:
            raise invalid("replaces", "expected a session with it, found none")
        return None
    kept(call, "session")
    return Past(new_id("resp"), session, system=system, replaces=replaces)


def named(past: Past | None) -> dict[str, Any]:
    """The field of an answer that says where the conversation is now."""
    if past is None:
        return {}
    return {"session": {"id": past.session, "turn": past.id}}


def _turn(turn: Turn) -> TurnObject:
    return TurnObject(
        id=turn.id,
        parent=turn.parent,
        created_at=turn.created,
        messages=turn.messages,
        reply=turn.reply,
        tools=turn.tools,
        finish_reason=turn.reason,
        usage=turn.usage,
        spent=(
            Spent(**spent, first_token_s=turn.params.get(FIRST))
            if (spent := turn.params.get(SPENT))
            else None
        ),
    )


async def _check_system(call: Call, system: str | None) -> None:
    """Raises RequestError for one that leaves no room in the context."""
    service = call.chat
    most = service.context - 1

    def count(text: str) -> tuple[int, str]:
        least = service.tokenizer._at_least(text, most + 1)
        if least > most:
            return least, "at least "
        return len(service.tokenizer.encode(text)), ""

    found, exactly = await service.on_texts(count, system or "")
    if found > most:
        raise RequestError(
            400,
            f"system: expected at most {most} tokens, since the context has "
            f"{most + 1}, found {exactly}{found}",
            param="system",
            code=TOO_LONG,
            more={"n_prompt_tokens": found, "n_ctx": most + 1},
        )


def _session(session: SessionInfo, shown: int | None = None) -> SessionObject:
    """With as many characters of `system`; None: all."""
    system = session.system or ""
    return SessionObject(
        id=session.id,
        name=session.name,
        system=system[:shown] or None,
        system_length=len(system),
        head=session.head,
        turn_count=session.turns,
        created_at=session.created,
        updated_at=session.updated,
    )


async def _with_turns(
    call: Call, history: History, tokens: bool = False
) -> tuple[SessionInfo, list[Turn]]:
    def load() -> tuple[SessionInfo, list[Turn]]:
        found = history.store.sessions.get(owner(call), _id(call))
        return found, history.store.turns.path(found.head, tokens)

    return await history.on(load)


def _id(call: Call) -> str:
    params: Mapping[str, str] = call.scope["path_params"]
    return params["session"]
