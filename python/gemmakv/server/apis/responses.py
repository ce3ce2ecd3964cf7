"""OpenAI's API: responses, which can be gone on from by their ids."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from gemmakv.chat._tools import CallPart
from gemmakv.conversations import KEPT, Turn, new_id
from gemmakv.generation._result import ToolCall
from gemmakv.server.apis.body import Salt
from gemmakv.server.apis.http import (
    SSE,
    Call,
    Called,
    Ended,
    Event,
    Finished,
    Reply,
    Started,
    Stream,
    Token,
    serve,
    sse,
)
from gemmakv.server.apis.logprobs import Logprobs, has_logprob
from gemmakv.server.apis.openai import (
    PING,
    refuse,
    renamed,
    seed_of,
    table_options,
)
from gemmakv.server.apis.response_input import (
    choice_of,
    format_of,
    functions_of,
    messages_in,
    shifted,
    think_of,
    tool_names,
    tools_of,
)
from gemmakv.server.apis.response_items import (
    call_item,
    document_of,
    input_items_of,
    items_of,
    message_id,
    message_item,
    of_turn,
    output_items_of,
    past_of_turn,
    said_in,
    shown_tool,
    status_of,
    text_part,
    thought_item,
    without_bytes,
)
from gemmakv.server.apis.sessions import history_of, kept, owner
from gemmakv.server.service.errors import (
    RequestError,
    invalid,
    refuse_others,
    unexpected,
)
from gemmakv.server.service.history import DROPPED
from gemmakv.server.service.requests import ChatRequest, Past

_LOGPROBS = "message.output_text.logprobs"
_NOTHING: dict[str, tuple[Any, ...]] = {
    "background": (False,), "prompt": (),
    "n": (1,), "messages": (), "response_format": (), "grammar": ("",),
    "context_management": ([],),
}  # fmt: skip
_NAMES = {
    "max_tokens": "max_output_tokens", "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}  # fmt: skip
_ID = {"previous_response_id": "response_id"}


class _Common(msgspec.Struct, kw_only=True):
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


class InputTokensBody(_Common, kw_only=True):
    """`max_output_tokens` is ours: what `truncation` makes room for."""

    input: str | list[dict[str, Any]] | None = None
    max_output_tokens: int | None = None


class InputTokens(msgspec.Struct, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponsesBody(_Common, kw_only=True):
    input: str | list[dict[str, Any]]
    stream: bool | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    seed: int | None = None
    cache_salt: Salt | None = None


class ItemsQuery(msgspec.Struct, kw_only=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class ItemList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class RetrieveQuery(msgspec.Struct, kw_only=True):
    stream: bool | None = None
    starting_after: Annotated[int, msgspec.Meta(ge=0)] | None = None


async def create(call: Call) -> None:
    body, document = await call.json(ResponsesBody)
    call.check_model(body.model)
    refuse(document, _NOTHING)
    options = table_options(document)
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
    keeps = history_of(call.chat) is not None and body.store is not False
    past = _past(
        call,
        body,
        {"store": body.store},
        keeps,
        _echoed(call, body, options),
    )
    request, names = _request(call, body, body.input, past, options)
    request = dataclasses.replace(
        request, tenant=call.owner_of(body.cache_salt)
    )
    shape = _Response(call, past, wants_logprobs)
    if body.max_output_tokens is None:  # its name in the other routes
        del names["max_tokens"]
    with renamed(document, names):
        await serve(call, request, shape, bool(body.stream))


async def input_tokens(call: Call) -> None:
    """What `create` would read."""
    body, document = await call.json(InputTokensBody)
    call.check_model(body.model)
    refuse(document, _NOTHING)
    past = _past(call, body, {}, False, {})
    options = {}
    if body.max_output_tokens is not None:
        options["max_tokens"] = body.max_output_tokens
    request, names = _request(call, body, body.input or "", past, options)
    with renamed(document, names):
        count = await call.chat.count(request)
        call.chat.check_length(count, True)
    await call.answer(InputTokens(input_tokens=count))


async def input_items(call: Call) -> None:
    """All that a response was given, also by the responses that it follows;
    of these their output, too.
    """
    history = kept(call)
    query = call.query_of(ItemsQuery)
    with renamed({}, _ID):
        line = await history.on(
            history.store.turns.line, owner(call), _id(call)
        )
    items: list[dict[str, Any]] = []
    for turn in line:
        items += input_items_of(turn)
        if turn is not line[-1]:
            items += output_items_of(turn)
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        places = [i for i, one in enumerate(items) if one["id"] == query.after]
        if not places:
            raise invalid(
                "after",
                f"expected the id of an item, found {query.after[:60]!r}",
            )
        items = items[places[0] + 1 :]
    shown = items[: query.limit]
    await call.answer(
        ItemList(
            data=shown,
            first_id=shown[0]["id"] if shown else None,
            last_id=shown[-1]["id"] if shown else None,
            has_more=len(items) > len(shown),
        )
    )


def _request(
    call: Call,
    body: _Common,
    given: str | list[dict[str, Any]],
    past: Past,
    options: dict[str, Any],
) -> tuple[ChatRequest, dict[str, str]]:
    """What is read, and what the client calls its fields."""
    refuse_others("text", body.text, ("format", "verbosity"))
    format = (body.text or {}).get("format")
    if format is not None:
        options = {**options, "response_format": format_of(format)}
    messages, names = messages_in(given)
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
        tools=tools_of(body.tools),
        tool_choice=choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        think=think_of(call, body.reasoning),
        truncate=body.truncation == "auto",
        arrived=call.arrived,
    )
    names |= _NAMES | tool_names(body.tools)
    if body.conversation is not None:
        names["session"] = "conversation"
    return request, names


async def get(call: Call) -> None:
    history = kept(call)
    query = call.query_of(RetrieveQuery)
    if query.starting_after is not None and not query.stream:
        raise invalid(
            "starting_after",
            f"expected stream=true with it, found {query.starting_after} "
            "without",
        )
    with renamed({}, _ID):
        turn = await history.on(history.store.turns.get, owner(call), _id(call))
    if not query.stream:
        await call.answer(of_turn(call, turn))
        return
    shape = _Response(call, past_of_turn(turn), False)
    stream = Stream(call, SSE, PING)
    try:
        await stream.write(shape.again(turn, query.starting_after))
        await stream.end()
    finally:
        await stream.close()


async def delete(call: Call) -> None:
    history = kept(call)
    with renamed({}, _ID):
        await history.on(
            history.store.turns.delete_response, owner(call), _id(call)
        )
    await call.answer({"id": _id(call), "object": "response", "deleted": True})


def _id(call: Call) -> str:
    params: Mapping[str, str] = call.scope["path_params"]
    return params["response"]


def _past(
    call: Call,
    body: _Common,
    asks: Mapping[str, object],
    keeps: bool,
    params: dict[str, Any],
) -> Past:
    """What the request follows. `asks`: what else needs a server that keeps
    conversations, if it is true; `keeps`: whether the turn is kept.
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


