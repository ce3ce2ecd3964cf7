"""Anthropic's API: messages, count_tokens."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gemmakv.chat._tools import CallPart
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
    Token,
    serve,
    sse,
)
from gemmakv.server.apis.openai import refuse, renamed, thinks
from gemmakv.server.apis.sessions import named, past_of
from gemmakv.server.service.diagnostics import Fingerprint, fingerprint
from gemmakv.server.service.errors import (
    RequestError,
    invalid,
    missing,
    refuse_others,
    thoughtless,
    unexpected,
)
from gemmakv.server.service.requests import ChatRequest, whole

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error",
    403: "permission_error", 404: "not_found_error", 405: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error",
    500: "api_error", 503: "overloaded_error",
}  # fmt: skip
_OVERLOADED = 529  # the original's status for it
_PING = sse({"type": "ping"}, "ping")
# It differs in every request of one client, and says nothing to a model.
_BILLING = "x-anthropic-billing-header:"
_NAMES = {
    "stop": "stop_sequences",
}
_ROLES = ("user", "assistant", "system", "developer")
_TOOL_NAMES = {"name": "name", "parameters": "input_schema"}

_NOTHING: dict[str, tuple[Any, ...]] = {
    "mcp_servers": ([],), "container": (),
}  # fmt: skip
_CHOICE = ("type", "name", "disable_parallel_tool_use")
# Edits that take old thoughts out of a conversation, in which none are left.
_NO_EDITS = "clear_thinking_"


class DiagnosticsPart(msgspec.Struct, kw_only=True):
    previous_message_id: str | None = None


class CountBody(msgspec.Struct, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    session: str | None = None


class MessagesBody(CountBody, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: Salt | None = None
    diagnostics: DiagnosticsPart | None = None


async def messages(call: Call) -> None:
    body, document = await call.json(MessagesBody)
    call.check_model(body.model)
    refuse(document, _NOTHING)
    _check_hints(document)
    endless = body.max_tokens == -1  # as much as fits
    if body.max_tokens < 1 and not endless:
        raise invalid(
            "max_tokens",
            f"expected at least 1, or -1 for no limit, found {body.max_tokens}",
        )
    format, said = _format(document)
    options = {
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
        "deadline": document.get("deadline"),
        "response_format": format,
    }
    think = _think(call, document, None if endless else body.max_tokens)
    request, places = _request(call, body, think)
    request = dataclasses.replace(
        request,
        tenant=call.owner_of(body.cache_salt),
        options={k: v for k, v in options.items() if v is not None},
    )
    names = _names(body, places, said)
    with renamed({}, names):
        plain = not request.tools and not request.think
        shape = _Messages(call, plain, named(request.past))
        await shape.diagnosed(call, body, request)
        await serve(call, request, shape, bool(body.stream))


async def count_tokens(call: Call) -> None:
    body, document = await call.json(CountBody)
    call.check_model(body.model)
    refuse(document, _NOTHING)
    _check_hints(document)
    format, said = _format(document)
    request, places = _request(call, body, _think(call, document, None))
    request = dataclasses.replace(
        request, options={} if format is None else {"response_format": format}
    )
    names = _names(body, places, said)
    with renamed({}, names):
        count = await call.chat.count(request)
    await call.answer({"input_tokens": count})


def _request(
    call: Call, body: CountBody, think: bool | None
) -> tuple[ChatRequest, list[str]]:
    """What is read, and what the client calls each message of it."""
    conversation, places = _conversation(body)
    parts = _system(body)
    system = None
    if parts and body.session is not None:
        # Said with every request, and once in a conversation.
        system = "\n".join(part["text"] for part in parts)
    elif parts:
        conversation.insert(0, {"role": "system", "content": parts})
        places.insert(0, "system")
    request = ChatRequest(
        tenant=call.owner,
        messages=conversation,
        past=past_of(call, body.session, system),
        tools=_tools(body),
        tool_choice=_choice(body),
        parallel_tool_calls=not (body.tool_choice or {}).get(
            "disable_parallel_tool_use"
        ),
        think=think,
        arrived=call.arrived,
    )
    return request, places


def error_style(error: RequestError, request_id: str) -> tuple[int, object]:
    kind = _TYPES.get(error.status, "invalid_request_error")
    status = _OVERLOADED if error.status == 503 else error.status
    return status, {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": request_id,
    }


def _check_hints(document: Mapping[str, Any]) -> None:
    """Raises RequestError for what asks for edits of the conversation, or for
    an effort that is none.
    """
    config = document.get("output_config")
    if isinstance(config, dict) and config.get("effort") is not None:
        thinks("output_config.effort", config["effort"])
    managed = document.get("context_management")
    edits = managed.get("edits") if isinstance(managed, dict) else managed
    if edits is None:
        return
    if not isinstance(edits, list):
        raise unexpected("context_management.edits", "a list", edits)
    for i, edit in enumerate(edits):
        kind = str(edit.get("type") if isinstance(edit, dict) else None)
        if not kind.startswith(_NO_EDITS):
            raise missing(f"context_management.edits[{i}].type", kind[:60])


def _names(
    body: CountBody, places: Sequence[str], format: str
) -> dict[str, str]:
    """Maps fields to the client's names for them; `format` is the name of the
    field that states the form of the reply.
    """
    names = dict(_NAMES)
    for ours in ("response_format", "response_format.json_schema"):
        names[ours] = format
    for i, place in enumerate(places):
        names[f"messages[{i}]"] = place
    for i in range(len(body.tools or [])):
        for ours, theirs in _TOOL_NAMES.items():
            names[f"tools[{i}].function.{ours}"] = f"tools[{i}].{theirs}"
    return names


def _think(
    call: Call, document: Mapping[str, Any], max_tokens: int | None
) -> bool | None:
    """Whether the model is to think; None where nothing is said of it."""
    given = document.get("thinking")
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind not in ("enabled", "adaptive", "disabled"):
        raise unexpected(
            "thinking.type", "'disabled', 'adaptive' or 'enabled'", kind
        )
    if kind == "disabled":
        return False
    if not call.chat.can_think:
        if kind == "enabled":
            raise thoughtless(
                "thinking.type", "'disabled' or 'adaptive'", "'enabled'"
            )
        return None  # as much as it needs, which is none
    budget = whole(given.get("budget_tokens"))
    if kind == "enabled" and (
        type(budget) is not int
        or budget < 1
        or max_tokens is not None
        and budget >= max_tokens
    ):
        raise invalid(
            "thinking.budget_tokens",
            f"expected a number below max_tokens, found {str(budget)[:40]}",
        )
    return True


def _format(
    document: Mapping[str, Any],
) -> tuple[dict[str, Any] | None, str]:
    """`output_config.format`, or `output_format` as it was called before, and
    what the client calls it.
    """
    config = document.get("output_config")
    given, said = document.get("output_format"), "output_format"
    if config is not None and not isinstance(config, Mapping):
        raise unexpected("output_config", "an object", config)
    refuse_others("output_config", config, ("effort", "format"))
    wanted = None if config is None else config.get("format")
    if wanted is not None:
        if given not in (None, wanted):
            raise invalid(
                "output_format",
                "expected it or output_config.format, found both",
            )
        given, said = wanted, "output_config.format"
    if given is None:
        return None, said
    if not isinstance(given, Mapping) or given.get("type") != "json_schema":
        raise unexpected(said, "{'type': 'json_schema', ...}", given)
    refuse_others(said, given, ("type", "schema"))
    schema = {"schema": given.get("schema")}
    return {"type": "json_schema", "json_schema": schema}, said


def _tools(body: CountBody) -> list[dict[str, Any]] | None:
    """As OpenAI has them."""
    found = []
    for i, tool in enumerate(body.tools or []):
        kind = tool.get("type")
        if kind not in (None, "custom"):
            raise missing(f"tools[{i}].type", str(kind)[:40])
        function: dict[str, Any] = {
            k: tool.get(k) for k in ("name", "description", "strict")
        }
        function["parameters"] = tool.get("input_schema")
        said = {k: v for k, v in function.items() if v is not None}
        found.append({"type": "function", "function": said})
    return found or None


def _choice(body: CountBody) -> str | None:
    if body.tool_choice is None:
        return None
    refuse_others("tool_choice", body.tool_choice, _CHOICE)
    kind = body.tool_choice.get("type")
    several = body.tool_choice.get("disable_parallel_tool_use")
    if not isinstance(several, bool | None):
        raise unexpected(
            "tool_choice.disable_parallel_tool_use", "true or false", several
        )
    choices = {"auto": "auto", "any": "required", "none": "none"}
    if kind == "tool":
        name = body.tool_choice.get("name")
        if not isinstance(name, str) or not name:
            raise unexpected("tool_choice.name", "the name of a tool", name)
        return name
    if not isinstance(kind, str) or kind not in choices:
        raise invalid(
            "tool_choice.type",
            f"expected auto, any, tool or none, found {str(kind)[:40]!r}",
        )
    return choices[kind]


def _system(body: CountBody) -> list[dict[str, str]]:
    """Parts of what the model is told first."""
    return [
        part
        for part in _parts(body.system or [], "system")
        if not part["text"].startswith(_BILLING)
    ]


def _conversation(
    body: CountBody,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages as templates take them, and what the client calls each."""
    found: list[dict[str, Any]] = []
    places: list[str] = []
    for i, message in enumerate(body.messages):
        role = message.get("role")
        if role not in _ROLES:
            raise invalid(
                f"messages[{i}].role",
                f"expected one of {', '.join(_ROLES)}, found "
                + repr(str(role)[:40]),
            )
        said = _said(message.get("content"), role, f"messages[{i}]")
        found += said
        places += [f"messages[{i}]"] * len(said)
    if not body.messages:
        raise invalid("messages", "expected at least one, found none")
    return found, places


