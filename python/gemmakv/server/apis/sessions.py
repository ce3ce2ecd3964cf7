"""Our own API for sessions, /v1/sessions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Query as QueryField
from pydantic import BaseModel, Field
from starlette.responses import Response

from gemmakv.conversations import SessionInfo, Turn
from gemmakv.server.apis import documents
from gemmakv.server.apis.call import Call, CallDep, JsonResponse
from gemmakv.server.apis.documents import Name, checked_name
from gemmakv.server.apis.fields import Body, Query
from gemmakv.server.apis.kept import kept, owner_in
from gemmakv.server.apis.routing import router
from gemmakv.server.service.errors import RequestError
from gemmakv.server.service.history import FIRST, SPENT, History
from gemmakv.server.service.prompts import TOO_LONG

ROUTER = router()
_LISTED = 1_000  # characters of a `system` in lists
_PATH = "/v1/sessions/{session}"


class CreateBody(Body):
    name: Name | None = None
    system: str | None = None


class ForkBody(Body):
    turn: str | None = None
    name: Name | None = None


class RewindBody(Body):
    turn: str | None


class RenameBody(Body):
    name: Name | None


class ListQuery(Query):
    limit: int = Field(20, ge=1, le=100)
    after: str | None = None


class SessionObject(BaseModel):
    id: str
    object: Literal["session"] = "session"
    name: str | None
    system: Annotated[
        str | None,
        Field(
            description=f"In lists, its first {_LISTED:,} characters at most."
        ),
    ]
    system_length: Annotated[
        int, Field(description="Characters of all of `system`.")
    ]
    head: str | None
    turn_count: int
    created_at: float
    updated_at: float


class ImportedSession(SessionObject):
    rendered: documents.Rendered


class Spent(BaseModel):
    """The tokens that a turn took from the prefix cache, why not all, and the
    time of the turn.
    """

    cached: Annotated[
        dict[str, int],
        Field(description="Tokens of the prompt, by tier."),
    ]
    miss_reason: str | None
    prefill_s: float
    decode_s: float
    first_token_s: Annotated[
        float | None,
        Field(
            description="Seconds from the request to the first token. Null of "
            "turns that are older."
        ),
    ] = None


class TurnObject(BaseModel):
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
        Field(
            description="Null of turns that were taken in, or are older."
        ),
    ]


class SessionWithTurns(SessionObject):
    turns: list[TurnObject]


class SessionList(BaseModel):
    object: Literal["list"] = "list"
    data: list[SessionObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class SessionNode(SessionObject):
    parent: Annotated[
        str | None,
        Field(
            description="The session that this one branches off: the oldest "
            "of those listed that it has the most turns in common with, or, "
            "without any, the one that it was forked from."
        ),
    ]
    parent_turn: Annotated[
        str | None, Field(description="The last turn of both.")
    ]
    parent_turn_count: Annotated[
        int, Field(description="Turns of both.")
    ]


class SessionTree(BaseModel):
    object: Literal["session.tree"] = "session.tree"
    data: list[SessionNode]
    last_id: str | None
    has_more: bool


class SessionDeleted(BaseModel):
    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: bool = True


@ROUTER.post(
    "/v1/sessions", response_model=SessionObject, summary="Makes a session"
)
async def create(call: CallDep, body: CreateBody) -> Response:
    call.takes(body)
    history = kept(call)
    await _check_system(call, body.system)
    found = await history.create(
        owner_in(call), checked_name(body.name), body.system or None
    )
    return JsonResponse(_session(found))


@ROUTER.get(
    "/v1/sessions",
    response_model=SessionList,
    summary="Sessions, the newest first",
)
async def sessions(
    call: CallDep, query: Annotated[ListQuery, QueryField()]
) -> Response:
    history = kept(call)
    found, more = await history.on(
        history.store.sessions.newest, owner_in(call), query.limit, query.after
    )
    return JsonResponse(
        SessionList(
            data=[_session(one, _LISTED) for one in found],
            first_id=found[0].id if found else None,
            last_id=found[-1].id if found else None,
            has_more=more,
        )
    )


@ROUTER.get(
    "/v1/sessions/tree",
    response_model=SessionTree,
    summary="Sessions, the newest first, and what each branches off",
)
async def tree(
    call: CallDep, query: Annotated[ListQuery, QueryField()]
) -> Response:
    history = kept(call)
    found, more = await history.on(
        history.store.sessions.tree, owner_in(call), query.limit, query.after
    )
    return JsonResponse(
        SessionTree(
            data=[
                SessionNode(
                    **_session(one.session, _LISTED).model_dump(),
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


@ROUTER.post(
    "/v1/sessions/import",
    response_model=ImportedSession,
    summary="A session of an exported document",
)
async def take_in(call: CallDep, body: documents.Document) -> Response:
    history = kept(call)
    await _check_system(call, body.system)
    run = call.service.threads.run
    turns, rendered = await run(
        documents.read, body, owner_in(call), history
    )
    await run(documents.check_goes_on, turns, body.system, history)
    found = await history.create(
        owner_in(call), checked_name(body.name), body.system or None, turns
    )
    return JsonResponse(
        ImportedSession(**_session(found).model_dump(), rendered=rendered)
    )


@ROUTER.get(
    _PATH + "/export",
    response_model=documents.Document,
    summary="The session as a document",
)
async def export(call: CallDep, session: str) -> Response:
    history = kept(call)
    found, turns = await with_turns(call, history, session, tokens=True)
    document = await call.service.threads.run(documents.written, found, turns)
    return JsonResponse(document)


@ROUTER.get(
    _PATH,
    response_model=SessionWithTurns,
    summary="The session and its turns",
)
async def retrieve(call: CallDep, session: str) -> Response:
    found, turns = await with_turns(call, kept(call), session)
    return JsonResponse(
        SessionWithTurns(
            **_session(found).model_dump(),
            turns=[_turn(turn) for turn in turns],
        )
    )


@ROUTER.post(_PATH, response_model=SessionObject, summary="Another name")
async def rename(call: CallDep, session: str, body: RenameBody) -> Response:
    call.takes(body)
    history = kept(call)
    found = await history.on(
        history.store.sessions.rename,
        owner_in(call),
        session,
        checked_name(body.name),
    )
    return JsonResponse(_session(found))


@ROUTER.delete(
    _PATH, response_model=SessionDeleted, summary="Deletes the session"
)
async def delete(call: CallDep, session: str) -> Response:
    history = kept(call)
    await history.on(history.store.sessions.delete, owner_in(call), session)
    return JsonResponse(SessionDeleted(id=session))


@ROUTER.post(
    _PATH + "/fork",
    response_model=SessionObject,
    summary="Another session with the same turns",
)
async def fork(call: CallDep, session: str, body: ForkBody) -> Response:
    call.takes(body)
    history = kept(call)
    found = await history.on(
        history.store.sessions.fork,
        owner_in(call),
        session,
        body.turn,
        checked_name(body.name),
    )
    return JsonResponse(_session(found))


@ROUTER.post(
    _PATH + "/rewind",
    response_model=SessionObject,
    summary="Makes a turn the last one; null: there are none any more",
)
async def rewind(call: CallDep, session: str, body: RewindBody) -> Response:
    call.takes(body)
    history = kept(call)
    found = await history.on(
        history.store.sessions.rewind, owner_in(call), session, body.turn
    )
    return JsonResponse(_session(found))


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
    """Raises RequestError for a text that leaves no room in the context."""
    service = call.service
    most = service.context - 1

    def count(text: str) -> tuple[int, str]:
        least = service.tokenizer._at_least(text, most + 1)
        if least > most:
            return least, "at least "
        return len(service.tokenizer.encode(text)), ""

    found, exactly = await service.threads.run_texts(count, system or "")
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
    """Makes the object of a session, with the first `shown` characters of its
    `system`; None: all of them.
    """
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


async def with_turns(
    call: Call, history: History, session: str, tokens: bool = False
) -> tuple[SessionInfo, list[Turn]]:
    def load() -> tuple[SessionInfo, list[Turn]]:
        found = history.store.sessions.get(owner_in(call), session)
        return found, history.store.turns.path(found.head, tokens)

    return await history.on(load)
