"""Our own API: the prefix cache, /v1/cache."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Query as QueryField
from fastapi import Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from gemmakv.cache._prefix import PrefixStats
from gemmakv.conversations import new_id
from gemmakv.errors import CacheFullError, GemmaKVError, one_line
from gemmakv.generation._prefix import ModelPrefixCache, PinnedPrefix
from gemmakv.generation._prompts import TokenArray
from gemmakv.server.apis.call import Call, CallDep, JsonResponse
from gemmakv.server.apis.fields import Body, Query, Salt, Whole
from gemmakv.server.apis.routing import router
from gemmakv.server.service.chat import ChatService
from gemmakv.server.service.errors import RequestError, invalid
from gemmakv.server.service.events import Event
from gemmakv.server.service.requests import ChatRequest, Pin

ROUTER = router()
_MOST_PINS = 64  # of a key


class PromptBody(Body):
    """A prompt or messages."""

    prompt: str | list[Whole] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    model: str | None = None
    cache_salt: Salt | None = None


class ClearQuery(Query):
    tier: str | None = None


class CacheObject(BaseModel):
    object: Literal["cache"] = "cache"
    tiers: list[str]
    ram_bytes: Annotated[int, Field(description="The budget of RAM.")]
    stats: PrefixStats


class MatchObject(BaseModel):
    object: Literal["cache.match"] = "cache.match"
    prompt_tokens: int
    cached_tokens: int


class PinObject(BaseModel):
    id: str
    object: Literal["cache.pin"] = "cache.pin"
    tokens: int
    bytes: int
    created_at: float


class PinList(BaseModel):
    object: Literal["list"] = "list"
    data: list[PinObject]


class PinDeleted(BaseModel):
    id: str
    object: Literal["cache.pin.deleted"] = "cache.pin.deleted"
    deleted: bool = True


class CacheCleared(BaseModel):
    object: Literal["cache.cleared"] = "cache.cleared"
    tiers: list[str]


@ROUTER.get(
    "/v1/cache",
    response_model=CacheObject,
    summary="What the prefix cache has, and did",
)
async def stats(call: CallDep) -> Response:
    prefix = _prefix(call)
    return JsonResponse(
        CacheObject(
            tiers=list(prefix.cache.tiers),
            ram_bytes=prefix.cache.ram,
            stats=prefix.stats(),
        )
    )


@ROUTER.post(
    "/v1/cache/match",
    response_model=MatchObject,
    summary="How many tokens of a prompt need no computing",
)
async def match(call: CallDep, body: PromptBody) -> Response:
    call.takes(body)
    prefix = _prefix(call, body.cache_salt)
    ids = await _ids(call, body)
    found = await call.service.threads.run_waiting(
        lambda: len(prefix.match(ids))
    )
    return JsonResponse(
        MatchObject(prompt_tokens=len(ids), cached_tokens=found)
    )


@ROUTER.post(
    "/v1/cache/pins",
    response_model=PinObject,
    summary="Computes the beginning of prompts, and keeps it in RAM",
)
async def pin(call: CallDep, body: PromptBody) -> Response:
    """Pins a prompt. What the cache lacks of it is computed in the queue, as
    for any request.
    """
    call.takes(body)
    prefix, service = _prefix(call, body.cache_salt), call.service
    owner = call.owner_of(body.cache_salt)
    pins = service.pins.setdefault(owner.label, {})
    if len(pins) >= _MOST_PINS:
        raise _full(f"expected at most {_MOST_PINS} pins, found as many")
    ids = await _ids(call, body, opens=False)
    if len(ids) < 2:
        raise invalid("prompt", f"expected at least 2 tokens, found {len(ids)}")
    await service.run(
        ChatRequest(
            tenant=owner,
            prompts=[ids[:-1].tolist()],
            options={"max_tokens": 0},
            streamed=False,
            arrived=call.arrived,
        ),
        _nothing,
    )
    held = await _held(service, prefix, ids)
    made = Pin(held, time.time())
    share = prefix.cache.ram // len(service.labels)
    used = sum(one.held.nbytes for one in (made, *pins.values()))
    if used > share or len(pins) >= _MOST_PINS:
        held.unpin()
        raise _full(
            f"expected at most {share} bytes, this key's share of the RAM, "
            f"found {used} with this one"
        )
    id = new_id("pin")
    pins[id] = made
    return JsonResponse(_shown(id, made))


@ROUTER.get(
    "/v1/cache/pins",
    response_model=PinList,
    summary="What the key has pinned",
)
async def pins(call: CallDep) -> Response:
    _prefix(call)
    return JsonResponse(
        PinList(data=[_shown(id, one) for id, one in _of(call).items()])
    )


@ROUTER.delete(
    "/v1/cache/pins/{pin}", response_model=PinDeleted, summary="Unpins it"
)
async def unpin(call: CallDep, pin: str) -> Response:
    _prefix(call)
    found = _of(call).pop(pin, None)
    if found is None:
        raise RequestError(
            404,
            f"pin: there is no {pin[:60]!r} among yours",
            param="pin",
            code="pin_not_found",
        )
    found.held.unpin()
    return JsonResponse(PinDeleted(id=pin))


@ROUTER.delete(
    "/v1/cache", response_model=CacheCleared, summary="Forgets everything"
)
async def clear(
    call: CallDep,
    request: Request,
    query: Annotated[ClearQuery, QueryField()],
) -> Response:
    prefix = _prefix(call)
    # What deletes does no more than it was asked for.
    given = request.query_params.multi_items()
    for name, _ in given:
        if name != "tier" or len(given) > 1:
            raise invalid(
                name[:40], "expected ?tier=TIER alone, or nothing after ?"
            )
    tier = query.tier
    service = call.service
    if len(service.labels) > 1:
        raise RequestError(
            403,
            "cache: it is cleared for all keys at once; expected a server of "
            f"one key, found {len(service.labels)}",
            code="cache_is_shared",
        )
    tiers = list(prefix.cache.tiers)
    if tier is not None and tier not in tiers:
        raise invalid(
            "tier", f"expected one of {', '.join(tiers)}, found {tier[:40]!r}"
        )
    try:
        await asyncio.to_thread(prefix.cache.clear, tier)
    except GemmaKVError as error:
        raise RequestError(
            503, one_line(error), code="cache_not_cleared"
        ) from error
    if tier in (None, "ram"):
        _of(call).clear()
    return JsonResponse(
        CacheCleared(tiers=tiers if tier is None else [tier])
    )


def _prefix(call: Call, salt: str | None = None) -> ModelPrefixCache:
    """Gives the key's part of the prefix cache, or its part for a salt.
    Raises RequestError if there is none.
    """
    found = call.owner_of(salt).gemma.prefix_cache
    if found is None:
        raise RequestError(
            400,
            "cache: this server has no prefix cache; it does when started "
            "without --prefix-cache-ram off",
            code="cache_off",
        )
    return found


def _of(call: Call) -> dict[str, Pin]:
    return call.service.pins.get(call.owner.label, {})


def _shown(id: str, pin: Pin) -> PinObject:
    return PinObject(
        id=id,
        tokens=pin.held.tokens,
        bytes=pin.held.nbytes,
        created_at=pin.created,
    )


async def _ids(call: Call, body: PromptBody, opens: bool = True) -> TokenArray:
    """Gives the token ids of a request with that prompt or these messages. If
    no reply `opens`, gives what all conversations that begin with these
    messages have in common.
    """
    call.check_model(body.model)
    service = call.service
    service.prompts.check_writes()
    if (body.prompt is None) == (body.messages is None):
        found = "none" if body.prompt is None else "both"
        raise invalid("prompt", f"expected it or messages, found {found}")
    if body.prompt is not None:
        if body.tools:
            raise invalid("tools", "expected messages with them")
        ids = await service.threads.run(
            service.prompts.text_ids, body.prompt, False, True
        )
    else:
        messages = body.messages or []
        last = messages[-1].get("role") if messages else None
        if opens or last in (None, "user"):
            ids = await service.prompts.chat_ids(
                messages, body.tools, fits=True
            )
        else:
            ids = await _common(service, messages, body.tools)
    service.prompts.check_length(len(ids), body.prompt is None)
    return ids


async def _common(
    service: ChatService,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
) -> TokenArray:
    one, two = [
        await service.prompts.chat_ids(
            [*messages, {"role": "user", "content": text}], tools
        )
        for text in ("A", "0")
    ]
    length = min(len(one), len(two))
    differs = np.flatnonzero(one[:length] != two[:length])
    return one[: int(differs[0])] if len(differs) else one[:length]


async def _nothing(event: Event) -> None:
    del event


async def _held(
    service: ChatService, prefix: ModelPrefixCache, ids: TokenArray
) -> PinnedPrefix:
    """Makes a pin, and ends it if the client goes away meanwhile."""
    work = asyncio.ensure_future(
        service.threads.run_waiting(_pinned, prefix, ids)
    )
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        work.add_done_callback(_let_go)
        raise


def _let_go(work: asyncio.Future[PinnedPrefix]) -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().unpin()


def _pinned(prefix: ModelPrefixCache, ids: TokenArray) -> PinnedPrefix:
    try:
        return prefix.pin(ids)
    except CacheFullError as error:
        raise _full(one_line(error)) from None


def _full(what: str) -> RequestError:
    return RequestError(409, f"pin: {what}", code="pins_full")