def _said(content: Any, role: str, where: str) -> list[dict[str, Any]]:
    """A turn as templates take it: its results of tools, each a message of
    its own, and the rest of it.
    """
    if isinstance(content, str):
        return [{"role": role, "content": _parts(content, where)}]
    results: list[dict[str, Any]] = []
    texts: list[Any] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    where = f"{where}.content"
    for i, block in enumerate(content if isinstance(content, list) else ()):
        kind = block.get("type") if isinstance(block, Mapping) else None
        here = f"{where}[{i}]"
        if kind == "tool_use" and role == "assistant":
            calls.append(_call_of(block, here))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(_text(block, "thinking", here))
        elif kind == "redacted_thinking" and role == "assistant":
            # Another server's, for whose model alone it can be read.
            _text(block, "data", here)
        elif kind == "tool_result" and role == "user":
            inner = block.get("content") or ""
            parts = _parts(inner, f"{here}.content")
            text = "\n".join(part["text"] for part in parts)
            if block.get("is_error"):
                text = f"error: {text}"
            called = _id(block, "tool_use_id", here)
            results.append(
                {"role": "tool", "content": text, "tool_call_id": called}
            )
        else:
            texts += _parts([block], where, i)
    if not isinstance(content, list):
        raise unexpected(where, "a text or a list of content blocks", content)
    if texts or calls or not results:
        rest: dict[str, Any] = {"role": role, "content": texts}
        if calls:
            rest["tool_calls"] = calls
        if thoughts:
            rest["reasoning"] = "\n\n".join(thoughts)
        results.append(rest)
    return results