def _echoed(
    call: Call, body: ResponsesBody, options: Mapping[str, Any]
) -> dict[str, Any]:
    """What answers say of the request."""
    defaults = {"temperature": 1.0, "top_p": 1.0, **call.chat.defaults}
    defaults |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, **options}
    names = (
        "temperature", "top_p", "presence_penalty", "frequency_penalty",
    )  # fmt: skip
    return {
        **{name: defaults[name] for name in names},
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        "tools": [shown_tool(t) for t in functions_of(body.tools)],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": body.text or {"format": {"type": "text"}},
        "metadata": body.metadata or {},
        "truncation": body.truncation or "disabled",
        "top_logprobs": body.top_logprobs or 0,
        "prompt_cache_key": body.prompt_cache_key,
        "user": body.user,
    }


class _Response:
    """The answer to one request: a shape of `serve`."""

    kind = SSE
    ping = PING

    def __init__(self, call: Call, past: Past, logprobs: bool) -> None:
        self._call = call
        self._past = past
        self._params = dict(past.params)
        self._logprobs = Logprobs(call.chat.tokenizer) if logprobs else None
        self._number = 0
        self._after = -1  # events up to this number are not told
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item that grows
        self._entries: list[Any] = []  # of tokens without text so far
        self._reason = "stop"

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
        return self._ending(
            {
                "prompt_tokens": event.prompt_tokens,
                "completion_tokens": event.completion_tokens,
                "cached_tokens": event.cached_tokens,
                "cache_write_tokens": event.cache_write_tokens,
                "reasoning_tokens": event.reasoning_tokens,
            }
        )

    def again(self, turn: Turn, after: int | None) -> bytes:
        """The stream of a response that is over, its texts in one piece;
        without events up to number `after`.
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
        shown = reply.usage
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
        )
        return self._now(
            reason,
            {
                "prompt_tokens": shown.prompt_tokens,
                "completion_tokens": shown.completion_tokens,
                "cached_tokens": shown.cached_tokens,
                "cache_write_tokens": shown.cache_write_tokens,
                "reasoning_tokens": shown.reasoning_tokens,
            },
        )

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
        """An event of the item that grows."""
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
                msgspec.structs.replace(token, reasoning="")
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
            frames += self._begin(call_item(*part.start, "", "in_progress"))
        assert self._open is not None
        if part.arguments:
            self._open["arguments"] += part.arguments
            frames += self._of_item(
                "response.function_call_arguments.delta", delta=part.arguments
            )
        if part.end is not None:
            self._open["status"] = "completed"
            frames += self._close()
        return frames

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
