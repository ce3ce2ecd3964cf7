"""OpenAI's API: responses, which can be gone on from by their ids."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from gemmakv.chat._messages import messages_of
from gemmakv.chat._tools import CallPart
from gemmakv.generation._result import ToolCall
from gemmakv.server._body import Salt
from gemmakv.server._errors import RequestError, invalid, missing
from gemmakv.server._history import BEGUN, DROPPED
from gemmakv.server._http import (
    SSE,
    Call,
    Called,
    Event,
    Finished,
    Reply,
    Started,
    Stream,
    Token,
    serve,
    sse,
)
from gemmakv.server._logprobs import Logprobs, has_logprob
from gemmakv.server._openai import (
    PING,
    refuse,
    renamed,
    table_options,
    thinks,
)
from gemmakv.server._service import ChatRequest, Past
from gemmakv.server._sessions import history_of, kept, owner
from gemmakv.server._store import KEPT, Turn, new_id

_LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text")
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
    input: str | list[dict[str, Any]] | None = None


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
    starting_after: int | None = None


async def create(call: Call) -> None:
    body, document = await call.json(ResponsesBody)
    call.check_model(body.model)
    refuse(document, _NOTHING)
    options = table_options(document)
    for name in ("logprobs", "top_logprobs"):
        options.pop(name, None)
    if body.max_output_tokens is not None:
        options["max_tokens"] = body.max_output_tokens
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
    request, names = _request(call, body, body.input or "", past, {})
    with renamed(document, names):
        count = await call.chat.count(request)
    await call.answer(InputTokens(input_tokens=count))


async def input_items(call: Call) -> None:
    """All that a response was given, also by the responses that it follows;
    of these their output, too.
    """
    history = kept(call)
    query = call.query_of(ItemsQuery)
    with renamed({}, _ID):
        line = await history.on(history.store.line, owner(call), _id(call))
    items: list[dict[str, Any]] = []
    for turn in line:
        items += _input_items(turn)
        if turn is not line[-1]:
            items += _output_items(turn)
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
    format = (body.text or {}).get("format")
    if format is not None:
        options = {**options, "response_format": _format(format)}
    messages, names = _messages(given)
    followed: Past | None = past
    if past.parent is None and past.session is None and past.keep is None:
        if body.instructions:
            system = {"role": "system", "content": body.instructions}
            messages = [system, *messages]
            names = _shifted(names)
        followed = None
    request = ChatRequest(
        tenant=call.owner,
        messages=messages,
        past=followed,
        options=options,
        tools=_tools(body.tools),
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        think=_think(call, body.reasoning),
        truncate=body.truncation == "auto",
        arrived=call.arrived,
    )
    names |= _NAMES | _tool_names(body.tools)
    if body.conversation is not None:
        names["session"] = "conversation"
    return request, names


async def get(call: Call) -> None:
    history = kept(call)
    query = call.query_of(RetrieveQuery)
    with renamed({}, _ID):
        turn = await history.on(history.store.turn, owner(call), _id(call))
    if not query.stream:
        await call.answer(_of_turn(call, turn))
        return
    shape = _Response(call, _past_of(turn), False)
    stream = Stream(call, SSE, b"")
    await stream.write(shape.again(turn, query.starting_after))
    await stream.end()


async def delete(call: Call) -> None:
    history = kept(call)
    with renamed({}, _ID):
        await history.on(history.store.delete_response, owner(call), _id(call))
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
            raise invalid("session", "expected none with conversation")
        session = _conversation(body.conversation)
    if session is not None and body.previous_response_id is not None:
        raise invalid(
            "previous_response_id", "expected none with a conversation"
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
        raise invalid("conversation", "expected the id of a session")
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
        "tools": [_shown_tool(t) for t in _functions(body.tools)],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": body.text or {"format": {"type": "text"}},
        "metadata": body.metadata or {},
        "truncation": body.truncation or "disabled",
        "top_logprobs": body.top_logprobs or 0,
        "prompt_cache_key": body.prompt_cache_key,
        "user": body.user,
    }


# What comes in.


def _messages(
    given: str | list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Input items as messages; calls become part of the message before. And
    what the client calls these and the calls.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}], {"messages[0]": "input"}
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    thoughts = ""
    for i, item in enumerate(given):
        where = f"input[{i}]"
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            content = _content(item.get("content"), f"{where}.content")
            messages.append({"role": item.get("role"), "content": content})
            if thoughts and item.get("role") == "assistant":
                messages[-1]["reasoning"] = thoughts
            thoughts = ""
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
                if thoughts:
                    messages[-1]["reasoning"] = thoughts
            thoughts = ""
            calls = messages[-1].setdefault("tool_calls", [])
            place = f"messages[{len(messages) - 1}].tool_calls[{len(calls)}]"
            names[place] = names[f"{place}.function"] = where
            calls.append(_call_of(item, where))
        elif kind == "function_call_output":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": _text(item, "call_id", where),
                    "content": _content(item.get("output"), f"{where}.output"),
                }
            )
        elif kind == "reasoning":
            parts = _parts_of_thought(item, where)
            thoughts = "\n\n".join([*([thoughts] if thoughts else []), *parts])
        else:
            raise missing(f"{where}.type", str(kind)[:60])
        names.setdefault(f"messages[{len(messages) - 1}]", where)
    if not messages:
        raise invalid("input", "expected at least one message, found none")
    return messages, names


_FIRST = re.compile(r"messages\[(\d+)\]")


def _shifted(names: Mapping[str, str]) -> dict[str, str]:
    """Of messages after the instructions."""
    found = {
        _FIRST.sub(lambda at: f"messages[{int(at[1]) + 1}]", ours): theirs
        for ours, theirs in names.items()
    }
    return found | {"messages[0]": "instructions"}


def _parts_of_thought(item: Mapping[str, Any], where: str) -> list[str]:
    """Of an item that another model may have made, without its text."""
    content = item.get("content") or []
    if not isinstance(content, list):
        raise invalid(f"{where}.content", "expected a list of parts")
    return [
        _text(part, "text", f"{where}.content[{j}]")
        for j, part in enumerate(content)
        if isinstance(part, dict)
    ]


def _content(given: Any, where: str) -> Any:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise invalid(where, "expected a text or a list of parts")
    parts = []
    for i, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXTS:
            raise missing(f"{where}[{i}].type", str(kind)[:60])
        text = _text(part, "text", f"{where}[{i}]")
        parts.append({"type": "text", "text": text})
    return parts


def _call_of(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {
        "id": _text(item, "call_id", where),
        "type": "function",
        "function": {
            "name": _text(item, "name", where),
            "arguments": _text(item, "arguments", where),
        },
    }


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name}", "expected a text")
    return value


def _functions(
    tools: Sequence[Mapping[str, Any]] | None,
) -> list[Mapping[str, Any]]:
    """Those that are functions: others run elsewhere, and nowhere here."""
    return [tool for tool in tools or () if tool.get("type") == "function"]


def _tools(
    given: Sequence[Mapping[str, Any]] | None,
) -> list[dict[str, Any]] | None:
    names = ("name", "description", "parameters", "strict")
    found: list[dict[str, Any]] = [
        {
            "type": "function",
            "function": {n: t[n] for n in names if t.get(n) is not None},
        }
        for t in _functions(given)
    ]
    return found or None


def _tool_names(
    given: Sequence[Mapping[str, Any]] | None,
) -> dict[str, str]:
    """What the client calls the fields of functions."""
    found: dict[str, str] = {}
    for i, tool in enumerate(given or ()):
        if tool.get("type") == "function":
            ours = f"tools[{len(found) // 2}]"
            found[ours] = found[f"{ours}.function"] = f"tools[{i}]"
    return found


def _choice(given: str | dict[str, Any] | None) -> Any:
    if isinstance(given, dict):
        if given.get("type") != "function":
            raise missing("tool_choice.type", str(given.get("type"))[:60])
        return {"type": "function", "function": {"name": given.get("name")}}
    return given


def _think(call: Call, given: Mapping[str, Any] | None) -> bool | None:
    """Agents ask any model for some effort, also one that cannot think."""
    effort = (given or {}).get("effort")
    if effort is None:
        return None
    wanted = thinks("reasoning.effort", effort)
    return wanted if call.chat.can_think else None


def _format(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise invalid("text.format", "expected an object")
    if given.get("type") != "json_schema":
        return given
    schema = {k: v for k, v in given.items() if k != "type"}
    return {"type": "json_schema", "json_schema": schema}


# What goes out.


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
        text = _said(turn)
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
        self._output = _items(
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
        return _document(
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
            logprobs=_without_bytes(entries),
        )

    def _thought(self, text: str) -> bytes:
        frames = b""
        if self._open is None or self._open["type"] != "reasoning":
            frames += self._close()
            number = len(self._output)
            frames += self._begin(_thought_item(self._past.id, number, ""))
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
            frames += self._begin(_call_item(*part.start, "", "in_progress"))
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
        id = _message_id(self._past.id, len(self._output))
        frames = self._begin(_message_item(id, None, "in_progress"))
        assert self._open is not None
        part = _part("", [])
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
                logprobs=_without_bytes(part["logprobs"]),
            )
            frames += self._of_item(
                "response.content_part.done", content_index=0, part=part
            )
            item["status"] = _status(self._reason)
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


def _past_of(turn: Turn) -> Past:
    """What the request of a turn said, also of one of a chat request."""
    params = {
        "instructions": turn.system,
        "previous_response_id": turn.parent,
        "tools": [_shown_tool(tool["function"]) for tool in turn.tools],
        **turn.params,
    }
    return Past(id=turn.id, created=turn.created, params=params)


def _said(turn: Turn) -> str:
    """The text of a turn's answer: its reply without what the client had
    begun it with.
    """
    text: str = turn.reply.get("content") or ""
    return text[turn.params.get(BEGUN, 0) :]


def _output_items(turn: Turn) -> list[dict[str, Any]]:
    reply = turn.reply
    return _items(
        turn.id,
        reply.get("reasoning") or "",
        _said(turn),
        reply.get("tool_calls") or [],
        turn.reason,
        [],
    )


def _input_items(turn: Turn) -> list[dict[str, Any]]:
    """What a turn was given, as items."""
    found: list[dict[str, Any]] = []
    messages = list(turn.messages)
    begun = turn.params.get(BEGUN, 0)
    if begun:
        text = (turn.reply.get("content") or "")[:begun]
        messages.append({"role": "assistant", "content": text})

    def id(kind: str) -> str:
        return f"{kind}_{turn.id.removeprefix('resp_')}_in{len(found)}"

    for message in messages:
        role, text = message["role"], _message_text(message)
        if role == "tool":
            found.append(
                {
                    "id": id("fco"),
                    "type": "function_call_output",
                    "call_id": message.get("tool_call_id"),
                    "output": text,
                    "status": "completed",
                }
            )
            continue
        if role == "assistant":
            if message.get("reasoning"):
                thought = _thought_item("", 0, message["reasoning"])
                found.append({**thought, "id": id("rs")})
            if text or not message.get("tool_calls"):
                part = _part(text, [])
                found.append(_message_item(id("msg"), part, "completed"))
            for call in message.get("tool_calls") or ():
                function = call["function"]
                arguments = function.get("arguments") or {}
                if not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
                item = _call_item(
                    call.get("id") or "", function["name"], arguments,
                    "completed",
                )  # fmt: skip
                found.append({**item, "id": id("fc")})
            continue
        found.append(
            {
                "id": id("msg"),
                "type": "message",
                "role": role,
                "status": "completed",
                "content": [{"type": "input_text", "text": text}],
            }
        )
    return found


def _message_text(message: Mapping[str, Any]) -> str:
    [found] = messages_of([dict(message)])
    return found.text


def _of_turn(call: Call, turn: Turn) -> dict[str, Any]:
    """The answer that it was."""
    past = _past_of(turn)
    return _document(
        call,
        turn.id,
        turn.created,
        past.params,
        _output_items(turn),
        turn.reason,
        turn.usage,
    )


def _document(
    call: Call,
    id: str,
    created: float,
    params: Mapping[str, Any],
    output: list[dict[str, Any]],
    reason: str | None,
    usage: Mapping[str, int] | None,
) -> dict[str, Any]:
    """A response; `reason` is None as long as it runs."""
    status = _status(reason) if reason else "in_progress"
    session = params.get("session")
    cut = status == "incomplete"
    found: dict[str, Any] = {
        "id": id,
        "object": "response",
        "created_at": int(created),
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": call.name,
        "output": output,
        "conversation": None if session is None else {"id": session},
        "max_tool_calls": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "usage": None if usage is None else _usage(usage),
    }
    for name, value in _DEFAULTS.items():
        found[name] = params.get(name, value)
    if found["truncation"] == "auto":
        found[DROPPED] = params.get(DROPPED, 0)
    return found


_DEFAULTS: dict[str, Any] = {
    "instructions": None, "previous_response_id": None,
    "max_output_tokens": None, "tools": [], "tool_choice": "auto",
    "parallel_tool_calls": True, "text": {"format": {"type": "text"}},
    "metadata": {}, "truncation": "disabled", "top_logprobs": 0,
    "prompt_cache_key": None, "user": None,
    "store": True, "temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip


def _usage(given: Mapping[str, int]) -> dict[str, Any]:
    taken, made = given["prompt_tokens"], given["completion_tokens"]
    return {
        "input_tokens": taken,
        "input_tokens_details": {
            "cached_tokens": given["cached_tokens"],
            "cache_write_tokens": given.get("cache_write_tokens", 0),
        },
        "output_tokens": made,
        "output_tokens_details": {
            "reasoning_tokens": given.get("reasoning_tokens", 0)
        },
        "total_tokens": taken + made,
    }


def _items(
    id: str,
    reasoning: str,
    text: str,
    calls: Sequence[Mapping[str, Any]],
    reason: str,
    entries: list[Any],
) -> list[dict[str, Any]]:
    """A reply as output items."""
    found = []
    if reasoning:
        found.append(_thought_item(id, 0, reasoning))
    if text or not calls:
        found.append(
            _message_item(
                _message_id(id, len(found)),
                _part(text, entries),
                _status(reason),
            )
        )
    for call in calls:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        found.append(
            _call_item(call["id"], function["name"], arguments, "completed")
        )
    return found


def _message_id(response: str, number: int) -> str:
    end = f"_{number}" if number else ""
    return "msg_" + response.removeprefix("resp_") + end


def _message_item(
    id: str, part: dict[str, Any] | None, status: str
) -> dict[str, Any]:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [] if part is None else [part],
    }


def _thought_item(response: str, number: int, text: str) -> dict[str, Any]:
    id = _message_id(response, number).removeprefix("msg_")
    content = [{"type": "reasoning_text", "text": text}]
    return {
        "id": f"rs_{id}",
        "type": "reasoning",
        "summary": [],
        "content": content if text else [],
    }


def _without_bytes(entries: Sequence[Mapping[str, Any]]) -> list[Any]:
    """As events of a text have them; its parts have the bytes, too."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [
                {"token": top["token"], "logprob": top["logprob"]}
                for top in entry["top_logprobs"]
            ],
        }
        for entry in entries
    ]


def _part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": logprobs,
    }


def _call_item(
    id: str, name: str, arguments: str, status: str
) -> dict[str, Any]:
    return {
        "id": "fc_" + id.removeprefix("call_"),
        "type": "function_call",
        "call_id": id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def _shown_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "name": function.get("name"),
        "description": function.get("description"),
        "parameters": function.get("parameters"),
        "strict": function.get("strict"),
    }


def _status(reason: str) -> str:
    return "completed" if reason == "stop" else "incomplete"