def _call_of(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("name"), str):
        raise unexpected(
            f"{where}.name", "the name of a tool", block.get("name")
        )
    if not isinstance(block.get("input", {}), Mapping):
        raise unexpected(f"{where}.input", "an object", block["input"])
    function = {"name": block["name"], "arguments": block.get("input", {})}
    id = _id(block, "id", where)
    return {"id": id, "type": "function", "function": function}


def _id(block: Mapping[str, Any], name: str, where: str) -> str | None:
    """Reads a text of a call that some clients leave out."""
    value = block.get(name)
    return None if value is None else _text(block, name, where)


def _parts(content: Any, where: str, first: int = 0) -> list[dict[str, str]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise unexpected(where, "a text or a list of content blocks", content)
    parts = []
    for i, block in enumerate(content, first):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str):
            raise invalid(f"{where}[{i}].type", "missing: it has to be there")
        if kind != "text":
            raise missing(f"{where}[{i}].type", kind[:40])
        text = _text(block, "text", f"{where}[{i}]")
        parts.append({"type": "text", "text": text})
    return parts


def _text(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise unexpected(f"{where}.{name}", "a text", value)
    return value


class _Messages:
    """One message."""

    kind = SSE
    ping = _PING

    def __init__(
        self, call: Call, plain: bool, named: Mapping[str, Any]
    ) -> None:
        """`plain`: it is text, and nothing else. `named`: fields of its
        own.
        """
        self._plain = plain
        self._open = ""  # the kind of block that is open
        self._blocks = 0
        self._head = {
            "id": "msg_" + secrets.token_hex(12),
            "type": "message",
            "role": "assistant",
            "model": call.name,
            **named,
        }
        self._finished: Finished | None = None
        self._owner = call.owner.label
        self._known = call.chat.diagnostics
        self._made_of: Fingerprint | None = None

    async def diagnosed(
        self, call: Call, body: MessagesBody, request: ChatRequest
    ) -> None:
        """Has the answer tell why the cache had less of the request than of
        the one before it, if the body asks for that.
        """
        if body.diagnostics is None:
            return
        model, shown = str(self._head["model"]), request.messages or ()
        system: object = None
        said = list(shown)
        if said and said[0]["role"] == "system":
            system = said.pop(0)
        elif request.past is not None:
            system = request.past.system
        self._made_of = await call.chat.on_texts(
            fingerprint, body.model or model, system, request.tools, said
        )
        before = body.diagnostics.previous_message_id
        reason = None
        if before is not None:
            reason = self._known.reason(self._owner, before, self._made_of)
        self._head["diagnostics"] = reason and {"cache_miss_reason": reason}

    def _note(self, prompt_tokens: int) -> None:
        if self._made_of is not None:
            self._known.note(
                self._owner, self._head["id"], self._made_of, prompt_tokens
            )

    def frames(self, event: Event) -> bytes:
        if isinstance(event, Started):
            return self._opening(event)
        if isinstance(event, Token):
            frames = b""
            if event.reasoning:
                frames += self._begin(_thinking(""))
                frames += self._delta(
                    {"type": "thinking_delta", "thinking": event.reasoning}
                )
            if event.text:
                frames += self._begin({"type": "text", "text": ""})
                frames += self._delta(
                    {"type": "text_delta", "text": event.text}
                )
            return frames
        if isinstance(event, Called):
            return self._call(event.part)
        if isinstance(event, Finished):
            self._finished = event
            if self._blocks == 0 and not self._open:
                frames = self._begin({"type": "text", "text": ""})
                return frames + self._close()
            return self._close()
        assert isinstance(event, Ended) and self._finished is not None
        self._note(event.prompt_tokens)
        return _frame(
            "message_delta",
            delta=_ending(self._finished),
            usage=_usage(event),
        ) + _frame("message_stop")

    def whole(self, reply: Reply) -> object:
        self._note(reply.usage.prompt_tokens)
        text, calls = reply.texts.get(0, ""), reply.calls.get(0, [])
        content: list[dict[str, Any]] = []
        if reasoning := reply.reasoning.get(0, ""):
            content.append(_thinking(reasoning))
        if text or not calls:
            content.append({"type": "text", "text": text})
        content += [
            {
                "type": "tool_use",
                "id": call.id,
                "name": call.name,
                "input": call.arguments,
            }
            for call in calls
        ]
        return {
            **self._head,
            "content": content,
            **_ending(reply.finished[0]),
            "usage": _usage(reply.usage),
        }

    def failure(self, error: RequestError) -> bytes:
        return sse(error_style(error, "")[1], "error")

    def _opening(self, event: Started) -> bytes:
        # What of the prompt is cached shows when it has been read; the last
        # event says it.
        usage = {
            "input_tokens": event.prompt_tokens,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "output_tokens": 0,
        }
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        frames = _frame("message_start", message=message)
        if self._plain:
            frames += self._begin({"type": "text", "text": ""})
        return frames + _PING

    def _call(self, part: CallPart) -> bytes:
        frames = b""
        if part.start is not None:
            block: dict[str, Any] = {"type": "tool_use", "input": {}}
            block["id"], block["name"] = part.start
            frames += self._begin(block)
        if part.arguments:
            delta = {"type": "input_json_delta", "partial_json": part.arguments}
            frames += self._delta(delta)
        if part.end is not None:
            frames += self._close()
        return frames

    def _begin(self, block: dict[str, Any]) -> bytes:
        """A block, unless it is of text or thoughts that go on."""
        kind = block["type"]
        if self._open == kind and kind in ("text", "thinking"):
            return b""
        frames = self._close()
        self._open = block["type"]
        return frames + _frame(
            "content_block_start", index=self._blocks, content_block=block
        )

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _frame("content_block_delta", index=self._blocks, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        self._blocks += 1
        return _frame("content_block_stop", index=self._blocks - 1)


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _frame(kind: str, **fields: object) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _ending(finished: Finished) -> dict[str, Any]:
    reason = "max_tokens"
    if finished.reason == "stop":
        reason = "end_turn" if finished.stop is None else "stop_sequence"
        reason = "tool_use" if finished.calls else reason
    return {"stop_reason": reason, "stop_sequence": finished.stop}


def _usage(ended: Ended) -> dict[str, Any]:
    cached, written = ended.cached_tokens, ended.cache_write_tokens
    return {
        "input_tokens": ended.prompt_tokens - cached - written,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": written,
        "output_tokens": ended.completion_tokens,
    }
