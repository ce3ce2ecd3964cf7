"""OpenAI's API: conversations, which are the sessions that the server keeps.

Items of a conversation are those of its turns, and then those that were added
and have no reply so far. The next turn reads these first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import Query as QueryField
from pydantic import Field
from starlette.datastructures import QueryParams
from starlette.responses import Response
from typing_extensions import TypedDict

from gemmakv.chat._messages import messages_of
from gemmakv.conversations import Pending, SessionInfo, new_id
from gemmakv.server.apis.call import Call, CallDep, JsonResponse
from gemmakv.server.apis.fields import Body
from gemmakv.server.apis.kept import kept, owner_in
from gemmakv.server.apis.response_input import InputMessages
from gemmakv.server.apis.response_items import (
    custom_calls_of,
    input_items_of,
    output_items_of,
    with_parts,
)
from gemmakv.server.apis.responses import (
    ItemList,
    ItemsQuery,
    listed,
    page_of,
)
from gemmakv.server.apis.routing import router
from gemmakv.server.apis.sessions import with_turns
from gemmakv.server.service.errors import (
    RequestError,
    error_of_value,
    invalid,
    unexpected,
)

ROUTER = router()
_PATH = "/v1/conversations/{conversation}"
_ITEMS = _PATH + "/items"
_ITEM = _ITEMS + "/{item}"
_NAMES = {"session": "conversation_id"}
# What ids of items begin with, by the items' types.
_PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc",
    "function_call_output": "fco", "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco", "compaction": "cmp",
}  # fmt: skip

Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    Field(max_length=16),
]
Items = Annotated[list[dict[str, Any]], Field(max_length=20)]


class ConversationCreateBody(Body):
    items: Items | None = None
    metadata: Metadata | None = None


class ConversationUpdateBody(Body):
    metadata: Metadata | None


class ItemCreateBody(Body):
    items: Items


class Conversation(TypedDict):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(TypedDict):
    id: str
    object: Literal["conversation.deleted"]
    deleted: bool


@ROUTER.post(
    "/v1/conversations",
    response_model=Conversation,
    summary="Makes a conversation, which is a session",
)
async def create(call: CallDep, body: ConversationCreateBody) -> Response:
    call.takes(body)
    history = kept(call)
    items = _new_items(call, body.items or [])
    found = await history.create(
        owner_in(call),
        None,
        None,
        metadata=body.metadata or None,
        pending=_pending(items),
    )
    return JsonResponse(_shown(found))


@ROUTER.get(_PATH, response_model=Conversation, summary="A conversation")
async def retrieve(call: CallDep, conversation: str) -> Response:
    history = kept(call)
    call.names = _NAMES
    found = await history.on(
        history.store.sessions.get, owner_in(call), conversation
    )
    return JsonResponse(_shown(found))


@ROUTER.post(_PATH, response_model=Conversation, summary="Other metadata")
async def update(
    call: CallDep, conversation: str, body: ConversationUpdateBody
) -> Response:
    call.takes(body)
    history = kept(call)
    call.names = _NAMES
    found = await history.on(
        history.store.sessions.annotate,
        owner_in(call),
        conversation,
        body.metadata or None,
    )
    return JsonResponse(_shown(found))


@ROUTER.delete(
    _PATH,
    response_model=ConversationDeleted,
    summary="Deletes the conversation with its items",
)
async def delete(call: CallDep, conversation: str) -> Response:
    history = kept(call)
    call.names = _NAMES
    await history.on(
        history.store.sessions.delete, owner_in(call), conversation
    )
    found: ConversationDeleted = {
        "id": conversation,
        "object": "conversation.deleted",
        "deleted": True,
    }
    return JsonResponse(found)


@ROUTER.get(
    _ITEMS, response_model=ItemList, summary="What was said, as items"
)
async def items(
    call: CallDep,
    conversation: str,
    query: Annotated[ItemsQuery, QueryField()],
) -> Response:
    _note_include(call)
    _, found = await _with_items(call, conversation)
    return JsonResponse(page_of(found, query))


@ROUTER.post(
    _ITEMS,
    response_model=ItemList,
    summary="Adds items, which the next response reads",
)
async def add_items(
    call: CallDep, conversation: str, body: ItemCreateBody
) -> Response:
    call.takes(body)
    history = kept(call)
    call.names = _NAMES
    new = _new_items(call, body.items)
    _note_include(call)
    most = call.settings.limits.messages

    def add(pending: Pending | None) -> Pending | None:
        items = [*_items_in(pending), *new]
        if len(items) > most:
            raise invalid(
                "items",
                f"expected at most {most} that have no reply so far, found "
                f"{len(items)}",
            )
        return _pending(items)

    await history.on(
        history.store.sessions.change_pending,
        owner_in(call),
        conversation,
        add,
    )
    return JsonResponse(listed(new, False))


@ROUTER.get(_ITEM, response_model=dict[str, Any], summary="One item")
async def retrieve_item(
    call: CallDep, conversation: str, item: str
) -> Response:
    _note_include(call)
    _, found = await _with_items(call, conversation)
    return JsonResponse(_item_of(found, item))


@ROUTER.delete(
    _ITEM,
    response_model=Conversation,
    summary="Deletes an item that has no reply so far",
)
async def delete_item(
    call: CallDep, conversation: str, item: str
) -> Response:
    history = kept(call)
    _, found = await _with_items(call, conversation)
    _item_of(found, item)

    def remove(pending: Pending | None) -> Pending | None:
        before = _items_in(pending)
        after = [one for one in before if one["id"] != item]
        if len(after) == len(before):
            raise invalid(
                "item_id",
                "expected an item that has no reply so far: what the model "
                "has read, and what it replied, is never changed",
                code="item_has_reply",
            )
        return _pending(after)

    changed = await history.on(
        history.store.sessions.change_pending,
        owner_in(call),
        conversation,
        remove,
    )
    return JsonResponse(_shown(changed))


def _shown(session: SessionInfo) -> Conversation:
    return {
        "id": session.id,
        "object": "conversation",
        "created_at": int(session.created),
        "metadata": session.metadata or {},
    }


async def _with_items(
    call: Call, conversation: str
) -> tuple[SessionInfo, list[dict[str, Any]]]:
    """Gives the session, and its items, the oldest first."""
    history = kept(call)
    call.names = _NAMES
    session, turns = await with_turns(call, history, conversation)
    found: list[dict[str, Any]] = []
    custom = custom_calls_of(turns)
    for turn in turns:
        found += input_items_of(turn, custom)
        found += output_items_of(turn)
    return session, found + _items_in(session.pending)


def _items_in(pending: Pending | None) -> list[dict[str, Any]]:
    return [] if pending is None else pending["items"]


def _item_of(found: Sequence[dict[str, Any]], id: str) -> dict[str, Any]:
    for one in found:
        if one["id"] == id:
            return one
    raise RequestError(
        404,
        f"item_id: there is no {id[:60]!r} in this conversation",
        param="item_id",
        code="item_not_found",
    )


def _new_items(
    call: Call, given: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Makes items of a conversation of what a request has. Raises
    RequestError for what no response could read.
    """
    read = InputMessages()
    found = []
    for i, item in enumerate(given):
        where = f"items[{i}]"
        if item.get("type") == "item_reference":
            raise unexpected(f"{where}.type", "an item itself", item["type"])
        read.take(item, where)
        found.append(_new_item(item))
    call.names = {**call.names, **read.names}
    call.ignored = [*call.ignored, *read.ignored]
    if read.messages:
        try:
            messages_of(read.messages)
        except ValueError as error:
            raise error_of_value(error) from None
    return found


def _new_item(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("type") or "message"
    if kind == "message":
        given = with_parts(given)
    said = {name: value for name, value in given.items() if value is not None}
    id = new_id(_PREFIXES.get(kind, "item"))
    return {"status": "completed", **said, "id": id, "type": kind}


def _pending(items: list[dict[str, Any]]) -> Pending | None:
    """Makes items as a session keeps them."""
    read = InputMessages()
    for item in items:
        read.take(item, "items")
    return {"items": items, "messages": read.messages} if items else None


def _note_include(call: Call) -> None:
    """Notes that `include` is ignored: items are always whole."""
    asked = QueryParams(call.scope["query_string"])
    if any(name in ("include", "include[]") for name in asked):
        call.ignored = [*call.ignored, "include"]
