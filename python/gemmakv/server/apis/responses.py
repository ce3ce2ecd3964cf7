"""OpenAI's API: responses, whose ids later requests go on from."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import Query as QueryField
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from gemmakv.chat._tools import CallPart
from gemmakv.conversations import KEPT, Turn, new_id
from gemmakv.generation._result import ToolCall
from gemmakv.server.apis.call import Call, CallDep, JsonResponse
from gemmakv.server.apis.fields import Body, OptionsBody, Query, Salt, Whole
from gemmakv.server.apis.kept import history_of, kept, owner_in
from gemmakv.server.apis.logprobs import Logprobs, has_logprob
from gemmakv.server.apis.openai import seed_of
from gemmakv.server.apis.response_input import (
    COMPACTED,
    format_of,
    messages_in,
    shifted,
    think_of,
)
from gemmakv.server.apis.response_items import (
    CUSTOM,
    call_item,
    custom_calls_of,
    custom_item,
    document_of,
    document_of_turn,
    input_items_of,
    items_of,
    message_id,
    message_item,
    output_items_of,
    past_of_turn,
    said_in,
    shown_tool,
    status_of,
    text_part,
    thought_item,
    usage_of,
    with_parts,
    without_bytes,
)
from gemmakv.server.apis.routing import router, streams
from gemmakv.server.apis.streams import (
    COMMENT,
    SSE,
    EventStream,
    Pieces,
    Reply,
    answer,
    sse,
)
from gemmakv.server.apis.tools import read_tools, text_of
from gemmakv.server.service.errors import (
    RequestError,
    invalid,
    refuse_others,
    unexpected,
)
from gemmakv.server.service.events import (
    Called,
    Ended,
    Event,
    Finished,
    Started,
    Token,
)
from gemmakv.server.service.history import DROPPED
from gemmakv.server.service.requests import ChatRequest, Past

ROUTER = router()
_SUM_UP = (
    "Sum up this conversation so far for somebody who goes on with it: what "
    "was asked, found, decided and done, and what is still open."
)
_SUMMARY_TOKENS = 512
_LOGPROBS = "message.output_text.logprobs"
_NAMES = {
    "max_tokens": "max_output_tokens", "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}  # fmt: skip
_ID = {"previous_response_id": "response_id"}
_PATH = "/v1/responses/{response}"
# The ids of items have that of their turn, but for calls.
_TURN_OF_ITEM = re.compile("^[a-z]+_([0-9A-Za-z]+)(_.*)?$")


class ResponseFields(Body):
    unsupported = {"prompt": (), "messages": (), "response_format": ()}

    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    session: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None


class InputTokensBody(ResponseFields):
    """The body of a count. Its `max_output_tokens`, which OpenAI has not, says
    how much room `truncation` makes.
    """

    input: str | list[dict[str, Any]] | None = None
    max_output_tokens: Whole | None = None


class CompactBody(ResponseFields):
    input: str | list[dict[str, Any]] | None = None


class Compaction(TypedDict):
    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponsesBody(ResponseFields, OptionsBody):
    input: str | list[dict[str, Any]]
    stream: bool | None = None
    store: bool | None = None
    max_output_tokens: Whole | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    top_logprobs: Whole | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    seed: Whole | None = None
    cache_salt: Salt | None = None


class ItemsQuery(Query):
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class ItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class RetrieveQuery(Query):
    stream: bool | None = None
    starting_after: int | None = Field(None, ge=0)


@ROUTER.post(
    "/v1/responses",
    response_model=dict[str, Any],
    responses=streams(SSE),
    summary="OpenAI's responses",
)
async def create(call: CallDep, body: ResponsesBody) -> Response:
    call.takes(body)
    call.check_model(body.model)
    options = body.options()
    for name in ("logprobs", "top_logprobs"):
        options.pop(name, None)
    if body.max_output_tokens is not None:
        options["max_tokens"] = body.max_output_tokens
    if body.seed is not None:
        options["seed"] = seed_of(body.seed)
    wants_logprobs = bool(body.top_logprobs) or _LOGPROBS in (
        body.include or ()
    )
    if wants_logprobs:
        options["logprobs"] = True
        options["top_logprobs"] = body.top_logprobs or 0
    keeps = history_of(call.service) is not None and body.store is not False
    past = _past(
        call,
        body,
        {"store": body.store},
        keeps,
        _echo(call, body, options),
    )
    given = await _resolve(call, body.input)
    request, names = _request(call, body, given, past, options)
    request = dataclasses.replace(
        request, tenant=call.owner_of(body.cache_salt)
    )
    shape = _Response(call, past, wants_logprobs)
    if body.max_output_tokens is None:  # its name in the other routes
        del names["max_tokens"]
    call.names = names
    return await answer(call, request, shape, body.stream)


@ROUTER.post(
    "/v1/responses/input_tokens",
    response_model=InputTokens,
    summary="The tokens that a response would read",
)
async def input_tokens(call: CallDep, body: InputTokensBody) -> Response:
    call.takes(body)
    call.check_model(body.model)
    past = _past(call, body, {}, False, {})
    options = {}
    if body.max_output_tokens is not None:
        options["max_tokens"] = body.max_output_tokens
    given = await _resolve(call, body.input or "")
    request, names = _request(call, body, given, past, options)
    call.names = names
    count = await call.service.count(request)
    call.service.prompts.check_length(count, True)
    found: InputTokens = {
        "object": "response.input_tokens",
        "input_tokens": count,
    }
    return JsonResponse(found)


@ROUTER.post(
    "/v1/responses/compact",
    response_model=Compaction,
    summary="A conversation in fewer tokens, which the model sums up",
)
async def compact(call: CallDep, body: CompactBody) -> Response:
    """Keeps the user's messages as they are, and sums up the rest, in an item
    that this server reads in the input of a response.
    """
    call.takes(body)
    call.check_model(body.model)
    past = _past(call, body, {}, False, {})
    given = await _resolve(call, body.input or [])
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    asked = [*given, {"role": "user", "content": _SUM_UP}]
    request, names = _request(call, body, asked, past, {})
    request = dataclasses.replace(
        request, tools=None, tool_choice=None, truncate=True, streamed=False,
        options={"max_tokens": _SUMMARY_TOKENS},
    )  # fmt: skip
    call.names = names
    reply = Reply()
    await call.service.run(request, reply.take)
    id = past.id.removeprefix("resp_")
    summary = {
        "id": f"cmp_{id}",
        "type": "compaction",
        "encrypted_content": COMPACTED + reply.texts.get(0, ""),
    }
    said = [
        item
        for item in given
        if item.get("role") == "user" and item.get("content")
    ]
    found: Compaction = {
        "id": past.id,
        "object": "response.compaction",
        "created_at": int(past.created),
        "output": [
            {"id": f"msg_{id}_{i}", "status": "completed", **item,
             "type": "message"}
            for i, item in enumerate(map(with_parts, said))
        ] + [summary],
        "usage": usage_of(_counted(reply.usage)),
    }  # fmt: skip
    return JsonResponse(found)


@ROUTER.get(
    _PATH + "/input_items",
    response_model=ItemList,
    summary="What a kept response was given",
)
async def input_items(
    call: CallDep, response: str, query: Annotated[ItemsQuery, QueryField()]
) -> Response:
    """Lists the input of a response, and before it the input and the output of
    the responses that it follows.
    """
    history = kept(call)
    call.names = _ID
    line = await history.on(
        history.store.turns.line, owner_in(call), response
    )
    items: list[dict[str, Any]] = []
    custom = custom_calls_of(line)
    for turn in line:
        items += input_items_of(turn, custom)
        if turn is not line[-1]:
            items += output_items_of(turn)
    return JsonResponse(page_of(items, query))


def page_of(items: list[dict[str, Any]], query: ItemsQuery) -> ItemList:
    """Makes a page of items, of which the oldest stands first."""
    if query.order == "desc":
        items = items[::-1]
    if query.after is not None:
        places = [i for i, one in enumerate(items) if one["id"] == query.after]
        if not places:
            raise invalid(
                "after",
                f"expected the id of an item, found {query.after[:60]!r}",
            )
        items = items[places[0] + 1 :]
    return listed(items[: query.limit], len(items) > query.limit)


def listed(shown: list[dict[str, Any]], more: bool) -> ItemList:
    """Makes a page that shows these items."""
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": more,
    }


async def _resolve(
    call: Call, given: str | list[dict[str, Any]]
) -> str | list[dict[str, Any]]:
    """Gives the items of a request, with kept items in place of references.
    Raises RequestError for a reference to an item that is not kept.
    """
    if isinstance(given, str):
        return given
    found = []
    for i, item in enumerate(given):
        if item.get("type") == "item_reference":
            item = await _kept_item(call, str(item.get("id")), f"input[{i}]")
        found.append(item)
    return found


async def _kept_item(call: Call, id: str, where: str) -> dict[str, Any]:
    history = history_of(call.service)
    turn_id = _TURN_OF_ITEM.sub(r"resp_\1", id)
    if history is not None:
        with contextlib.suppress(RequestError):
            turn = await history.on(
                history.store.turns.get, owner_in(call), turn_id
            )
            given = input_items_of(turn, custom_calls_of([turn]))
            for item in (*given, *output_items_of(turn)):
                if item["id"] == id:
                    return item
    raise invalid(
        f"{where}.id",
        f"expected the id of an item that this server keeps, found {id[:60]!r}",
        code="item_not_found",
    )


def _request(
    call: Call,
    body: ResponseFields,
    given: str | list[dict[str, Any]],
    past: Past,
    options: dict[str, Any],
) -> tuple[ChatRequest, dict[str, str]]:
    """Makes the request to the service, and the client's names of its fields.
    Raises RequestError.
    """
    refuse_others("text", body.text, ("format", "verbosity"))
    format = (body.text or {}).get("format")
    if format is not None:
        options = {**options, "response_format": format_of(format)}
    read = messages_in(given)
    messages, names = read.messages, read.names
    tools = read_tools(body.tools, body.tool_choice, flat=True)
    if tools.custom:
        past.params[CUSTOM] = sorted(tools.custom)
    call.ignored = [*call.ignored, *read.ignored, *tools.ignored]
    followed: Past | None = past
    if past.parent is None and past.session is None and past.keep is None:
        if body.instructions:
            system = {"role": "system", "content": body.instructions}
            messages = [system, *messages]
            names = shifted(names)
        followed = None
    request = ChatRequest(
        tenant=call.owner,
        messages=messages,
        past=followed,
        options=options,
        tools=tools.functions,
        tool_choice=tools.choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        think=think_of(call, body.reasoning),
        truncate=body.truncation == "auto",
        arrived=call.arrived,
        not_enforced=tools.not_enforced,
    )
    names |= _NAMES | tools.names
    if body.conversation is not None:
        names["session"] = "conversation"
    return request, names


@ROUTER.get(
    _PATH,
    response_model=dict[str, Any],
    responses=streams(SSE),
    summary="A response that is kept",
)
async def retrieve(
    call: CallDep,
    response: str,
    query: Annotated[RetrieveQuery, QueryField()],
) -> Response:
    history = kept(call)
    if query.starting_after is not None and not query.stream:
        raise invalid(
            "starting_after",
            f"expected stream=true with it, found {query.starting_after} "
            "without",
        )
    call.names = _ID
    turn = await history.on(history.store.turns.get, owner_in(call), response)
    if not query.stream:
        return JsonResponse(document_of_turn(call, turn))
    shape = _Response(call, past_of_turn(turn), False)

    async def write(pieces: Pieces) -> bytes:
        await pieces.write(shape.replay(turn, query.starting_after))
        return b""

    return EventStream(call, shape, write)


@ROUTER.delete(
    _PATH, response_model=dict[str, Any], summary="Forgets a response"
)
async def delete(call: CallDep, response: str) -> Response:
    history = kept(call)
    call.names = _ID
    await history.on(
        history.store.turns.delete_response, owner_in(call), response
    )
    return JsonResponse(
        {"id": response, "object": "response", "deleted": True}
    )


def _past(
    call: Call,
    body: ResponseFields,
    asks: Mapping[str, object],
    keeps: bool,
    params: dict[str, Any],
) -> Past:
    """Gives the past of a request. `asks` has other fields that need a server
    which keeps conversations, if they are true; with `keeps` the turn is kept.
    Raises RequestError.
    """
    session = body.session
    if body.conversation is not None:
        if session is not None:
            raise unexpected("session", "none with conversation", session)
        session = _conversation(body.conversation)
    if session is not None and body.previous_response_id is not None:
        raise unexpected(
            "previous_response_id",
            "none with a conversation",
            body.previous_response_id,
        )
    asked = {
        **asks,
        "session": body.session,
        "conversation": body.conversation,
        "previous_response_id": body.previous_response_id,
    }
    for name, value in asked.items():
        if value:
            kept(call, name)
    if session is not None and asks.get("store") is False:
        raise invalid("store", "expected true with a conversation, found false")
    params |= {"store": keeps, "session": session}
    return Past(
        id=new_id("resp"),
        session=session,
        parent=body.previous_response_id,
        system=body.instructions,
        keep=KEPT if keeps else None,
        params=params,
    )


def _conversation(given: str | dict[str, Any]) -> str:
    id = given.get("id") if isinstance(given, dict) else given
    if not isinstance(id, str):
        raise unexpected("conversation", "the id of a session", given)
    return id


def _echo(
    call: Call, body: ResponsesBody, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Gives the fields of the request that answers repeat."""
    defaults = {"temperature": 1.0, "top_p": 1.0, **call.service.defaults}
    defaults |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, **options}
    names = (
        "temperature", "top_p", "presence_penalty", "frequency_penalty",
    )  # fmt: skip
    return {
        **{name: defaults[name] for name in names},
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        "tools": [
            shown_tool(tool)
            for tool in body.tools or ()
            if tool.get("type") in ("function", "custom")
        ],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": body.text or {"format": {"type": "text"}},
        "metadata": body.metadata or {},
        "truncation": body.truncation or "disabled",
        "top_logprobs": body.top_logprobs or 0,
        "prompt_cache_key": body.prompt_cache_key,
        "user": body.user,
    }


def _counted(ended: Ended) -> dict[str, int]:
    """Gives the counts of a request's tokens, as a turn keeps them."""
    return {
        "prompt_tokens": ended.prompt_tokens,
        "completion_tokens": ended.completion_tokens,
        "cached_tokens": ended.cached_tokens,
        "cache_write_tokens": ended.cache_write_tokens,
        "reasoning_tokens": ended.reasoning_tokens,
    }


class _Response:
    """The shape of an answer, and of a response that is over."""

    media_type = SSE
    ping = COMMENT

    def __init__(self, call: Call, past: Past, logprobs: bool) -> None:
        self._call = call
        self._past = past
        self._params = dict(past.params)
        self._logprobs = Logprobs(call.service.tokenizer) if logprobs else None
        self._number = 0
        self._after = -1  # events up to this number are not told
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item that grows
        self._entries: list[Any] = []  # of tokens without text so far
        self._reason = "stop"
        self._arguments = ""  # of a custom tool whose call grows

    def frames(self, event: Event) -> bytes:
        if isinstance(event, Started):
            self._params[DROPPED] = event.dropped_messages
            return self._opening()
        if isinstance(event, Token):
            return self._token(event)
        if isinstance(event, Called):
            return self._called(event.part)
        if isinstance(event, Finished):
            return self._finish(event.reason)
        assert isinstance(event, Ended)
        return self._ending(_counted(event))

    def replay(self, turn: Turn, after: int | None) -> bytes:
        """Makes the stream of a response that is over, its texts in one piece,
        without the events up to number `after`.
        """
        self._after = -1 if after is None else after
        reply = turn.reply
        frames = self._opening()
        texts = {"reasoning": reply.get("reasoning") or ""}
        frames += self._token(Token(0, "", -1, None, None, **texts))
        text = said_in(turn)
        frames += self._token(Token(0, text, -1, None, None))
        for i, call in enumerate(reply.get("tool_calls") or ()):
            function = call["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            end = ToolCall(call["id"], function["name"], function["arguments"])
            start = (end.id, end.name)
            frames += self._called(CallPart(i, start, arguments, end))
        return frames + self._finish(turn.reason) + self._ending(turn.usage)

    def _opening(self) -> bytes:
        return b"".join(
            self._event(f"response.{name}", response=self._now())
            for name in ("created", "in_progress")
        )

    def _finish(self, reason: str) -> bytes:
        self._reason = reason
        frames = self._close()
        if not any(one["type"] != "reasoning" for one in self._output):
            frames += self._open_message() + self._close()
        return frames

    def _ending(self, usage: Mapping[str, int]) -> bytes:
        found = self._now(self._reason, usage)
        return self._event(f"response.{found['status']}", response=found)

    def whole(self, reply: Reply) -> object:
        self._params[DROPPED] = reply.dropped_messages
        calls = [call.to_dict() for call in reply.calls.get(0, [])]
        entries = self._listed(reply.tokens.get(0, []))
        reason = reply.finished[0].reason
        self._output = items_of(
            self._past.id,
            reply.reasoning.get(0, ""),
            reply.texts.get(0, ""),
            calls,
            reason,
            entries,
            self._params.get(CUSTOM, ()),
        )
        return self._now(reason, _counted(reply.usage))

    def failure(self, error: RequestError) -> bytes:
        found = self._now()
        found["status"] = "failed"
        found["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=found)

    def _now(
        self,
        reason: str | None = None,
        usage: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        return document_of(
            self._call,
            self._past.id,
            self._past.created,
            self._params,
            self._output if reason else [],
            reason,
            usage,
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        if number <= self._after:
            return b""
        said = {"type": kind, "sequence_number": number, **fields}
        return sse(said, kind)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        """Makes an event of the item that grows."""
        assert self._open is not None
        place = {"output_index": len(self._output), "item_id": self._open["id"]}
        return self._event(kind, **place, **fields)

    def _listed(self, tokens: Sequence[Token]) -> list[Any]:
        if self._logprobs is None:
            return []
        return [self._logprobs.entry(t) for t in tokens if has_logprob(t)]

    def _token(self, token: Token) -> bytes:
        if token.reasoning:
            thoughts = self._thought(token.reasoning)
            if not token.text:
                return thoughts
            return thoughts + self._token(
                dataclasses.replace(token, reasoning="")
            )
        entries = [*self._entries, *self._listed([token])]
        if self._open is None or self._open["type"] != "message":
            if not token.text.strip():
                self._entries = entries
                return b""
            frames = self._close() + self._open_message()
        else:
            frames = b""
        if not token.text and not entries:
            return b""
        assert self._open is not None
        self._entries = []
        part = self._open["content"][0]
        part["text"] += token.text
        part["logprobs"] += entries
        return frames + self._of_item(
            "response.output_text.delta",
            content_index=0,
            delta=token.text,
            logprobs=without_bytes(entries),
        )

    def _thought(self, text: str) -> bytes:
        frames = b""
        if self._open is None or self._open["type"] != "reasoning":
            frames += self._close()
            number = len(self._output)
            frames += self._begin(thought_item(self._past.id, number, ""))
            assert self._open is not None
            self._open["content"] = [{"type": "reasoning_text", "text": ""}]
        assert self._open is not None
        self._open["content"][0]["text"] += text
        return frames + self._of_item(
            "response.reasoning_text.delta", content_index=0, delta=text
        )

    def _called(self, part: CallPart) -> bytes:
        frames = b""
        self._entries = []
        if part.start is not None:
            frames += self._close()
            item = call_item(*part.start, "", "in_progress")
            if part.start[1] in self._params.get(CUSTOM, ()):
                item = custom_item(item)
                self._arguments = ""
            frames += self._begin(item)
        assert self._open is not None
        if self._open["type"] == "custom_tool_call":
            return frames + self._called_with_text(part)
        if part.arguments:
            self._open["arguments"] += part.arguments
            frames += self._of_item(
                "response.function_call_arguments.delta", delta=part.arguments
            )
        if part.end is not None:
            self._open["status"] = "completed"
            frames += self._close()
        return frames

    def _called_with_text(self, part: CallPart) -> bytes:
        """Writes the call of a custom tool. Its text is known once the call is
        whole.
        """
        assert self._open is not None
        self._arguments += part.arguments
        if part.end is None:
            return b""
        self._open["input"] = text_of(self._arguments)
        self._open["status"] = "completed"
        frames = self._of_item(
            "response.custom_tool_call_input.delta", delta=self._open["input"]
        )
        return frames + self._close()

    def _open_message(self) -> bytes:
        id = message_id(self._past.id, len(self._output))
        frames = self._begin(message_item(id, None, "in_progress"))
        assert self._open is not None
        part = text_part("", [])
        frames += self._of_item(
            "response.content_part.added", content_index=0, part=part
        )
        self._open["content"] = [part]
        return frames

    def _begin(self, item: dict[str, Any]) -> bytes:
        self._open = item
        return self._event(
            "response.output_item.added",
            output_index=len(self._output),
            item=item,
        )

    def _close(self) -> bytes:
        """Ends the item that grows, if there is one."""
        item = self._open
        if item is None:
            return b""
        if item["type"] == "message":
            part = item["content"][0]
            frames = self._of_item(
                "response.output_text.done",
                content_index=0,
                text=part["text"],
                logprobs=without_bytes(part["logprobs"]),
            )
            frames += self._of_item(
                "response.content_part.done", content_index=0, part=part
            )
            item["status"] = status_of(self._reason)
        elif item["type"] == "reasoning":
            frames = self._of_item(
                "response.reasoning_text.done",
                content_index=0,
                text=item["content"][0]["text"],
            )
        else:
            if item["status"] == "in_progress":  # cut short
                item["status"] = "incomplete"
            if item["type"] == "custom_tool_call":
                frames = self._of_item(
                    "response.custom_tool_call_input.done",
                    input=item["input"],
                )
            else:
                frames = self._of_item(
                    "response.function_call_arguments.done",
                    name=item["name"],
                    arguments=item["arguments"],
                )
        frames += self._event(
            "response.output_item.done",
            output_index=len(self._output),
            item=item,
        )
        self._output.append(item)
        self._open = None
        return frames
